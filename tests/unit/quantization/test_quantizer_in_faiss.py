"""Codebooks and codes inside FAISS: its scans score what our decoder says, and nothing is encoded again."""

import gc

import numpy as np
import pytest
from embedding_scene import clustered
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.quantization import (
    InvertedFileQuantizer,
    ProductQuantizer,
    train_inverted_file,
    train_product_quantizer,
)
from services.algorithms.quantization.faiss_indexes import (
    inverted_fast_scan,
    inverted_index,
    packed_codes,
    product_fast_scan,
    product_index,
)

faiss = pytest.importorskip("faiss", reason="faiss is an optional extra")

POINTS = clustered(1_500, 24, 0)
QUERIES = clustered(7, 24, 1)
SHAPES = [(8, 4), (3, 4), (4, 8)]


def product(num_subspaces: int, code_bits: int, *, rotate: bool = False) -> tuple[ProductQuantizer, np.ndarray]:
    quantizer = train_product_quantizer(POINTS, num_subspaces=num_subspaces, code_bits=code_bits, seed=0, rotate=rotate)
    return quantizer, quantizer.encode(POINTS)


def inverted(num_subspaces: int, code_bits: int) -> tuple[InvertedFileQuantizer, np.ndarray, np.ndarray]:
    quantizer = train_inverted_file(POINTS, num_cells=10, num_subspaces=num_subspaces, code_bits=code_bits, seed=0)
    return quantizer, *quantizer.encode(POINTS)


def table_error(quantizer: ProductQuantizer) -> float:
    """What a query of length |q| can lose to uint8 tables: half a step per table, a step being the widest table's
    range / 255, plus the bias's own rounding."""
    parts = QUERIES.reshape(len(QUERIES), quantizer.num_subspaces, -1)
    tables = np.einsum("bms,mks->bmk", parts, quantizer.codebooks)
    steps = np.ptp(tables, axis=2).max(axis=1) / 255
    return float((quantizer.num_subspaces + 1) * steps.max())


@pytest.mark.parametrize(("num_subspaces", "code_bits"), SHAPES)
def test_faiss_scores_are_our_decoded_inner_products(num_subspaces: int, code_bits: int) -> None:
    quantizer, codes = product(num_subspaces, code_bits)
    expected = QUERIES @ quantizer.decode(codes).T
    scores, ids = product_index(quantizer, codes).search(QUERIES, 40)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, ids, axis=1), atol=1e-5)
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :40], atol=1e-5)


@pytest.mark.parametrize(("num_subspaces", "code_bits"), SHAPES)
def test_faiss_reads_back_our_codes_not_its_own(num_subspaces: int, code_bits: int) -> None:
    quantizer, codes = product(num_subspaces, code_bits)
    index = product_index(quantizer, codes)
    np.testing.assert_allclose(index.reconstruct_n(0, len(POINTS)), quantizer.decode(codes), atol=1e-6)
    own = index.sa_decode(index.sa_encode(POINTS))
    assert not np.allclose(own, quantizer.decode(codes))


@pytest.mark.parametrize(("num_subspaces", "code_bits"), SHAPES)
def test_inverted_scores_are_our_decoded_inner_products(num_subspaces: int, code_bits: int) -> None:
    quantizer, cells, codes = inverted(num_subspaces, code_bits)
    index = inverted_index(quantizer, cells, codes, ids=np.arange(len(POINTS)) + 1_000)
    gc.collect()
    index.nprobe = 10
    expected = QUERIES @ quantizer.decode(cells, codes).T
    scores, ids = index.search(QUERIES, 40)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, ids - 1_000, axis=1), atol=1e-5)
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :40], atol=1e-5)


@pytest.mark.parametrize("num_subspaces", [8, 3])
def test_fast_scan_scores_are_within_their_tables_error(num_subspaces: int) -> None:
    quantizer, codes = product(num_subspaces, 4)
    expected = QUERIES @ quantizer.decode(codes).T
    scores, ids = product_fast_scan(quantizer, codes).search(QUERIES, 40)
    assert np.abs(scores - np.take_along_axis(expected, ids, axis=1)).max() < table_error(quantizer)
    # A few hundredths of the scores' spread: an encoding by l2 or swapped nibbles would be far outside.
    assert table_error(quantizer) < 0.2 * expected.std()


@pytest.mark.parametrize("num_subspaces", [8, 3])
def test_inverted_fast_scan_scores_are_within_their_tables_error(num_subspaces: int) -> None:
    quantizer, cells, codes = inverted(num_subspaces, 4)
    index = inverted_fast_scan(quantizer, cells, codes)
    gc.collect()
    index.nprobe = 10
    expected = QUERIES @ quantizer.decode(cells, codes).T
    scores, ids = index.search(QUERIES, 40)
    # The cell's own score takes part in the tables' range.
    cell_scores = QUERIES @ quantizer.cells.centres.T
    bound = table_error(quantizer.residuals) + 2 * float(np.ptp(cell_scores, axis=1).max()) / 255
    assert np.abs(scores - np.take_along_axis(expected, ids, axis=1)).max() < bound


