"""Snapshots of the mutable index: what comes back, what is refused, what a crash leaves."""

import hashlib
import json
import mmap
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from mutable_scene import MODEL, States, restore

from services.algorithms.bundles import tensor_file
from services.algorithms.bundles.tensor_file import read_tensors
from services.algorithms.bundles.tensor_writer import SlicedTensor, write_tensors
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.mutable.index import MutableIndex, only
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.snapshot import (
    SnapshotError,
    load_snapshot,
    snapshots,
    write_snapshot,
)

FILES = ("manifest.json", "items.safetensors", "item_states.safetensors")


@pytest.fixture
def states() -> States:
    return States(np.random.default_rng(0), p_q=2, p_x=2, d=6)


def make_index(states: States, count: int = 40) -> MutableIndex:
    """Items in main, in a block and in the tail, some of each dead."""
    index = MutableIndex(
        ItemBatch(item_ids=[], states=states.of([])), states.pair_gate, model_version=MODEL, build=only(BruteForce)
    )
    for group in ("日", "b", "a"):
        ids = [f"{group}{row}" for row in range(count)]
        index.apply(
            upserts=ItemBatch(item_ids=ids, states=states.of(range(count)), categories=[[group, "all"]] * count)
        )
        if group == "日":
            index.merge()
        index.apply(removals=[f"{group}{row}" for row in range(0, count, 5)])
    return index


def test_a_snapshot_brings_everything_back_and_goes_on_from_there(states: States, tmp_path: Path) -> None:
    index = make_index(states)
    snapshot = load_snapshot(write_snapshot(tmp_path, index), model_version=MODEL)
    again = restore(snapshot, states.pair_gate, build=only(BruteForce))
    assert snapshot.index_version == again.version.name == index.version.name
    queries = states.query([0, 1, 2])
    before, after = index.version.search(queries, 200), again.version.search(queries, 200)
    assert after.item_ids == before.item_ids
    assert (after.scores == before.scores).all()
    for one in (index, again):
        one.apply(upserts=ItemBatch(item_ids=["b1", "new"], states=states.of([8, 9])))
    assert again.version.name == index.version.name
    assert again.version.search(queries, 200).item_ids == index.version.search(queries, 200).item_ids


def test_large_states_are_mapped_from_the_file_not_copied(
    states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "LOADED_BYTES", 0)
    snapshot = load_snapshot(write_snapshot(tmp_path, make_index(states)), model_version=MODEL)
    index = restore(snapshot, states.pair_gate, build=only(BruteForce))
    assert index.version.main is not None
    base = index.version.main.segment.rows.states.components
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap)


def test_another_models_snapshot_is_refused_and_both_are_named(states: States, tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, make_index(states))
    with pytest.raises(SnapshotError, match="model_version='model-1'; this process serves 'model-2'"):
        load_snapshot(path, model_version="model-2")


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_refused_by_name_and_both_checksums(states: States, tmp_path: Path, name: str) -> None:
    path = write_snapshot(tmp_path, make_index(states))
    data = bytearray((path / name).read_bytes())
    rng = np.random.default_rng(5)
    for place in rng.integers(len(data), size=60).tolist():
        bit = 1 << int(rng.integers(8))
        data[place] ^= bit
        (path / name).write_bytes(data)
        with pytest.raises(SnapshotError, match=name) as refusal:
            load_snapshot(path, model_version=MODEL)
        if name != "manifest.json":
            assert len(re.findall("[0-9a-f]{64}", str(refusal.value))) == 2
        data[place] ^= bit
    (path / name).write_bytes(data)
    load_snapshot(path, model_version=MODEL)


