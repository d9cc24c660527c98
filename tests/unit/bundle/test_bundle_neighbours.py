"""Item neighbours in a bundle: part of its version where there are any, and refused where they are not allowed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundle_scene import content
from safetensors.numpy import save_file

from services.algorithms.bundles.model_bundle import NEIGHBOURS, Bundle, BundleError, load_bundle
from services.algorithms.bundles.model_manifest import Manifest, NeighbourShape
from services.algorithms.bundles.sealed_files import file_entry
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.offline.bundles.model import write_bundle

SHAPE = NeighbourShape(num_neighbours=2, decay=0.7, model_share=0.5)
ARRAYS = {
    "items": np.array([[1, 2], [0, 2], [4, 0], [0, 1], [3, 0]], np.int32),
    "weights": np.array([[0.5, 0.25], [1, 0], [0, 0], [2, 1], [1, 1]], np.float32),
}


def written(path: Path) -> Bundle:
    return write_bundle(path, replace(content(), neighbours=ItemNeighbours(shape=SHAPE, **ARRAYS)))


def test_neighbours_read_back_equal_and_are_part_of_the_version(tmp_path: Path) -> None:
    silent, bundle = write_bundle(tmp_path / "silent", content()), written(tmp_path / "told")
    assert bundle.neighbours is not None
    assert bundle.neighbours.shape == SHAPE
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(getattr(bundle.neighbours, name), array)
    other = ItemNeighbours(shape=replace(SHAPE, model_share=0.25), **ARRAYS)
    versions = {silent.model_version, bundle.model_version}
    versions.add(write_bundle(tmp_path / "other", replace(content(), neighbours=other)).model_version)
    assert len(versions) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": ARRAYS["items"][:, :1]}, r"items.*int32.*\(5, 1\).*says.*int32.*\(5, 2\)"),
        ({"items": ARRAYS["items"].astype(np.int64)}, r"items.*int64.*says.*int32"),
        ({"weights": ARRAYS["weights"].astype(np.float64)}, r"weights.*float64.*says.*float32"),
        ({"items": ARRAYS["items"] + 1}, r"neighbours\.items from 1 to 5; allowed: 0 to 4"),
        ({"weights": -ARRAYS["weights"]}, r"neighbours\.weights holds negative.*allowed: finite, 0 and more"),
        ({"weights": ARRAYS["weights"] * np.float32(np.nan)}, r"neighbours\.weights holds .*NaN"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_allowed(
    tmp_path: Path, change: dict[str, np.ndarray], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = written(tmp_path / "bundle").path
    save_file(ARRAYS | change, root / NEIGHBOURS)
    manifest = Manifest.read(root / "manifest.json")
    replace(manifest, files=manifest.files | {NEIGHBOURS: file_entry(root / NEIGHBOURS)}).write(root / "manifest.json")
    # Only the content is wrong: the version is what such a file makes it.
    monkeypatch.setattr(
        "services.algorithms.bundles.model_bundle.model_version_of", lambda *content: manifest.model_version
    )
    with pytest.raises(BundleError, match=message):
        _ = load_bundle(root).neighbours


@pytest.mark.parametrize(
    ("field", "value"), [("decay", 0.0), ("decay", 1.5), ("model_share", 0.0), ("model_share", float("nan")),
                         ("num_neighbours", 0)],
)  # fmt: skip
def test_a_shape_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(BundleError, match=rf"neighbours\.{field}={value}; allowed: more than 0"):
        replace(SHAPE, **{field: value})


def test_a_listed_shape_without_its_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "bundle").path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][NEIGHBOURS]
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"missing: \['neighbours\.safetensors'\]"):
        load_bundle(path.parent)
