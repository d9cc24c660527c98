"""`freshet evaluate`, `compare`, `inspect`: figures by a plain oracle, which events are judged, what is refused."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.cli.main import app
from services.offline.datasets import DatasetUnavailableError, Interactions, SimulatorConfig, load_dataset, simulate
from services.offline.evaluation.bundles import evaluate as module
from services.offline.evaluation.bundles.compare import compare
from services.offline.evaluation.bundles.evaluate import evaluate
from services.offline.evaluation.bundles.inspect import inspect
from services.offline.evaluation.bundles.judged import judged_by
from services.offline.evaluation.bundles.page import page
from services.offline.evaluation.engine.served_scorer import ServedScorer
from services.offline.training import PRESETS
from services.offline.training.fit import LEAVE_ONE_OUT, NONE, TIME
from services.offline.training.presets import with_sasrec
from services.offline.training.run import run_training
from services.offline.training.sequences import Histories
from tests.unit.offline.training.training_scene import CONFIG

WORLD = SimulatorConfig(num_users=80, num_items=120, num_topics=6, mean_events_per_user=20, days=30)


def world() -> Interactions:
    return simulate(WORLD).keep_frequent(min_per_item=1)


def trained(out: Path, data: Interactions, split: str, seed: int = 0, *, export: bool = True) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "quick", with_sasrec(CONFIG))  # one graph to export, not two
        run_training(out=out, interactions=data, head="dot", epochs=1, split=split, seed=seed, export=export)
    return out


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, data = tmp_path_factory.mktemp("bundles"), world()
    past = data.select(slice(0, len(data) // 2))
    return {
        "last": trained(folder / "last", data, LEAVE_ONE_OUT),
        "other": trained(folder / "other", data, LEAVE_ONE_OUT, seed=1),
        "past": trained(folder / "past", past, NONE),
        "time": trained(folder / "time", data, TIME, export=False),
    }


def by_user(data: Interactions) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for user, item in zip(data.users.tolist(), data.items.tolist(), strict=True):
        found.setdefault(data.user_ids[user], []).append(data.item_ids[item])
    return found


def asked(data: Interactions) -> list[str]:
    """Whose last event is predicted: three events and more, the last one rated above three stars."""
    last = {data.user_ids[user]: value for user, value in zip(data.users.tolist(), data.values.tolist(), strict=True)}
    return [user for user in data.user_ids if len(by_user(data).get(user, ())) >= 3 and last[user] > 3]


def told(ranks: list[int]) -> dict[str, float]:
    """The oracle's row."""
    hits = {f"hr@{k}": sum(rank < k for rank in ranks) / len(ranks) for k in (1, 10, 50, 200)}
    gain = sum(1 / math.log2(rank + 2) for rank in ranks if rank < 10) / len(ranks)
    return {**hits, "ndcg@10": gain, "mrr": sum(1 / (rank + 1) for rank in ranks) / len(ranks)}


def test_popularity_and_what_it_recommends_are_those_of_a_plain_walk(bundles: dict[str, Path]) -> None:
    data, report = world(), evaluate(bundles["last"], world())
    histories = {user: by_user(data)[user] for user in asked(data)}
    counts = Counter(item for items in by_user(data).values() for item in (items[:-1] if len(items) >= 3 else items))
    order = sorted(data.item_ids, key=lambda item: (-counts[item], data.item_ids.index(item)))
    ranks, shown, took = [], [], []
    for items in histories.values():
        *before, wanted = items
        ranking = [item for item in order if item == wanted or item not in before]
        ranks.append(ranking.index(wanted))
        shown += [item for item in order if item not in before][:10]
        took.append(counts[wanted])
    row = next(row for row in report["rows"] if row["name"] == "popularity")
    assert {name: value[0] for name, value in row["metrics"].items()} == pytest.approx(told(ranks), abs=1e-5)
    assert (report["events"], report["users"]) == (len(ranks), len(ranks))
    assert row["coverage"] == pytest.approx(len(set(shown)) / len(order), abs=1e-5)
    total = sum(counts.values()) + len(order)
    novelty = sum(-math.log2((counts[item] + 1) / total) for item in shown) / len(shown)
    assert row["novelty"] == pytest.approx(novelty, abs=1e-4)
    bias = sum(counts[item] for item in shown) / len(shown) / (sum(took) / len(took))
    assert row["popularity_bias"] == pytest.approx(bias, abs=1e-4)


