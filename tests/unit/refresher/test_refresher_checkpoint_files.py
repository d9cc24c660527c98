"""Checkpoints on disk: whatever moment a crash takes, a whole one is there; half of one is never taken."""

from pathlib import Path

import numpy as np
import pytest
from fakes.refresher import MemoryLog
from refresher_scene import fold_all, make_rules, random_records

from services.common.errors import DependencyUnavailable
from services.refresher.adapters.checkpoint_files import CheckpointFiles
from services.refresher.checkpoint import CheckpointError, pack, unpack
from services.refresher.domain.partition import Partition
from services.refresher.handlers.checkpoints import OtherRulesError, from_bytes, to_bytes
from services.refresher.handlers.fold import FoldRecords

RULES = make_rules(max_remembered=10, max_pending=4)


def log_of(seed: int, count: int) -> MemoryLog:
    log = MemoryLog()
    for record in random_records(seed, count):
        log.append(0, record)
    return log


@pytest.mark.parametrize("count", [0, 1, 40, 200])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(count: int) -> None:
    log = log_of(5, 300)
    state, fold = Partition(0, RULES, {}), FoldRecords(log)
    fold.fold(state, log.entries[0][:count])
    restored = from_bytes(to_bytes(state), 0, RULES, {})
    assert restored.digest() == state.digest()
    assert to_bytes(restored) == to_bytes(state)
    fold.fold(restored, log.entries[0][count:])
    whole = fold_all(RULES, log)
    assert restored.digest() == whole.digest()
    assert restored.counts == whole.counts
    assert restored.contributor_hashes == whole.contributor_hashes


def test_every_torn_or_altered_checkpoint_is_refused() -> None:
    data = to_bytes(fold_all(RULES, log_of(1, 60)))
    rng = np.random.default_rng(7)
    for place in rng.integers(0, len(data), 60).tolist():
        with pytest.raises(CheckpointError):
            from_bytes(data[:place], 0, RULES, {})
        altered = bytearray(data)
        altered[place] ^= 1 << int(rng.integers(8))
        with pytest.raises(CheckpointError):
            from_bytes(bytes(altered), 0, RULES, {})
    with pytest.raises(CheckpointError, match="torn or altered"):
        from_bytes(data + b"\0", 0, RULES, {})


def test_a_checkpoint_of_another_partition_or_of_other_rules_is_refused() -> None:
    data = to_bytes(fold_all(RULES, log_of(1, 60)))
    with pytest.raises(CheckpointError, match="partition 0, not 3"):
        from_bytes(data, 3, RULES, {})
    with pytest.raises(OtherRulesError) as refusal:
        from_bytes(data, 0, make_rules(max_remembered=11), {})
    assert refusal.value.entries


def test_a_whole_file_with_other_content_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not of this program"):
        from_bytes(pack({"partition": 0}, {}), 0, RULES, {})


def test_the_one_before_is_kept_and_leftovers_are_not_taken_for_one(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path / "checkpoints")
    assert list(files.load(0)) == []
    for content in (b"first", b"second", b"third"):
        files.save(0, content)
    (tmp_path / "checkpoints" / ".partition-0.4711-abcd").write_bytes(b"half of a")
    assert [data for _, data in files.load(0)] == [b"third", b"second"]
    # Killed between the two renames: the newest is away, the older one is there.
    (tmp_path / "checkpoints" / "partition-0.checkpoint").unlink()
    assert [data for _, data in files.load(0)] == [b"second"]


def test_a_folder_that_cannot_be_written_is_a_dependency_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DependencyUnavailable, match="partition 2"):
        CheckpointFiles(tmp_path / "file").save(2, b"x")


def test_arrays_come_back_as_they_were() -> None:
    arrays = {
        "a": np.arange(7, dtype=np.int64),
        "b": np.arange(6, dtype=np.float16).reshape(2, 3),
        "c": np.zeros(0, np.uint8),
    }
    values, found = unpack(pack({"n": 3, "t": "x"}, arrays))
    assert values == {"n": 3, "t": "x"}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    with pytest.raises(ValueError, match="dtype complex128"):
        pack({}, {"z": np.zeros(1, complex)})