def test_files_of_two_snapshots_do_not_mix(states: States, tmp_path: Path) -> None:
    index = make_index(states)
    first = write_snapshot(tmp_path, index)
    index.apply(upserts=ItemBatch(item_ids=["b1"], states=states.of([99])))
    second = write_snapshot(tmp_path, index)
    shutil.copy(first / "item_states.safetensors", second)
    with pytest.raises(SnapshotError, match=r"item_states\.safetensors"):
        load_snapshot(second, model_version=MODEL)
    load_snapshot(first, model_version=MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda hashes: np.roll(hashes, 1), "hashes of other ids"), (lambda hashes: hashes[1:], "id_hashes has shape")],
)
def test_hashes_of_other_ids_or_of_fewer_are_refused(
    states: States, tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    path = write_snapshot(tmp_path, make_index(states))
    arrays = read_tensors(path / "items.safetensors")
    (path / "items.safetensors").unlink()
    tensors = {
        name: SlicedTensor.whole(array) for name, array in {**arrays, "id_hashes": change(arrays["id_hashes"])}.items()
    }
    entry = write_tensors(path / "items.safetensors", tensors)
    raw = json.loads((path / "manifest.json").read_text())
    del raw["checksum"]
    raw["files"]["items.safetensors"] = asdict(entry)
    raw["checksum"] = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(SnapshotError, match=message):
        load_snapshot(path, model_version=MODEL)


def test_the_newest_two_snapshots_stay(states: States, tmp_path: Path) -> None:
    index = make_index(states)
    written = []
    for number in range(4):
        index.apply(upserts=ItemBatch(item_ids=["b1"], states=states.of([number])))
        written.append(write_snapshot(tmp_path, index))
    assert snapshots(tmp_path) == [written[3], written[2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in written[2:])


def test_what_a_crash_left_aside_is_no_snapshot_and_goes_with_the_next(states: States, tmp_path: Path) -> None:
    index = make_index(states)
    path = write_snapshot(tmp_path, index)
    aside = tmp_path / ".aside-000000000002"
    shutil.copytree(path, aside)
    (aside / "manifest.json").unlink()
    assert snapshots(tmp_path) == [path]
    newer = write_snapshot(tmp_path, index)
    assert snapshots(tmp_path) == [newer, path]
    assert not aside.exists()


WRITER = """
import sys
from dataclasses import asdict
from pathlib import Path
import numpy as np
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.index import MutableIndex, only
from services.algorithms.indexes.mutable.snapshot import write_snapshot
from services.algorithms.scoring.states import ItemStates
rng = np.random.default_rng(0)
items = ItemStates(components=rng.normal(size=(20_000, 1, 32)).astype(np.float32))
ids = [f"item-{row}" for row in range(len(items))]
index = MutableIndex(ItemBatch(item_ids=ids, states=items), None, model_version="model-1", build=only(BruteForce))
while True:
    index.apply(removals=[ids.pop()])
    print(write_snapshot(Path(sys.argv[1]), index).name, flush=True)
"""


def test_a_process_killed_while_writing_leaves_whole_snapshots(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    process = subprocess.Popen(  # the program is above, its argument a folder of this test
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        for _ in range(3):
            output.readline()
        try:
            process.wait(timeout=float(rng.uniform(0.0, 0.2)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
    found = snapshots(tmp_path)
    assert len(found) >= 2
    for path in found:
        assert (
            len(load_snapshot(path, model_version=MODEL).items)
            == load_snapshot(path, model_version=MODEL).manifest.num_items
        )


def test_slices_that_do_not_fill_their_tensor_are_refused(tmp_path: Path) -> None:
    rows = np.ones((3, 2), dtype=np.float32)
    with pytest.raises(ValueError, match=r"x of shape \(4, 2\) got 24 bytes; expected 32"):
        write_tensors(tmp_path / "a", {"x": SlicedTensor(np.float32, (4, 2), iter([rows]))})
    write_tensors(tmp_path / "b", {"x": SlicedTensor(np.float32, (6, 2), iter([rows, rows]))})
    assert (read_tensors(tmp_path / "b")["x"] == 1).all()
