"""PEFA on matrices against a dense transcription of the paper's equations 6 and 8."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.offline.evaluation.pefa.paper import Pairs, nearest_queries, xl_scores, xl_votes, xs_passages


def unit(array: np.ndarray) -> np.ndarray:
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float32)


def matrices(seed: int, n: int, m: int, nnz: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Pairs]:
    """Passages, queries, dense Y and the same Y as pairs."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, m, nnz), rng.integers(0, n, nnz)
    dense = np.zeros((m, n))
    dense[rows, columns] = 1
    pairs = Pairs.of(rows, columns, num_queries=m, num_passages=n)
    return unit(rng.normal(size=(n, 6))), unit(rng.normal(size=(m, 6))), dense, pairs


@given(st.integers(0, 2**32 - 1), st.integers(1, 15), st.integers(1, 20), st.integers(0, 60), st.floats(0, 1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_xs_is_equation_8(seed: int, n: int, m: int, nnz: int, share: float) -> None:
    passages, queries, dense, pairs = matrices(seed, n, m, nnz)
    sums = dense.T @ queries.astype(np.float64)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    blended = share * passages + (1 - share) * sums / np.where(lengths > 0, lengths, 1)
    wanted = np.where(lengths > 0, blended, passages)
    assert np.abs(xs_passages(passages, queries, pairs, share) - wanted).max() < 1e-6


@given(st.integers(0, 2**32 - 1), st.integers(1, 15), st.integers(1, 20), st.integers(1, 30), st.floats(0, 1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_xl_is_equation_6_divided_by_k(seed: int, n: int, m: int, k: int, share: float) -> None:
    passages, queries, dense, pairs = matrices(seed, n, m, 40)
    asked = unit(np.random.default_rng(seed + 1).normal(size=(4, 6)))
    model = asked.astype(np.float64) @ passages.T.astype(np.float64)
    similar = asked.astype(np.float64) @ queries.T.astype(np.float64)
    wanted = share * model
    for row in range(4):
        near = np.argsort(-similar[row], kind="stable")[:k]
        wanted[row] += (1 - share) * (similar[row, near] @ dense[near]) / k
    rows, products = nearest_queries(asked, queries, k)
    assert rows.shape == (4, min(k, m))
    assert np.abs(xl_scores(model, xl_votes(rows, products, pairs, k=k), share) - wanted).max() < 1e-12


def test_xl_skips_neighbours_that_an_approximate_search_did_not_find() -> None:
    _, queries, _, pairs = matrices(1, 5, 8, 30)
    rows, products = nearest_queries(queries[:2], queries, 4)
    missing = rows.copy()
    missing[:, 3] = -1
    got = xl_votes(missing, products, pairs, k=4)
    wanted = xl_votes(rows[:, :3], products[:, :3], pairs, k=4)
    for (passages, votes), (expected_passages, expected) in zip(got, wanted, strict=True):
        assert np.array_equal(passages, expected_passages)
        assert np.array_equal(votes, expected)


def test_many_blocks_make_the_same_passages_as_one() -> None:
    rng = np.random.default_rng(2)
    n, m = 20_000, 500  # width 256: 8,192 passages to a block
    passages, queries = unit(rng.normal(size=(n, 256))), unit(rng.normal(size=(m, 256)))
    rows, columns = rng.integers(0, m, 30_000), rng.integers(0, n, 30_000)
    pairs = Pairs.of(rows, columns, num_queries=m, num_passages=n)
    got = xs_passages(passages, queries, pairs, 0.5)
    for passage in (0, 8191, 8192, 8193, 16_384, n - 1):
        own = np.unique(rows[columns == passage])
        total = queries[own].astype(np.float64).sum(axis=0)
        wanted = 0.5 * passages[passage] + 0.5 * total / np.linalg.norm(total) if len(own) else passages[passage]
        assert np.abs(got[passage] - wanted).max() < 1e-6


def test_no_pairs_change_nothing() -> None:
    passages, queries, _, _ = matrices(3, 4, 3, 0)
    none = Pairs.of([], [], num_queries=3, num_passages=4)
    assert np.array_equal(xs_passages(passages, queries, none, 0.1), passages)
    rows, products = nearest_queries(queries, queries, 2)
    assert all(len(found) == 0 for found, _ in xl_votes(rows, products, none, k=2))


def test_what_does_not_fit_is_refused() -> None:
    passages, queries, _, pairs = matrices(4, 4, 3, 6)
    for share in (-0.01, 1.01, float("nan")):
        with pytest.raises(ValueError, match="share="):
            xs_passages(passages, queries, pairs, share)
        with pytest.raises(ValueError, match="share="):
            xl_scores(np.zeros((1, 4)), [], share)
    with pytest.raises(ValueError, match="pairs of 3 queries and 4 passages; there are 2 and 4"):
        xs_passages(passages, queries[:2], pairs, 0.5)
    with pytest.raises(ValueError, match="expected"):
        xs_passages(passages, queries[:, :2], pairs, 0.5)
    with pytest.raises(ValueError, match="NaN"):
        xs_passages(passages * np.nan, queries, pairs, 0.5)
    with pytest.raises(ValueError, match="k=0"):
        nearest_queries(queries, queries, 0)
    with pytest.raises(ValueError, match="one width"):
        nearest_queries(queries, queries[:, :2], 1)
    with pytest.raises(ValueError, match="k=2"):
        xl_votes(np.zeros((1, 3), np.int64), np.zeros((1, 3)), pairs, k=2)
    with pytest.raises(ValueError, match="passages hold rows 0 to 4; allowed: 0 to 3"):
        Pairs.of([0, 1], [0, 4], num_queries=3, num_passages=4)
    with pytest.raises(ValueError, match="equal length"):
        Pairs.of([0, 1], [0], num_queries=3, num_passages=4)