def model_ranks(bundle: Bundle, data: Interactions) -> list[int]:
    """Of each user's last event, by sorting what the bundle scores."""
    histories = Histories.of(data)
    users = np.array([data.user_ids.index(user) for user in asked(data)])
    events = histories.offsets[users + 1] - 1
    scores = ServedScorer(bundle, data).scores(histories, events, users)
    found = []
    for row, (user, event) in enumerate(zip(users.tolist(), events.tolist(), strict=True)):
        had = set(histories.items[histories.offsets[user] : event].tolist())
        wanted = int(histories.items[event])
        left = [item for item in range(data.num_items) if item == wanted or item not in had]
        found.append(sorted(left, key=lambda item: (-scores[row, item], item)).index(wanted))
    return found


def test_the_models_metrics_and_differences_are_those_of_sorted_scores(bundles: dict[str, Path]) -> None:
    report = evaluate(bundles["last"], world())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["model", "item-kNN", "popularity", "recent popularity", "EASE"]
    mine = told(model_ranks(load_bundle(bundles["last"]), world()))
    assert {name: value[0] for name, value in rows["model"]["metrics"].items()} == pytest.approx(mine, abs=1e-5)
    for row in report["rows"][1:]:
        for metric, (mean, low, high) in row["model_minus"].items():
            assert mean == pytest.approx(mine[metric] - row["metrics"][metric][0], abs=3e-5)
            assert low <= mean <= high
    # Training measured the model without half precision.
    measured = load_bundle(bundles["last"]).manifest.metrics
    assert measured["item_knn"]["hr@10"] == pytest.approx(rows["item-kNN"]["metrics"]["hr@10"][0], abs=1e-4)
    assert measured["popularity"]["mrr"] == pytest.approx(rows["popularity"]["metrics"]["mrr"][0], abs=1e-4)


def test_segments_count_their_events(bundles: dict[str, Path]) -> None:
    found = {(row["question"], row["segment"]): row["events"] for row in evaluate(bundles["last"], world())["segments"]}
    lengths = [len(by_user(world())[user]) - 1 for user in asked(world())]
    expected = {
        "fewer than 10 events": sum(one < 10 for one in lengths),
        "10 to 49": sum(10 <= one < 50 for one in lengths),
        "50 or more": sum(one >= 50 for one in lengths),
    }
    told = {kind: count for (question, kind), count in found.items() if question == "history"}
    assert told == {kind: count for kind, count in expected.items() if count >= module.MIN_EVENTS}


def test_data_that_was_not_trained_on_is_judged_from_the_newest_learnt_event_on(bundles: dict[str, Path]) -> None:
    data, bundle = world(), load_bundle(bundles["past"])
    newest = bundle.manifest.data["newest_time"]
    judged = judged_by([bundle], data)
    split = judged.split
    rows = np.flatnonzero(data.timestamps > newest)
    assert split.test_rows.tolist() == [row for row in rows.tolist() if data.values[row] > 3]
    assert split.train_rows.tolist() == list(range(int(rows[0])))
    assert f"{rows[0]:,} earlier events may have been learnt and are history alone" in judged.note
    # All of the bundle's items compete, whatever the data has of them.
    few = judged_by([bundle], data.select(rows[:40]).keep_frequent(min_per_item=1)).split.interactions
    assert few.item_ids[: bundle.num_items] == list(bundle.item_ids)
    assert [few.item_ids[item] for item in few.items] == [data.item_ids[item] for item in data.items[rows[:40]]]


