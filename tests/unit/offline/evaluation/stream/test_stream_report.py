"""The whole report on a stream made for tests: every contender, every table, and a page that says what was measured."""

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from stream_scene import ordered_events, untrained

from services.offline.evaluation.common.report import Request
from services.offline.evaluation.stream.page import NEW, page
from services.offline.evaluation.stream.report import run

_CONTENDERS = {"frozen", "XS", "XS, m = 1", "frozen + XL", "XS + XL", "retrained", "popularity", "item-kNN"}


def _request(out: Path, *, quick: bool = False) -> Request:
    return Request(how="freshet bench stream", out=out, quick=quick, seed=0)


def _csv(path: Path) -> str:
    events = ordered_events(num_users=60, events=1000)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "timestamp", "type", "value"])
        for user, item, time, value in zip(events.users, events.items, events.timestamps, events.values, strict=True):
            writer.writerow([events.user_ids[user], events.item_ids[item], time, "rating", value])
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stream")


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    name = _csv(folder / "orders.csv")
    return run(_request(folder / "out"), fit=untrained, datasets=[name], seeds=[0, 1], retrainings=1)


def test_every_contender_is_measured_on_the_same_events(report: dict[str, Any]) -> None:
    kinds = {row["kind"] for row in report["rows"]}
    assert {"all", NEW, "items of the training"} <= kinds
    for kind in kinds:
        rows = [row for row in report["rows"] if row["kind"] == kind]
        assert {row["contender"] for row in rows} == _CONTENDERS
        assert len({(row["events"], row["items"]) for row in rows}) == 1
        for row in rows:
            for metric in ("hr@10", "hr@50", "mrr"):
                mean, low, high = row[metric]
                assert low <= mean + 1e-9
                assert mean <= high + 1e-9


def test_page_json_and_plots_are_written_and_say_the_same(report: dict[str, Any], folder: Path) -> None:
    out = folder / "out"
    assert {path.name for path in out.iterdir()} == {"freshness.md", "freshness.json", "freshness.png"}
    stored = json.loads((out / "freshness.json").read_text(encoding="utf-8"))
    assert stored["rows"] == json.loads(json.dumps(report["rows"]))
    text = (out / "freshness.md").read_text(encoding="utf-8")
    assert text == page(report)
    found = next(row for row in report["rows"] if (row["kind"], row["contender"]) == ("all", "retrained"))
    assert f"{found['hr@10'][0]:.4f}" in text
    for line, following in pairwise(text.splitlines()):
        if line.startswith("|") and following.startswith("|"):
            assert line.count("|") == following.count("|")


def test_a_page_says_below_only_when_the_interval_is(report: dict[str, Any]) -> None:
    def said(low: float, high: float) -> str:
        gap = {"hr@10": [(low + high) / 2, low, high], "mrr": [0.0, -0.1, 0.1]}
        rows = [{**row} for row in report["rows"]]
        for row in rows:
            if (row["kind"], row["contender"]) == ("all", "XS"):
                row["minus frozen"] = gap
        lines = page({**report, "rows": rows}).splitlines()
        return next(line for line in lines if line.startswith("- XS: "))

    assert "HR@10 below frozen" in said(-0.2, -0.1)
    assert "HR@10 above frozen" in said(0.1, 0.2)
    assert "HR@10 not distinguishable from frozen" in said(-0.1, 0.2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"datasets": []}, "datasets"), ({"seeds": []}, "seeds"), ({"retrainings": -1}, "retrainings=-1")],
)
def test_a_request_without_meaning_is_refused(arguments: dict[str, Any], named: str, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"datasets": ["ml-1m"], "seeds": [0], "retrainings": 0, **arguments}
    with pytest.raises(ValueError, match=named):
        run(_request(tmp_path), fit=untrained, **wanted)
