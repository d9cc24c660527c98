"""`freshet bench`: help that teaches, and wrong requests refused by name before anything is measured."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.commands import bench
from services.cli.main import app

RUNNER = CliRunner()
SUBJECTS = sorted(command.name or "" for command in bench.app.registered_commands)
EVALUATION = Path(__file__).resolve().parents[3] / "services" / "offline" / "evaluation"


@pytest.mark.parametrize("what", SUBJECTS)
def test_help_has_an_example_and_json(what: str) -> None:
    result = RUNNER.invoke(app, ["bench", what, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert f"freshet bench {what}" in result.output
    assert "--json" in result.output


# What other commands are made of.
SHARED = {"common", "quality", "engine", "bundles", "catalogues"}


def test_every_folder_of_the_evaluation_has_a_subject() -> None:
    folders = {path.parent.name.replace("_", "-") for path in EVALUATION.glob("*/__init__.py")}
    assert folders - SHARED <= set(SUBJECTS)


def test_the_figure_of_universality_stands_beside_its_page_and_report(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["bench", "universality", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
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
    assert RUNNER.invoke(app, ["bench", "universality"]).exit_code == 0
    (page,) = tmp_path.rglob("universality.md")
    assert str(page.relative_to(tmp_path).parent) == ("docs/benchmarks" if is_checkout else ".freshet/bench")


def test_an_unknown_shape_is_a_usage_error_that_names_the_known_ones() -> None:
    result = RUNNER.invoke(app, ["bench", "retrieval", "--shape", "netflix", "--json"])
    assert result.exit_code == 2
    report = json.loads(result.output.splitlines()[-1])
    assert "netflix" in report["error"]
    assert "books" in report["error"]


def test_a_bundle_without_its_shape_is_a_usage_error() -> None:
    result = RUNNER.invoke(app, ["bench", "retrieval", "--shape", "books", "--bundle", "somewhere", "--json"])
    assert result.exit_code == 2
    assert "ml-1m" in json.loads(result.output.splitlines()[-1])["error"]
