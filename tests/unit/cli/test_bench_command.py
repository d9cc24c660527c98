"""`freshet bench`: where its pages go, and wrong requests refused by name before anything is measured."""

import json
from pathlib import Path

import pytest

from services.cli.commands import bench
from tests.unit.cli.shell import refused, shown

SUBJECTS = sorted(command.name or "" for command in bench.app.registered_commands)
EVALUATION = Path(__file__).resolve().parents[3] / "services" / "offline" / "evaluation"


# What other commands are made of.
SHARED = {"common", "quality", "engine", "bundles", "catalogues"}


def test_every_folder_of_the_evaluation_has_a_subject() -> None:
    folders = {path.parent.name.replace("_", "-") for path in EVALUATION.glob("*/__init__.py")}
    assert folders - SHARED <= set(SUBJECTS)


def test_the_figure_of_universality_stands_beside_its_page_and_report(tmp_path: Path) -> None:
    report = json.loads(shown("bench", "universality", "--out", tmp_path, "--json").splitlines()[-1])
    assert report == json.loads((tmp_path / "universality.json").read_text(encoding="utf-8"))
    assert max(row["constants"] for row in report["rows"]) < 1e-12
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".png"}


@pytest.mark.parametrize("is_checkout", [True, False], ids=["checkout", "elsewhere"])
def test_pages_are_written_into_a_checkout_alone(
    is_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if is_checkout:
        pages = tmp_path / "docs" / "benchmarks"
        pages.mkdir(parents=True)
        (pages / "render.py").touch()
    shown("bench", "universality")
    (page,) = tmp_path.rglob("universality.md")
    assert str(page.relative_to(tmp_path).parent) == ("docs/benchmarks" if is_checkout else ".freshet/bench")


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--shape", "netflix"), ("netflix", "books")), (("--shape", "books", "--bundle", "somewhere"), ("ml-1m",))],
)
def test_a_shape_that_cannot_be_is_a_usage_error_that_names_those_that_can(
    options: tuple[str, ...], named: tuple[str, ...]
) -> None:
    error = json.loads(refused(2, "bench", "retrieval", *options, "--json").splitlines()[-1])["error"]
    assert all(one in error for one in named)
