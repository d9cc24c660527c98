"""`freshet backfill-attributions` without what it needs: one sentence, the next step, and the right exit status."""

from pathlib import Path

from typer.testing import CliRunner, Result

from services.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_a_bundle_that_is_not_there_is_named_with_what_makes_one(tmp_path: Path) -> None:
    result = run("backfill-attributions", "--bundle", str(tmp_path / "none"), "--state", str(tmp_path))
    assert result.exit_code == 1
    assert "freshet train" in result.output
    assert "Traceback" not in result.output


def test_without_a_bundle_it_is_a_usage_error() -> None:
    assert run("backfill-attributions").exit_code == 2


def test_another_key_is_written_by_this_machine_alone() -> None:
    result = run("backfill-attributions", "--rekey", "--on", "ray://head:10001")
    assert result.exit_code == 2
    assert "--rekey works here" in result.output
