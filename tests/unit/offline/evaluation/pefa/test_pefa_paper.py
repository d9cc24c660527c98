"""PEFA on matrices against a dense transcription of the paper's equations 6 and 8."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from services.offline.evaluation.pefa.paper import nearest_queries, relevance, xl_scores, xl_votes, xs_passages


def unit(array: np.ndarray) -> np.ndarray:
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float32)


def matrices(seed: int, n: int, m: int, nnz: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, sparse.csr_matrix]:
    """Passages, queries, dense Y and the same Y of repeated pairs."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, m, nnz), rng.integers(0, n, nnz)
    dense = np.zeros((m, n))
    dense[rows, columns] = 1
    pairs = relevance(np.column_stack([rows, columns]), num_queries=m, num_passages=n)
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


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 15), st.integers(1, 20), st.integers(1, 30), st.sampled_from((0, 40)),
    st.floats(0, 1),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_xl_is_equation_6_divided_by_k(seed: int, n: int, m: int, k: int, nnz: int, share: float) -> None:
    passages, queries, dense, pairs = matrices(seed, n, m, nnz)
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
    assert (got != wanted).nnz == 0


def test_what_does_not_fit_is_refused() -> None:
    passages, queries, _, pairs = matrices(4, 4, 3, 6)
    for share in (-0.01, 1.01, float("nan")):
        with pytest.raises(ValueError, match="share="):
            xs_passages(passages, queries, pairs, share)
        with pytest.raises(ValueError, match="share="):
            xl_scores(np.zeros((1, 4)), pairs, share)
    for wrong, named in ((queries[:2], "dimension mismatch"), (queries[:, :2], "broadcast"), (queries * np.nan, "NaN")):
        with pytest.raises(ValueError, match=named):
            xs_passages(passages, wrong, pairs, 0.5)
    with pytest.raises(ValueError, match="exceeds"):
        relevance([[0, 0], [1, 4]], num_queries=3, num_passages=4)