@pytest.mark.parametrize("code_bits", [4, 8])
def test_a_rotation_travels_with_the_codes(code_bits: int) -> None:
    quantizer, codes = product(4, code_bits, rotate=True)
    expected = QUERIES @ quantizer.decode(codes).T
    scores, ids = product_index(quantizer, codes).search(QUERIES, 40)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, ids, axis=1), atol=1e-5)
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :40], atol=1e-5)
    coarse = train_inverted_file(POINTS, num_cells=10, num_subspaces=4, code_bits=code_bits, seed=0, rotate=True)
    cells, codes = coarse.encode(POINTS)
    expected = QUERIES @ coarse.decode(cells, codes).T
    index = inverted_index(coarse, cells, codes)
    gc.collect()
    faiss.extract_index_ivf(index).nprobe = 10
    scores, ids = index.search(QUERIES, 40)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, ids, axis=1), atol=1e-5)


def test_a_rotated_fast_scan_finds_what_the_decoder_ranks_first() -> None:
    quantizer, codes = product(8, 4, rotate=True)
    expected = QUERIES @ quantizer.decode(codes).T
    scores, ids = product_fast_scan(quantizer, codes).search(QUERIES, 40)
    assert np.abs(scores - np.take_along_axis(expected, ids, axis=1)).max() < 0.05 * expected.std()
    coarse = train_inverted_file(POINTS, num_cells=10, num_subspaces=8, code_bits=4, seed=0, rotate=True)
    cells, codes = coarse.encode(POINTS)
    index = inverted_fast_scan(coarse, cells, codes)
    faiss.extract_index_ivf(index).nprobe = 10
    expected = QUERIES @ coarse.decode(cells, codes).T
    scores, ids = index.search(QUERIES, 40)
    assert np.abs(scores - np.take_along_axis(expected, ids, axis=1)).max() < 0.05 * expected.std()


@given(num_points=st.integers(0, 70), num_subspaces=st.integers(1, 9), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_any_number_of_points_and_subspaces_survives_the_handover(
    num_points: int, num_subspaces: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    codebooks = rng.normal(size=(num_subspaces, 16, 2)).astype(np.float32)
    quantizer = ProductQuantizer(codebooks=codebooks, threshold=0.2, scale=1.0)
    codes = rng.integers(16, size=(num_points, num_subspaces)).astype(np.uint8)
    index = product_index(quantizer, codes)
    assert index.ntotal == num_points
    if num_points:
        np.testing.assert_allclose(index.reconstruct_n(0, num_points), quantizer.decode(codes), atol=1e-6)
    query = rng.normal(size=(1, 2 * num_subspaces)).astype(np.float32)
    scores, ids = index.search(query, 5)
    best = -np.sort(-(query @ quantizer.decode(codes).T), axis=1)[0, :5]
    np.testing.assert_allclose(scores[0, : len(best)], best, atol=1e-4)
    assert (ids[0, len(best) :] == -1).all()


def test_four_bit_codes_share_a_byte_low_half_first() -> None:
    codes = np.array([[1, 2, 3], [15, 0, 8]], dtype=np.uint8)
    np.testing.assert_array_equal(packed_codes(codes, 4), [[0x21, 0x03], [0x0F, 0x08]])
    np.testing.assert_array_equal(packed_codes(codes, 8), codes)


def test_bad_codes_cells_and_ids_are_named() -> None:
    quantizer, cells, codes = inverted(4, 8)
    with pytest.raises(ValueError, match="4-bit codes only"):
        product_fast_scan(quantizer.residuals, codes)
    with pytest.raises(ValueError, match="4-bit codes only"):
        inverted_fast_scan(quantizer, cells, codes)
    with pytest.raises(ValueError, match="codes are uint8 of shape"):
        product_index(quantizer.residuals, codes[:, :3])
    with pytest.raises(ValueError, match="codes are int64"):
        product_index(quantizer.residuals, codes.astype(np.int64))
    with pytest.raises(ValueError, match="cells must be 1500 numbers from 0 to 9"):
        inverted_index(quantizer, cells + 1, codes)
    with pytest.raises(ValueError, match="ids has shape"):
        inverted_index(quantizer, cells, codes, ids=np.arange(3))
    four_bits, small = product(8, 4)
    with pytest.raises(ValueError, match="codes holds 200"):
        product_index(four_bits, np.full_like(small, 200))
