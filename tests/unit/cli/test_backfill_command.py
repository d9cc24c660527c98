"""`freshet backfill-attributions` without what it needs: one sentence, the next step, and the right exit status."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.mark.parametrize("command", ["backfill-attributions", "attribute"])
def test_a_bundle_that_is_not_there_is_named_with_what_makes_one(tmp_path: Path, command: str) -> None:
    result = run(command, "--bundle", str(tmp_path / "none"), "--state", str(tmp_path))
    assert result.exit_code == 1
    assert "freshet train" in result.output
    assert "Traceback" not in result.output
    assert ("is called `freshet backfill-attributions` now" in result.output) == (command == "attribute")


def test_without_a_bundle_it_is_a_usage_error() -> None:
    assert run("backfill-attributions").exit_code == 2


def test_the_old_name_is_not_shown() -> None:
    shown = run("--help").output
    assert "backfill-attributions" in shown
    assert " attribute " not in shown
