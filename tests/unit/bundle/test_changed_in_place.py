"""What a process answers from is what it checked: files that are changed under it change nothing, or are told."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_scene import content

from services.algorithms.bundles import tensor_file
from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.bundles.model_manifest import NeighbourShape
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.offline.bundles.model import write_bundle

# Loads, cuts every file to nothing, and says what it has then.
CUT = """
import os, sys
from services.algorithms.bundles.model_bundle import load_bundle
bundle = load_bundle(sys.argv[1])
states = bundle.item_states
held = [states.components, states.gate, bundle.pair_gate.hidden_weight, bundle.neighbours.weights]
for name in bundle.manifest.files:
    os.truncate(bundle.path / name, 0)
print(*(float(array.sum()) for array in held))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    near = ItemNeighbours(
        shape=NeighbourShape(num_neighbours=2, decay=0.7, model_share=0.5),
        items=np.ones((5, 2), np.int32),
        weights=np.full((5, 2), 0.25, np.float32),
    )
    return write_bundle(tmp_path / "bundle", replace(content(), neighbours=near)).path


def arrays(bundle: Bundle) -> list[Any]:
    assert bundle.pair_gate is not None
    assert bundle.neighbours is not None
    return [
        bundle.item_states.components,
        bundle.item_states.gate,
        bundle.pair_gate.hidden_weight,
        bundle.neighbours.weights,
        np.array(bundle.item_ids),
    ]


def write_into(path: Path) -> None:
    """Other bytes in the same file."""
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x3f" * 8)


def test_a_bundle_whose_files_are_written_to_stays_as_it_was_loaded(path: Path) -> None:
    bundle = load_bundle(path)
    held = arrays(bundle)
    before = [array.copy() for array in held]
    for name in bundle.manifest.files:
        write_into(path / name)
    for array, wanted in zip(held, before, strict=True):
        np.testing.assert_array_equal(array, wanted)
    with pytest.raises(ValueError, match=r"manifest\.json says"):
        load_bundle(path)


def test_a_bundle_whose_files_are_truncated_kills_nobody(path: Path) -> None:
    wanted = [float(array.sum()) for array in arrays(load_bundle(path))[:4]]
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [float(one) for one in done.stdout.split()] == wanted


def test_a_mapped_file_that_is_written_to_is_told_and_one_that_is_replaced_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "LOADED_BYTES", 0)
    monkeypatch.setattr(tensor_file, "_mapped", {})
    bundle = load_bundle(path)
    items = list(bundle.item_ids), list(bundle.titles), list(bundle.categories)
    held, before = arrays(bundle), [array.copy() for array in arrays(bundle)]
    assert tensor_file.changed_in_place() == ""
    named = [f"other {row}" for row in range(5)]
    other = replace(content(seed=1), neighbours=bundle.neighbours, item_ids=named, titles=named)
    write_bundle(path, replace(other, categories=[("other",)] * 5))
    assert tensor_file.changed_in_place() == ""
    for array, wanted in zip(held, before, strict=True):
        np.testing.assert_array_equal(array, wanted)
    assert (list(bundle.item_ids), list(bundle.titles), list(bundle.categories)) == items
    assert [bundle.item_index.get(item_id) for item_id in [*items[0], "other 0"]] == [*range(5), None]
    load_bundle(path).item_states  # noqa: B018
    for name in ("item_states.safetensors", "items.arrow"):
        write_into(path / name)
        assert tensor_file.changed_in_place().startswith(f"{path / name} was modified while in use")
        (path / name).unlink()
        assert tensor_file.changed_in_place() == ""


def test_a_file_larger_than_memory_is_mapped_and_writing_to_its_array_leaves_it(tmp_path: Path) -> None:
    rows = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    header = json.dumps({"a": {"dtype": "F32", "shape": [rows], "data_offsets": [0, 4 * rows]}}).encode()
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * rows)
    array = tensor_file.read_tensors(path)["a"]
    array[-1] = 1.0
    assert (array.shape, array.dtype, array[0], array[-1]) == ((rows,), np.float32, 0.0, 1.0)
    assert tensor_file.read_tensors(path)["a"][-1] == 0.0
