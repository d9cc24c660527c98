"""Checkpoints on disk: whatever moment a crash takes, a whole one is there; half of one is never taken."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from fakes.refresher import from_bytes, to_bytes
from refresher_scene import contributors_of, fold_all, log_of, make_rules, random_records

from services.refresher.adapters.checkpoint_topic import CheckpointFiles
from services.refresher.checkpoint import MAGIC, CheckpointError, from_file, squeeze, to_file, unsqueeze
from services.refresher.domain.partition import Partition
from services.refresher.handlers.checkpoints import OtherRulesError, restore, snapshot, versions
from services.refresher.handlers.fold import FoldRecords

RULES = make_rules(max_remembered=10, max_pending=4)


@pytest.mark.parametrize("count", [0, 1, 40, 200])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(count: int) -> None:
    log = log_of(random_records(5, 300))
    state, fold = Partition(0, RULES, {}), FoldRecords(log)
    fold.fold(state, log.entries[0][:count])
    restored = from_bytes(to_bytes(state), 0, RULES, {})
    assert restored.digest() == state.digest()
    assert to_bytes(restored) == to_bytes(state)
    fold.fold(restored, log.entries[0][count:])
    whole = fold_all(RULES, log)
    assert restored.digest() == whole.digest()
    assert restored.counts == whole.counts
    assert contributors_of(restored) == contributors_of(whole)


def test_every_torn_or_altered_checkpoint_is_refused() -> None:
    data = to_bytes(fold_all(RULES, log_of(random_records(1, 60))))
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
    data = to_bytes(fold_all(RULES, log_of(random_records(1, 60))))
    with pytest.raises(CheckpointError, match="partition 0, not 3"):
        from_bytes(data, 3, RULES, {})
    with pytest.raises(OtherRulesError) as refusal:
        from_bytes(data, 0, make_rules(max_remembered=11), {})
    assert refusal.value.entries


def test_a_whole_file_with_other_content_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not written by this program"):
        from_bytes(to_file({"partition": 0, "format": 4}, {}), 0, RULES, {})


def test_a_checkpoint_of_another_format_is_refused_by_its_format_whatever_its_parts_are() -> None:
    other = {"partition": 0, "format": 3}
    with pytest.raises(CheckpointError, match="its format is 3; this version reads 4"):
        restore(other, {}, 0, RULES, {})
    with pytest.raises(CheckpointError, match="its format is 3; this version reads 4"):
        from_file(sealed({"values": other, "arrays": {"sums": ["int64", [1], 0, 8]}}, bytes(8)))
    with pytest.raises(CheckpointError, match=r"begin with b'FRESHET\\x01'; allowed: b'FRESHET\\x02'"):
        from_file(b"FRESHET\x01" + bytes(60))


def test_only_what_changed_is_written_again_and_what_follows_changes_no_snapshot() -> None:
    """Blocks of the ledger are shared with the snapshot, not copied: what comes and goes later must not show in it."""
    log = log_of(random_records(5, 300))
    state, fold = Partition(0, RULES, {}), FoldRecords(log)
    fold.fold(state, log.entries[0][:200])
    whole, expected = snapshot(state, {}), state.digest()
    fold.fold(state, log.entries[0][200:])
    parts = {name: data for name, data in whole.parts().items() if data is not None}
    assert parts.keys() == whole.versions.keys()
    restored = restore(whole.values, parts, 0, RULES, {})
    assert restored.digest() == expected
    saved = versions(restored)
    assert set(snapshot(restored, saved).changed) == {"rest"}
    fold.fold(restored, log.entries[0][200:201])
    later = snapshot(restored, saved)
    parts |= {name: data for name, data in later.parts().items() if data is not None}
    assert len(later.changed) < len(later.versions)
    assert restore(later.values, parts, 0, RULES, {}).digest() == restored.digest()


def test_a_folder_gives_the_checkpoint_of_its_partition(tmp_path: Path) -> None:
    assert list(CheckpointFiles(tmp_path).load(0)) == []
    for name, count in (("0.checkpoint", 60), ("0.4711", 40), ("1.checkpoint", 10)):
        (tmp_path / f"partition-{name}").write_bytes(to_bytes(fold_all(RULES, log_of(random_records(1, count)))))
    assert [kept.read()[0]["folded_offset"] for kept in CheckpointFiles(tmp_path).load(0)] == [59]


@pytest.mark.parametrize("numbers", [[], [5], [-1, 2**40, -1], [2**62, -(2**62)], list(range(10**12, 10**12 + 999))])
def test_squeezed_numbers_come_back(numbers: list[int]) -> None:
    arrays = {"n": np.array(numbers, np.int64), "f": np.ones((2, 3), np.float32)}
    data = squeeze(arrays)
    for name, array in unsqueeze(data).items():
        assert array.dtype == arrays[name].dtype
        assert np.array_equal(array, arrays[name])
    assert len(data) < 250 + 2 * len(numbers)


def test_parts_come_back_as_they_were() -> None:
    parts = {"a": b"seven b", "b": bytes(16), "c": b""}
    assert from_file(to_file({"format": 4, "t": "x"}, parts)) == ({"format": 4, "t": "x"}, parts)


def sealed(header: object, rest: bytes = b"") -> bytes:
    """A file whose checksum is right."""
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + rest
    return MAGIC + hashlib.sha256(body).digest() + body


HEADERS: dict[str, object] = {
    "a number": 1.5,
    "no arrays": {"values": {"format": 4}},
    "values as a list": {"values": [["format", 4]], "arrays": {}},
    "arrays as a list": {"values": {"format": 4}, "arrays": [1]},
    "an array of three": {"values": {"format": 4}, "arrays": {"a": ["int64", [1], 0]}},
    "objects": {"values": {"format": 4}, "arrays": {"a": ["object", [1], 0, 8]}},
    "behind the end": {"values": {"format": 4}, "arrays": {"a": ["uint8", [16], 0, 16]}},
    "before the beginning": {"values": {"format": 4}, "arrays": {"a": ["uint8", [8], -8, 0]}},
    "a text as bounds": {"values": {"format": 4}, "arrays": {"a": ["uint8", [8], "0", "8"]}},
    "an immense shape": {"values": {"format": 4}, "arrays": {"a": ["uint8", [2**70], 0, 8]}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_whole_file_with_another_header_is_refused(header: object) -> None:
    with pytest.raises(CheckpointError, match="not written by this program"):
        from_file(sealed(header, bytes(8)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("folded_offset", "7"), ("quiet_until", 1.5), ("newest_recorded_ms", [])),
        *(
            ("counts", {"folded": "1"}),
            ("mix", ["1", 2]),
            ("mix", [1]),
            ("leaving", [1]),
            ("memory", 5),
            ("memory", [10, 10, "x"]),
        ),
    ],
)
def test_values_of_other_types_are_refused(name: str, value: object) -> None:
    taken = snapshot(fold_all(RULES, log_of(random_records(1, 60))), {})
    parts = {part: data for part, data in taken.parts().items() if data is not None}
    with pytest.raises(CheckpointError):
        restore({**taken.values, name: value}, parts, 0, RULES, {})
