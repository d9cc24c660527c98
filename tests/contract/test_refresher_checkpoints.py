"""One suite for the checkpoints port: in memory, and in files."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.refresher import MemoryCheckpoints

from services.refresher.adapters.checkpoint_files import CheckpointFiles
from services.refresher.ports import Checkpoints

# A refresher's own; called again: another refresher's, on the same place.
Open = Callable[[], Checkpoints]


@pytest.fixture(params=["memory", "files"])
def open_checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    shared = MemoryCheckpoints()
    return lambda: shared if request.param == "memory" else CheckpointFiles(tmp_path / "checkpoints")


def test_where_nothing_was_saved_there_is_nothing(open_checkpoints: Open) -> None:
    assert list(open_checkpoints().load(0)) == []


def test_another_refresher_finds_the_newest_and_the_one_before_in_this_order(open_checkpoints: Open) -> None:
    for data in (b"first", b"second", b"third"):
        open_checkpoints().save(3, data)
    assert [data for _, data in open_checkpoints().load(3)] == [b"third", b"second"]
    names = [name for name, _ in open_checkpoints().load(3)]
    assert len(set(names)) == 2
    assert all(names)


def test_partitions_are_kept_apart(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    checkpoints.save(1, b"one")
    checkpoints.save(11, b"eleven")
    assert [[data for _, data in checkpoints.load(partition)] for partition in (1, 11)] == [[b"one"], [b"eleven"]]
