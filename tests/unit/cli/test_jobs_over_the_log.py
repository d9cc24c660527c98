"""score, archive, backfill-attributions and shard-snapshots without what they need: one sentence, the next step, and
the right exit status. What they do with a log: tests/unit/offline, tests/integration."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.streams import append, interaction
from fakes.encoder import MemoryForgetLog, MemoryStream

from services.offline.archive.writing import ArchiveInteractions
from services.offline.bundles.model import write_bundle
from tests.unit.bundle.bundle_scene import content
from tests.unit.cli.shell import facts, refused, shown

NOBODY = ("--kafka", "127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("score", "--out", "out", "--k", "0"), "than or equal to 1 "),
        (("score", "--out", "out", "--k", "1001"), "than or equal to 1000 "),
        (("score", "--out", "out", "--users", "people.parquet"), "column user_id"),
        (("archive", "folder", "--before", "2026-01-31", "--older-than", "7"), "give one of them"),
        (("backfill-attributions",), "neither --bundle nor --rekey is given"),
        (("backfill-attributions", "--rekey", "--on", "ray://head:10001"), "--rekey works here"),
        (("shard-snapshots", "folder", "--shards", "0"), "'--shards'"),
        (("shard-snapshots", "folder", "--shards", "257"), "'--shards'"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"person": ["a"]}), tmp_path / "people.parquet")
    assert says in refused(2, *arguments)


@pytest.mark.parametrize("command", [("score", "--out"), ("shard-snapshots", "--shards", "2")])
def test_without_kafka_nothing_is_written(tmp_path: Path, command: tuple[str, ...]) -> None:
    bundle = write_bundle(tmp_path / "bundle", content()).path
    assert "freshet up" in refused(3, *command, tmp_path / "out", "--bundle", bundle, *NOBODY)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_help_says_what_differs_from_a_served_answer() -> None:
    text = shown("score", "--help")
    for word in ("no_state", "popular_not_boosted", "--on ray://head:10001"):
        assert word in text


def test_with_a_memory_there_are_no_snapshots(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", content()).path
    arguments = ("shard-snapshots", tmp_path / "snapshots", "--shards", "2", "--bundle", bundle, *NOBODY)
    said = refused(1, *arguments, FRESHET_CANDIDATES_VOTE_NEIGHBOURS="8")
    assert "FRESHET_CANDIDATES_VOTE_NEIGHBOURS=8 allowed: 0" in said


def test_a_bundle_that_is_not_there_is_named_with_what_makes_one(tmp_path: Path) -> None:
    said = refused(1, "backfill-attributions", "--bundle", tmp_path / "none", "--state", tmp_path)
    assert "freshet train" in said


@pytest.fixture
def archived(tmp_path: Path) -> Path:
    stream, folder = MemoryStream(1), tmp_path / "archive"
    append(stream, interaction(event_id="e"))
    ArchiveInteractions(folder, log=stream, forgets=MemoryForgetLog()).run()
    return folder


def test_a_whole_archive_is_said_to_be_whole(archived: Path) -> None:
    assert f"{archived} is whole: 1 records in 1 files" in shown("archive", archived, "--check")
    assert facts("archive", archived, "--check") == {"files": 1, "records": 1}


def test_an_altered_archive_fails_by_name(archived: Path) -> None:
    (table,) = archived.glob("*.parquet")
    table.write_bytes(b"x")
    assert f"{table} has 1 bytes and sha256" in refused(1, "archive", archived, "--check")
    assert '"exit_status": 1' in refused(1, "archive", archived, "--check", "--json")


def test_an_archive_without_a_broker_may_be_tried_again(tmp_path: Path) -> None:
    assert "freshet up" in refused(3, "archive", tmp_path / "archive", "--state", tmp_path / "none")


def test_a_log_elsewhere_needs_no_local_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a container: the installation has no compose file to make a stack of.
    monkeypatch.setattr("services.stack.Stack", None)
    assert "127.0.0.1:9" in refused(3, "archive", tmp_path / "archive", *NOBODY)
