"""Tables as people have them: `data validate`, `train` and `import` read the same, name the same and refuse the same.

In every command: rows in the file = rows used + rows that it names as left out.
"""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.bundles.model_bundle import load_bundle
from services.offline.backfill import jobs
from services.offline.backfill.bulk_import import ImportReport
from services.offline.backfill.past_interactions import check
from services.offline.datasets import Interactions, load_dataset
from tests.unit.cli.own_tables import ITEMS, TABLES, TIMES, USERS, Event, Own, events, lines
from tests.unit.cli.shell import facts, refused, run, shown

TRAINING = ("--head", "dot", "--epochs", "1", "--split", "none", "--no-export")
by_name = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


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
    shown("train", "--data", folder / "plain.csv", "--out", folder / "bundle", *TRAINING)
    return folder


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[Interactions]:
    """What an import would write, its limits checked; Kafka and Redis do not run."""
    found: list[Interactions] = []

    def run_import(settings: object, past: Interactions, *progress: object, **options: object) -> ImportReport:
        check(past)
        found.append(past)
        counts = {"interactions": len(past), "written": len(past), "users_filled": 0, "attributions": 0}
        return ImportReport(**counts, unknown_items=0, write_seconds=0.0, fill_seconds=0.0)

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
    accepted = table.understood is not None and not table.only_training
    result = run("data", "validate", path, "--json")
    report = json.loads(result.stdout)
    assert (report["rows"], result.exit_code) == (account(table, accepted=accepted), 0 if accepted else 1)
    text = run("data", "validate", path).stdout
    assert said(text) == report["rows"]
    for named in table.named:
        assert named in without_wraps(text)
    if table.understood is not None:
        found = [one for one in report["findings"] if one["severity"] != "info"]
        assert len(found) == len(table.named), found


@by_name
def test_train_reads_names_and_refuses_the_same(tmp_path: Path, table: Own) -> None:
    path, out = table.write(tmp_path), tmp_path / "bundle"
    result = run("train", "--data", path, "--out", out, *TRAINING)
    accepted = table.understood is not None and not table.only_training
    assert (result.exit_code, out.exists()) == ((0, True) if accepted else (2, False)), result.output
    assert said(result.output) == account(table, accepted=accepted)
    for named in table.named:
        assert named in without_wraps(result.output)


@by_name
def test_import_reads_names_and_refuses_the_same(
    tmp_path: Path, table: Own, state: Path, imported: list[Interactions]
) -> None:
    path = table.write(tmp_path)
    result = run("import", path, "--state", state)
    accepted = table.understood is not None
    assert result.exit_code == (0 if accepted else 2), result.output
    assert said(result.output) == account(table, accepted=accepted, imported=True)
    for named in table.named:
        assert named in without_wraps(result.output)
    assert [events_of(past) for past in imported] == ([table.understood] if accepted else [])
    if table.categories is not None:
        data = load_dataset(path)
        assert {item: data.categories[data.item_ids.index(item)] for item in table.categories} == table.categories


def test_events_after_the_split_are_named(tmp_path: Path, state: Path, imported: list[Interactions]) -> None:
    (tmp_path / "mine.csv").write_text(lines({"type": ["cart", *["click"] * 7]}))
    rows = facts("import", tmp_path / "mine.csv", "--before", "0.5", "--state", state)["rows"]
    assert rows == {"rows": 8, "used": 3, "left_out": {"not before the split": 4, "type cart": 1}}
    assert events_of(imported[0]) == events(types=["cart", *["click"] * 7])[:4]


def test_a_schema_of_ones_own_is_read_by_all_three(tmp_path: Path, imported: list[Interactions]) -> None:
    table, schema, bundle = tmp_path / "mine.csv", tmp_path / "events.yaml", tmp_path / "bundle"
    table.write_text(lines({"type": "cart"}))
    schema.write_text("types:\n  cart: {role: positive}\n")
    for command in (
        ("data", "validate", table, "--events", schema),
        ("train", "--data", table, "--events", schema, "--out", bundle, *TRAINING),
        ("import", table, "--state", tmp_path),
    ):
        assert facts(*command)["rows"] == {"rows": 8, "used": 8, "left_out": {}}


def test_an_escape_sequence_does_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(lines({"type": "\x1b[2Jcart"}))
    text = refused(1, "data", "validate", tmp_path / "mine.csv")
    assert "\x1b" not in text
    assert "\\x1b[2Jcart 8" in text


NAMED = ("--user", "Kunde", "--item", "Artikel", "--time", "Zeit", "--type", "Aktion", "--value", "Wert")
FOREIGN = "Kunde;Artikel;Zeit;Aktion;Wert\n" + "".join(
    f"{user};{item};{second};click;1,5\n" for user, item, second in zip(USERS, ITEMS, TIMES, strict=True)
)


def test_every_command_reads_the_columns_that_are_named_and_says_which(
    tmp_path: Path, state: Path, imported: list[Interactions]
) -> None:
    path, bundle = tmp_path / "shop.csv", tmp_path / "bundle"
    path.write_text(FOREIGN)
    commands = (
        ("data", "validate", path),
        ("train", "--data", path, "--out", bundle, *TRAINING),
        ("import", path, "--state", state),
        ("evaluate", state / "bundle", "--data", path),
    )
    told = "Kunde is user, Artikel is item, Zeit is timestamp (s), Aktion is type, Wert is value; separated by ';'"
    for command in commands:
        result = run(*command, *NAMED)
        assert told in without_wraps(result.output), result.output
        assert "value column is constant (1.5)" in without_wraps(result.output)
    assert events_of(imported[0]) == events(types="click", values=1.5)
    missing = refused(1, "data", "validate", path)
    assert "has no user column" in missing
    assert "Name it with --user or --session COLUMN" in missing


