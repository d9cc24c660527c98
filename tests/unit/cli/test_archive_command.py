"""`freshet archive` without a broker: its exit statuses, and what it says."""

import json
from pathlib import Path

import pytest
from encoder.streams import append, interaction
from fakes.encoder import MemoryForgetLog, MemoryStream
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.offline.archive.writing import ArchiveInteractions


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def archived(tmp_path: Path) -> Path:
    stream, folder = MemoryStream(1), tmp_path / "archive"
    append(stream, interaction(event_id="e"))
    ArchiveInteractions(folder, log=stream, forgets=MemoryForgetLog()).run()
    return folder


def test_a_whole_archive_is_said_to_be_whole(archived: Path) -> None:
    result = run("archive", str(archived), "--check")
    assert result.exit_code == 0
    assert f"{archived} is whole: 1 records in 1 files" in result.output
    assert json.loads(run("archive", str(archived), "--check", "--json").stdout) == {"files": 1, "records": 1}


def test_an_altered_one_fails_by_name(archived: Path) -> None:
    (table,) = archived.glob("*.parquet")
    table.write_bytes(b"x")
    result = run("archive", str(archived), "--check")
    assert result.exit_code == 1
    assert f"{table} has 1 bytes and sha256" in result.output
    assert json.loads(run("archive", str(archived), "--check", "--json").stdout)["exit_status"] == 1


def test_without_a_broker_it_may_be_tried_again(tmp_path: Path) -> None:
    result = run("archive", str(tmp_path / "archive"), "--state", str(tmp_path / "none"))
    assert result.exit_code == 3
    assert "freshet up" in result.output


def test_a_log_elsewhere_needs_no_local_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a container: the installation has no compose file to make a stack of.
    monkeypatch.setattr("services.stack.Stack", None)
    result = run("archive", str(tmp_path / "archive"), "--kafka", "127.0.0.1:1")
    assert result.exit_code == 3
    assert "127.0.0.1:1" in result.output


def test_two_bounds_are_a_usage_error(tmp_path: Path) -> None:
    result = run("archive", str(tmp_path), "--before", "2026-01-31", "--older-than", "7")
    assert result.exit_code == 2
    assert "give one of them" in result.output
