"""Codebooks and codes inside FAISS: its scans score what our decoder says, and nothing is encoded again."""

import gc
import sys
from dataclasses import replace

import numpy as np
import pytest
from embedding_scene import clustered
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.indexes.quantized.anisotropic import (
    inverted_fast_scan,
    inverted_index,
    rotating,
)
from services.algorithms.indexes.quantized.codebooks import InvertedCodes
from services.offline.training.codebooks.inverted_file import train_inverted_file

faiss = pytest.importorskip("faiss", reason="faiss is an optional extra")

POINTS = clustered(1_500, 24, 0)
QUERIES = clustered(7, 24, 1)
SHAPES = [(8, 4), (3, 4), (4, 8)]


def coded(num_subspaces: int, code_bits: int, *, rotate: bool = False) -> InvertedCodes:
    codebooks = train_inverted_file(
        POINTS, num_cells=10, num_subspaces=num_subspaces, code_bits=code_bits, seed=0, rotate=rotate
    )
    return codebooks.coded(POINTS)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(("num_subspaces", "code_bits"), SHAPES)
def test_faiss_scores_are_our_decoded_inner_products(num_subspaces: int, code_bits: int, rotate: bool) -> None:
    codes = coded(num_subspaces, code_bits, rotate=rotate)
    index = rotating(codes, inverted_index(codes))
    gc.collect()
    faiss.extract_index_ivf(index).nprobe = 10
    expected = QUERIES @ codes.decoded().T
    scores, ids = index.search(QUERIES, 40)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, ids, axis=1), atol=1e-5)
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :40], atol=1e-5)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("num_subspaces", [8, 3])
def test_fast_scan_scores_are_within_their_tables_error(num_subspaces: int, rotate: bool) -> None:
    """What uint8 tables lose: half a step per table, a step being the widest table's range / 255, plus the bias's own
    rounding; the cell's own score takes part in the range. Swapped nibbles would be far outside."""
    codes = coded(num_subspaces, 4, rotate=rotate)
    turned = QUERIES if codes.rotation is None else QUERIES @ codes.rotation
    tables = np.einsum("bms,mks->bmk", turned.reshape(len(QUERIES), num_subspaces, -1), codes.codebooks)
    step = float(np.ptp(tables, axis=2).max()) / 255
    bound = (num_subspaces + 1) * step + 2 * float(np.ptp(turned @ codes.centres.T, axis=1).max()) / 255
    index = inverted_fast_scan(codes)
    gc.collect()
    faiss.extract_index_ivf(index).nprobe = 10
    expected = QUERIES @ codes.decoded().T
    scores, ids = index.search(QUERIES, 40)
    assert np.abs(scores - np.take_along_axis(expected, ids, axis=1)).max() < bound
    assert bound < 0.2 * expected.std()


@given(num_points=st.integers(0, 70), num_subspaces=st.integers(1, 9), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_any_number_of_points_and_subspaces_survives_the_handover(
    num_points: int, num_subspaces: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = InvertedCodes(
        centres=rng.normal(size=(3, 2 * num_subspaces)).astype(np.float32),
        codebooks=rng.normal(size=(num_subspaces, 16, 2)).astype(np.float32),
        rotation=None,
        cells=rng.integers(3, size=num_points).astype(np.int32),
        codes=rng.integers(16, size=(num_points, num_subspaces)).astype(np.uint8),
    )
    index = rotating(codes, inverted_index(codes))
    index.nprobe = 3
    assert index.ntotal == num_points
    query = rng.normal(size=(1, 2 * num_subspaces)).astype(np.float32)
    scores, ids = index.search(query, 5)
    best = -np.sort(-(query @ codes.decoded().T), axis=1)[0, :5]
    np.testing.assert_allclose(scores[0, : len(best)], best, atol=1e-4)
    assert (ids[0, len(best) :] == -1).all()


def test_four_bit_codes_share_a_byte_low_half_first() -> None:
    codes = replace(coded(3, 4), cells=np.zeros(2, np.int32), codes=np.array([[1, 2, 3], [15, 0, 8]], dtype=np.uint8))
    np.testing.assert_array_equal(codes.packed(), [[0x21, 0x03], [0x0F, 0x08]])
    wide = coded(4, 8)
    np.testing.assert_array_equal(wide.packed(), wide.codes)


def test_arrays_that_do_not_fit_each_other_are_named() -> None:
    codes = coded(8, 4)
    with pytest.raises(ValueError, match="codes are uint8 of shape"):
        replace(codes, codes=codes.codes[:, :3])
    with pytest.raises(ValueError, match="codes are int64"):
        replace(codes, codes=codes.codes.astype(np.int64))
    with pytest.raises(ValueError, match="codes holds 200; there are 16 codewords"):
        replace(codes, codes=np.full_like(codes.codes, 200))
    with pytest.raises(ValueError, match="cells must be numbers from 0 to 9"):
        replace(codes, cells=codes.cells + 1)
    with pytest.raises(ValueError, match="24 wide"):
        replace(codes, centres=codes.centres[:, :8])
    with pytest.raises(ValueError, match="4-bit codes only"):
        inverted_fast_scan(coded(4, 8))


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = coded(8, 4)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match="FAISS is not installed; it comes with the extra bench-cpu"):
        inverted_fast_scan(codes)
