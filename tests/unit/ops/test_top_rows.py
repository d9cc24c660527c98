"""The rows in reach of the k-th best, by each build, against a full sort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import native_builds

from services.algorithms.ops.top_rows import count_passing, top_rows


def wanted(scores: np.ndarray, k: int, slack: float, mask: np.ndarray) -> tuple[set[int], set[int]]:
    """Rows that must be there, and rows that may be (one float further down)."""
    rows = np.flatnonzero(mask & (scores > -np.inf))
    if len(rows) <= k:
        return set(rows.tolist()), set(rows.tolist())
    reach = float(np.sort(scores[rows])[-k]) - slack
    may = np.nextafter(np.nextafter(np.float32(reach), np.float32(-np.inf)), np.float32(-np.inf))
    return set(rows[scores[rows].astype(np.float64) >= reach].tolist()), set(rows[scores[rows] >= may].tolist())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(0, 5000),
    k=st.sampled_from([1, 2, 10, 400, 10**6]),
    slack=st.sampled_from([0.0, 1e-6, 0.3, 100.0]),
    levels=st.sampled_from([1, 3, 10**6]),
    order=st.sampled_from(["random", "rising", "falling"]),
    mask=st.sampled_from(["none", "shared", "per query"]),
    share=st.sampled_from([0.0, 0.01, 0.7]),
)
def test_rows_in_reach_of_the_kth_best_are_found_and_no_others(
    seed: int, count: int, k: int, slack: float, levels: int, order: str, mask: str, share: float
) -> None:
    rng = np.random.default_rng(seed)
    scores = (rng.integers(0, levels, size=(3, count)) / levels - 0.5).astype(np.float32)
    if order != "random":
        scores = np.sort(scores, axis=1)[:, :: 1 if order == "rising" else -1]
    scores[0, : count // 10] = -np.inf
    shape = (3, count) if mask == "per query" else (count,)
    allowed = None if mask == "none" else rng.random(shape) < share
    masks = np.broadcast_to(True if allowed is None else allowed, scores.shape)
    slacks = np.array([0.0, slack, 2 * slack])
    for library in native_builds("top_rows").values():
        answer = top_rows(scores, k, slacks, allowed, kernels=library)
        assert len(answer) == 3
        for query, rows in enumerate(answer):
            must, may = wanted(scores[query], k, slacks[query], masks[query])
            assert (np.diff(rows) > 0).all()
            assert must <= set(rows.tolist()) <= may


def test_no_queries_give_no_rows() -> None:
    assert top_rows(np.empty((0, 7), dtype=np.float32), 3, np.empty(0)) == []


def test_k_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="k=0 allowed: at least 1"):
        top_rows(np.zeros((1, 7), dtype=np.float32), 0, np.zeros(1))


def test_a_mask_that_may_change_is_counted_again() -> None:
    base = np.zeros(9, dtype=bool)
    view, fixed = base[:], np.ones(4, dtype=bool)
    view.flags.writeable = fixed.flags.writeable = False
    for count in range(3):
        base[:count] = True
        assert [count_passing(mask, 2, 9).tolist() for mask in (base, view, fixed, fixed)] == [
            [count, count],
            [count, count],
            [4, 4],
            [4, 4],
        ]
