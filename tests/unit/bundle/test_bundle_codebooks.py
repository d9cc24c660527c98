"""Codebooks in a bundle: derived from its items, so no part of its version; refused where they code other vectors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundle_scene import content, dot_content
from safetensors.numpy import save_file

from services.algorithms.bundles.model_bundle import CODEBOOKS, BundleError, load_bundle
from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.items.catalogue import catalogue_from_bundle
from services.offline.bundles.model import BundleContent, add_files, write_bundle
from services.offline.training.codebooks.inverted_file import catalogue_codebooks


def codebooks_of(given: BundleContent) -> Codebooks:
    found = catalogue_codebooks(given.item_states, given.pair_gate)
    assert found is not None
    return found


@pytest.mark.parametrize("given", [content(), dot_content()], ids=["mixture", "dot product"])
def test_codebooks_read_back_equal_and_leave_the_version_alone(tmp_path: Path, given: BundleContent) -> None:
    plain, wanted = write_bundle(tmp_path / "plain", given), codebooks_of(given)
    bundle = write_bundle(tmp_path / "coded", replace(given, codebooks=wanted))
    assert plain.codebooks is None
    assert bundle.codebooks is not None
    assert bundle.codebooks.arrays.keys() == wanted.arrays.keys()
    for name, array in wanted.arrays.items():
        np.testing.assert_array_equal(bundle.codebooks.arrays[name], array)
    assert bundle.model_version == plain.model_version
    catalogue = catalogue_from_bundle(bundle)
    assert catalogue.codebooks is catalogue.part([0, 2]).codebooks is bundle.codebooks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_scale": np.ones(3)}, r"gate_scale has shape \(3,\); manifest.json says \(4,\)"),
        ({"centres": np.ones((2, 10), np.float32)}, "centres and rotation must be 12 wide"),
        ({"extra": np.ones(3)}, "unexpected keyword argument 'extra'"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_file(
    tmp_path: Path, change: dict[str, np.ndarray], message: str
) -> None:
    given = content()
    root = write_bundle(tmp_path / "bundle", replace(given, codebooks=codebooks_of(given))).path
    save_file(codebooks_of(given).arrays | change, tmp_path / "changed")
    with pytest.raises(BundleError, match=f"bundle/{CODEBOOKS}: .*{message}"):
        add_files(root, {CODEBOOKS: tmp_path / "changed"})


def test_codebooks_of_another_model_are_refused_with_both_widths(tmp_path: Path) -> None:
    given = dot_content()
    root = write_bundle(tmp_path / "bundle", replace(given, codebooks=codebooks_of(given))).path
    narrow = replace(given, item_states=replace(given.item_states, components=given.item_states.components[:, :, :6]))
    save_file(codebooks_of(narrow).arrays, tmp_path / "changed")
    with pytest.raises(BundleError, match="vectors are 8 wide; these codebooks code 6"):
        add_files(root, {CODEBOOKS: tmp_path / "changed"})
    (root / CODEBOOKS).write_bytes((root / CODEBOOKS).read_bytes()[:-4])
    with pytest.raises(BundleError, match=f"{CODEBOOKS} holds .* bytes; manifest.json says"):
        load_bundle(root)