def test_a_time_split_is_judged_by_what_training_held_out(bundles: dict[str, Path]) -> None:
    data, bundle = world(), load_bundle(bundles["time"])
    split = judged_by([bundle], data).split
    later = data.timestamps >= bundle.manifest.data["split_time"]
    assert split.test_rows.tolist() == np.flatnonzero(later & (data.values > 3)).tolist()


def test_data_without_anything_new_is_refused_and_says_from_when(bundles: dict[str, Path]) -> None:
    old = world().select(slice(0, 300))
    with pytest.raises(
        ValueError, match=r"all 300 events of .* overlap the training data: model .* has learnt up to 20"
    ):
        evaluate(bundles["past"], old)
    with pytest.raises(ValueError, match=r"is not the data that model .* was trained on, and has no times"):
        evaluate(bundles["past"], replace(old, has_times=False))


def test_without_one_event_that_counts_nothing_is_judged(bundles: dict[str, Path]) -> None:
    data = world()
    first = int(
        np.searchsorted(data.timestamps, load_bundle(bundles["past"]).manifest.data["newest_time"], side="right")
    )
    later = np.arange(len(data)) >= first
    shown = replace(data, types=later.astype(np.int16), type_names=[data.type_names[0], "dislike"])
    with pytest.raises(
        ValueError, match=r"none of the .* events to predict counts by the event schema \(types: .*dislike"
    ):
        evaluate(bundles["past"], shown)


def test_without_a_past_there_are_no_baselines_and_the_page_says_so(bundles: dict[str, Path]) -> None:
    data = world()
    newest = load_bundle(bundles["past"]).manifest.data["newest_time"]
    report = evaluate(bundles["past"], data.select(data.timestamps > newest))
    assert [row["name"] for row in report["rows"]] == ["model"]
    assert "no event from before" in report["left_out"]["baselines"]
    assert "no event from before" in page(report)