def test_a_session_stands_for_a_user_that_is_missing(tmp_path: Path, state: Path, imported: list[Interactions]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(lines({"visit": ["s1"] * 4 + ["s2"] * 4}).replace("b,", ","))
    refused(2, "import", path, "--state", state)
    shown("import", path, "--state", state, "--session", "visit")
    assert events_of(imported[0]) == events(users=["a"] * 4 + ["s2"] * 4)


def test_names_that_are_near_a_type_are_asked_about_with_a_line_to_paste(tmp_path: Path) -> None:
    kinds = ["cart", "favori", "Click", "add-to-cart", "ViewProduct", "buy", "stars", "un_view"]
    path, own_events = tmp_path / "mine.csv", tmp_path / "events.yaml"
    path.write_text(lines({"type": kinds, "value": "5"}))
    text = run("data", "validate", path).stdout
    pasted = re.findall(r"^ {11}(.*?:.*?)  # (.*)\?$", text, re.MULTILINE)
    assert dict(pasted) == {
        "Click: {role: positive}": "click",
        "ViewProduct: {role: positive}": "view",
        "'add-to-cart': {role: positive}": "add_to_cart",
        "buy: {role: positive}": "purchase",
        "un_view: {role: neutral}": "remove_from_cart",
        "cart: {role: positive}": "add_to_cart",
        "favori: {role: positive}": "save",
        "stars: {role: positive, weight: 0.5, centre: 3}": "rating",
    }
    own_events.write_text("types:\n" + "".join(f"  {line}\n" for line, _ in pasted))
    report = facts("data", "validate", path, "--events", own_events)
    assert report["rows"]["left_out"] == {"type un_view": 1}


@pytest.mark.parametrize(
    ("stars", "line"),
    [
        (["0", "10", "9", "5", "6", "7", "2", "8"], "rating: {role: positive, weight: 0.2, centre: 5}"),
        (["0", "1", "1", "0", "1", "1", "0", "1"], "rating: {role: positive, weight: 2, centre: 0.5}"),
        (["-1", "1", "1", "-1", "1", "1", "0", "1"], "rating: {role: positive, weight: 1, centre: 0}"),
    ],
)
def test_a_bundle_knows_the_scale_of_its_ratings(
    tmp_path: Path, imported: list[Interactions], stars: list[str], line: str
) -> None:
    path, bundle = tmp_path / "mine.csv", tmp_path / "bundle"
    path.write_text(lines({"rating": stars}))
    trained = run("train", "--data", path, "--out", bundle, *TRAINING)
    assert f"The bundle's events.yaml says: {line}" in without_wraps(trained.output), trained.output
    schema = load_bundle(bundle).event_schema
    assert [schema.feedback.weight("rating", float(end)) for end in (min(stars, key=float), max(stars, key=float))] == [
        -1,
        1,
    ]
    assert schema.types.keys() == default_schema().types.keys()
    taken = run("import", path, "--state", tmp_path)
    assert "does not expect" not in taken.output
    assert events_of(imported[0]) == events(types="rating", values=[float(one) for one in stars])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_of_items_gives_titles_categories_and_attributes(tmp_path: Path, kind: str) -> None:
    path, items, bundle = tmp_path / "mine.csv", tmp_path / f"items.{kind}", tmp_path / "bundle"
    path.write_text(lines())
    columns: dict[str, list[Any]] = {
        "SKU": ["x", "y", "new"],
        "Name": ["Axe", None, "Newcomer"],
        "Category": ["Tools,Wood", "Tools", None],
        "price": [9.5, 3, None],
        "brand": ["é", None, "b"],
        "page": ["https://shop/x", "https://shop/y", "http://shop/new"],
        "about": ["long " * 40, "short", None],
    }
    if kind == "csv":
        pa_csv.write_csv(pa.table(columns), items)
    elif kind == "parquet":
        pq.write_table(pa.table(columns), items)
    else:
        items.write_text("".join(json.dumps(row) + "\n" for row in pa.table(columns).to_pylist()))
    options = ("--items", items, "--category-separator", ",")
    validated = run("data", "validate", path, *options)
    trained = run("train", "--data", path, "--out", bundle, *options, *TRAINING)
    assert (validated.exit_code, trained.exit_code) == (0, 0), trained.output
    for output in map(without_wraps, (validated.output, trained.output)):
        assert f"columns of items.{kind}: SKU is item, Name is title, Category is categories, price is an" in output
        assert f"items that items.{kind} lacks: 1 of 3, 33.3% (z)" in output
        assert "items without an event: 1 of 3, 33.3% (new)" in output
        assert "columns of items are left out: 2 of 2, 100.0% (page, about)" in output
    found = load_bundle(bundle)
    assert found.titles == ["Axe", "", ""]
    assert [tuple(one) for one in found.categories] == [("Tools", "Wood"), ("Tools",), ()]
    assert [found.attributes.of_row(row) for row in range(3)] == [{"price": 9.5, "brand": "é"}, {"price": 3.0}, {}]


def test_a_file_of_items_that_cannot_be_used_is_refused_by_every_command(tmp_path: Path, state: Path) -> None:
    path, items = tmp_path / "mine.csv", tmp_path / "items.csv"
    path.write_text(lines())
    items.write_text("id,price\nx,1\nx,2\n")
    for command, status in (
        (("data", "validate", path), 1),
        (("train", "--data", path, "--out", tmp_path / "b", *TRAINING), 2),
        (("import", path, "--state", state), 2),
        (("evaluate", state / "bundle", "--data", path), 2),
    ):
        said = refused(status, *command, "--items", items)
        assert "items.csv row 1: id='x' again, first in row 0" in without_wraps(said)
