"""Tables as people have them: `data validate`, `train` and `import` read the same, name the same and refuse the same.

In every command: rows in the file = rows used + rows that it names as left out.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.offline.backfill import jobs
from services.offline.backfill.bulk_import import ImportReport
from services.offline.backfill.past_interactions import PastInteractions, check
from services.offline.datasets import load_dataset
from tests.unit.cli.own_tables import TABLES, Event, Own, events, lines

TRAINING = ("--head", "dot", "--epochs", "1", "--split", "none", "--no-export")
by_name = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"})


def account(table: Own, *, accepted: bool, imported: bool = False) -> dict[str, Any]:
    """What a command must say of the rows."""
    left_out = {reason: count for reason, count in table.left_out.items() if not (imported and reason in table.kept)}
    if table.understood is not None and not accepted:
        left_out = {"refused": table.rows}
    return {"rows": table.rows, "used": table.rows - sum(left_out.values()), "left_out": left_out}


def said(output: str) -> dict[str, Any]:
    """The account in a text: rows, used, and left out by reason."""
    found = re.search(r"([\d,]+) rows: ([\d,]+) used, ([\d,]+) left out(?: \((.*?)\))?", output)
    assert found is not None, output
    reasons = (reason.rsplit(" ", 1) for reason in (found[4] or "").split(", ") if reason)
    left_out = {reason: int(count) for reason, count in reasons}
    assert int(found[3]) == sum(left_out.values())
    return {"rows": int(found[1]), "used": int(found[2]), "left_out": left_out}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with a bundle of the default event schema."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "plain.csv").write_text(lines())
    result = run("train", "--data", str(folder / "plain.csv"), "--out", str(folder / "bundle"), *TRAINING)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[PastInteractions]:
    """What an import would write, its limits checked; Kafka and Redis do not run."""
    found: list[PastInteractions] = []

    def run_import(settings: object, past: PastInteractions, *progress: object, **options: object) -> ImportReport:
        check(past)
        found.append(past)
        return ImportReport(
            interactions=len(past),
            written=len(past),
            users_filled=0,
            attributions=0,
            unknown_items=0,
            write_seconds=0.0,
            fill_seconds=0.0,
        )

    monkeypatch.setattr(jobs, "run_import", run_import)
    return found


def events_of(data: Any) -> list[Event]:
    names = zip(data.users, data.items, data.timestamps, data.types, data.values, strict=True)
    return [
        (data.user_ids[user], data.item_ids[item], int(second), data.type_names[kind], float(value))
        for user, item, second, kind, value in names
    ]


def without_wraps(output: str) -> str:
    return re.sub(r"\s+", " ", output)


@by_name
def test_validate_names_what_it_leaves_out(tmp_path: Path, table: Own) -> None:
    path = table.write(tmp_path)
    result = run("data", "validate", str(path), "--json")
    report = json.loads(result.stdout)
    accepted = table.understood is not None and not table.only_training
    assert report["rows"] == account(table, accepted=accepted)
    assert result.exit_code == (0 if accepted else 1)
    shown = run("data", "validate", str(path))
    assert said(shown.stdout) == report["rows"]
    for named in table.named:
        assert named in without_wraps(shown.stdout)
    if table.understood is not None:
        found = [one for one in report["findings"] if one["severity"] != "info"]
        assert len(found) == len(table.named), found


@by_name
def test_train_reads_names_and_refuses_the_same(tmp_path: Path, table: Own) -> None:
    path, out = table.write(tmp_path), tmp_path / "bundle"
    result = run("train", "--data", str(path), "--out", str(out), *TRAINING)
    accepted = table.understood is not None and not table.only_training
    assert (result.exit_code, out.exists()) == ((0, True) if accepted else (2, False)), result.output
    assert said(result.output) == account(table, accepted=accepted)
    for named in table.named:
        assert named in without_wraps(result.output)


@by_name
def test_import_reads_names_and_refuses_the_same(
    tmp_path: Path, table: Own, state: Path, imported: list[PastInteractions]
) -> None:
    path = table.write(tmp_path)
    result = run("import", str(path), "--state", str(state))
    accepted = table.understood is not None
    assert result.exit_code == (0 if accepted else 2), result.output
    assert said(result.output) == account(table, accepted=accepted, imported=True)
    for named in table.named:
        assert named in without_wraps(result.output)
    assert [events_of(past) for past in imported] == ([table.understood] if accepted else [])
    if table.categories is not None:
        data = load_dataset(path)
        assert {item: data.categories[data.item_ids.index(item)] for item in table.categories} == table.categories


def test_events_after_the_split_are_named(tmp_path: Path, state: Path, imported: list[PastInteractions]) -> None:
    (tmp_path / "mine.csv").write_text(lines({"type": ["cart", *["click"] * 7]}))
    result = run("import", str(tmp_path / "mine.csv"), "--before", "0.5", "--state", str(state), "--json")
    assert json.loads(result.stdout)["rows"] == {
        "rows": 8,
        "used": 3,
        "left_out": {"not before the split": 4, "type cart": 1},
    }
    assert events_of(imported[0]) == events(types=["cart", *["click"] * 7])[:4]


def test_a_long_file_name_leaves_room_for_the_row(
    tmp_path: Path, state: Path, imported: list[PastInteractions]
) -> None:
    path = tmp_path / f"{'é' * 100}\n.csv"
    path.write_text(lines())
    assert run("import", str(path), "--state", str(state)).exit_code == 0
    assert imported[0].event_id(7).startswith(f"import-{'é' * 32}-")


def test_a_schema_of_ones_own_is_read_by_all_three(tmp_path: Path, imported: list[PastInteractions]) -> None:
    table, schema, bundle = tmp_path / "mine.csv", tmp_path / "events.yaml", tmp_path / "bundle"
    table.write_text(lines({"type": "cart"}))
    schema.write_text("types:\n  cart: {role: positive}\n")
    validated = run("data", "validate", str(table), "--events", str(schema), "--json")
    trained = run("train", "--data", str(table), "--events", str(schema), "--out", str(bundle), *TRAINING, "--json")
    taken = run("import", str(table), "--state", str(tmp_path), "--json")
    accounts = [json.loads(result.stdout)["rows"] for result in (validated, trained, taken)]
    assert accounts == [{"rows": 8, "used": 8, "left_out": {}}] * 3


def test_an_escape_sequence_does_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(lines({"type": "\x1b[2Jcart"}))
    shown = run("data", "validate", str(tmp_path / "mine.csv")).stdout
    assert "\x1b" not in shown
    assert "\\x1b[2Jcart 8" in shown