def test_ease_is_left_out_where_it_takes_longer_than_its_budget(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ease_seconds", lambda num_items: 31.0)
    report = evaluate(bundles["last"], world())
    assert "EASE" not in {row["name"] for row in report["rows"]}
    assert report["left_out"]["EASE"].endswith("items would take 31 s; allowed: 30 s")


def test_two_bundles_are_compared_event_by_event(bundles: dict[str, Path]) -> None:
    data, paths = world(), (bundles["last"], bundles["other"])
    report = compare(*paths, data)
    ranks = [model_ranks(load_bundle(path), data) for path in paths]
    for metric, value in told(ranks[1]).items():
        assert report["metrics"]["b"][metric][0] == pytest.approx(value, abs=1e-5)
        assert report["b_minus_a"][metric][0] == pytest.approx(value - told(ranks[0])[metric], abs=1e-5)
    people = {one["user"]: one for one in report["people"]}
    assert len(people) == 20
    titles = dict(zip(data.item_ids, data.titles, strict=True))
    order = {user: number for number, user in enumerate(asked(data))}
    for user, one in people.items():
        *before, wanted = by_user(data)[user]
        assert one["took"] == titles[wanted]
        assert one["had"] == [titles[item] for item in before[-3:]]
        assert [one[name]["rank"] - 1 for name in ("a", "b")] == [found[order[user]] for found in ranks]
        assert not {titles[item] for item in before} & set(one["a"]["first"])
        if one["a"]["rank"] <= 5:
            assert one["a"]["first"][one["a"]["rank"] - 1] == one["took"]
    alike = compare(paths[0], paths[0], data)
    assert alike["b_minus_a"]["hr@10"] == [0, 0, 0]
    assert not any(row["differs"] for row in alike["segments"])


def test_bundles_of_other_catalogues_are_not_compared(bundles: dict[str, Path], tmp_path: Path) -> None:
    data = world()
    few = trained(
        tmp_path / "few", data.select(data.items > 4).keep_frequent(min_per_item=1), LEAVE_ONE_OUT, export=False
    )
    with pytest.raises(
        ValueError, match=r"different catalogues: 5 items are only in .*last .* and 0 items are only in"
    ):
        compare(bundles["last"], few, data)


def test_a_bundle_is_inspected(bundles: dict[str, Path]) -> None:
    report, bundle = json.loads(json.dumps(inspect(bundles["last"]))), load_bundle(bundles["last"])
    assert report["files"] == {name: (bundles["last"] / name).stat().st_size for name in bundle.manifest.files}
    assert report["shapes"] == {"items": list(bundle.item_states.components.shape)}
    vectors = bundle.item_states.components[:, 0].astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for row in report["nearest"]:
        item = bundle.item_index[row["item"].split()[0]]
        cosines = sorted(
            (float(vectors[item] @ one) for place, one in enumerate(vectors) if place != item), reverse=True
        )
        assert [one["cosine"] for one in row["nearest"]] == pytest.approx(cosines[:5], abs=1e-3)
    assert [row["events"] for row in report["nearest"]] == sorted(bundle.counts.tolist(), reverse=True)[:5]


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_commands_print_and_write_a_page_of_its_own(bundles: dict[str, Path], tmp_path: Path) -> None:
    table = tmp_path / "events.csv"
    data = world()
    rows = zip(data.users.tolist(), data.items.tolist(), data.timestamps.tolist(), strict=True)
    lines = [f"{data.user_ids[user]},{data.item_ids[item]},{at}" for user, item, at in rows]
    table.write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n", encoding="utf-8")
    out = tmp_path / "page.html"
    done = run("evaluate", bundles["past"], "--data", table, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["page"] == str(out)
    html = out.read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 2
    assert 'src="http' not in html
    assert "href" not in html
    for row in report["rows"]:
        assert f"{row['metrics']['ndcg@10'][0]:.4f}" in html
    assert "EASE" in run("evaluate", bundles["past"], "--data", table, "--out", out).output
    done = run("compare", bundles["past"], bundles["past"], "--data", table)
    assert done.exit_code == 0, done.output
    assert "+0.0000 [+0.0000, +0.0000]" in done.output
    assert "trained on" in run("inspect", bundles["past"]).output
    table.write_text("\n".join(["user_id,item_id,timestamp", *lines[:300]]) + "\n", encoding="utf-8")
    done = run("evaluate", bundles["past"], "--data", table, "--out", out)
    assert done.exit_code == 2
    assert "overlap the training data" in done.output


def test_ids_cannot_write_html(bundles: dict[str, Path]) -> None:
    report = evaluate(bundles["past"], replace(world(), name="<script>alert(1)</script>"))
    assert "<script>" not in page(report)


def test_movielens_is_judged_as_training_measured_it(tmp_path: Path) -> None:
    try:
        data = load_dataset("ml-latest-small", download=False)
    except DatasetUnavailableError:
        pytest.skip("ml-latest-small is not on this machine")
    some = data.select(data.users < 150).keep_frequent(min_per_item=1)
    path = trained(tmp_path / "bundle", some, LEAVE_ONE_OUT)
    report, measured = evaluate(path, some), load_bundle(path).manifest.metrics
    assert report["events"] == measured["num_events"]
    rows = {row["name"]: row["metrics"] for row in report["rows"]}
    for mine, theirs in (("popularity", "popularity"), ("item-kNN", "item_knn")):
        found = {name: value[0] for name, value in rows[mine].items()}
        assert found == pytest.approx(measured[theirs], abs=1e-4)
    # Ratings of three stars and less are no targets.
    last = [np.flatnonzero(some.users == user)[-1] for user in np.unique(some.users)]
    assert report["events"] == sum(some.values[row] > 3 for row in last)
