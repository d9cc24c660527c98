"""The last step of every algorithm: the exact top K of a pool, in order of score; ties go by item id.

A float32 pass finds the K-th score; items within its error bound are re-evaluated in float64, and scores that float64
cannot distinguish are ordered by item id.

Letters: B queries, K results, X items, n pool size (ragged: one per query).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import Indices, Pass, Scores, empty_answer
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.rounding import FLOAT64_PER_FLOAT32
from services.algorithms.ops.top_rows import top_rows
from services.algorithms.scoring.states import QueryStates


def order_by_score_then_id(scores: Scores, ranks: Indices, *, tolerance: float = 0.0) -> tuple[Indices, Scores]:
    """Order n candidates by (-score, rank): positions (n,) and their scores (n,).

    Scores connected by a chain of steps of at most `tolerance` count as equal: all get the largest.
    """
    order = np.lexsort((ranks, -scores))
    ordered = scores[order]
    if tolerance > 0 and len(ordered) > 1:
        new_group = np.empty(len(ordered), dtype=bool)
        new_group[0] = True
        np.greater(ordered[:-1] - ordered[1:], tolerance, out=new_group[1:])
        if not new_group.all():
            starts = np.flatnonzero(new_group)
            group = np.cumsum(new_group) - 1
            ordered = ordered[starts][group]
            order = order[np.lexsort((ranks[order], group))]
    return order, ordered


def best_rows(scores: npt.NDArray[np.float32], size: int) -> Indices:
    """The `size` best rows of scores (X,), by (-score, row), without rows at -inf."""
    rows = top_rows(scores[None], size, np.zeros(1))[0]
    return rows[np.argsort(-scores[rows], kind="stable")[:size]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """The exact top K of B pools.

    Shapes: item_indices (B, K') and scores (B, K') as in TopK, with K' = min(K, X). kth_scores (B,) are lower bounds of
    the K-th exact score; a bound is NaN if the pool had fewer than K items.
    """

    item_indices: Indices
    scores: Scores
    kth_scores: Scores
    passes: tuple[Pass, ...]


def rescore(scorer: MolScorer, queries: QueryStates, pools: Sequence[Indices], k: int) -> Rescored:
    """The exact top `k` of each query's pool of distinct rows (n,)."""
    started = time.perf_counter()
    sizes = np.array([len(pool) for pool in pools], dtype=np.int64)
    scores = scorer.scores_at(queries, pools)
    scored = time.perf_counter()
    answer = finish(scorer, queries, pools, scores, k)
    return replace(answer, passes=(Pass("full", scored - started, sizes), *answer.passes))


def finish(
    scorer: MolScorer,
    queries: QueryStates,
    pools: Sequence[Indices],
    scores: Sequence[npt.NDArray[np.float32]],
    k: int,
    *,
    error: Scores | None = None,
) -> Rescored:
    """The exact top `k` of pools with float32 scores (n,). error (B,): bounds of their errors, by default
    `scorer.error_bounds`.
    """
    started = time.perf_counter()
    error = scorer.error_bounds(queries) if error is None else error
    double_error = error * FLOAT64_PER_FLOAT32
    item_indices, out = empty_answer(len(queries), min(k, scorer.num_items))
    kth_scores = np.full(len(queries), np.nan)
    rows = [
        pool[within_reach(row_scores, k, slack)] if len(pool) else pool
        for pool, row_scores, slack in zip(pools, scores, error + double_error, strict=True)
    ]
    # One call for all queries: the kernel spreads their rows over threads.
    for query, exact in enumerate(scorer.scores_float64_at(queries, rows)):
        order, ordered = order_by_score_then_id(exact, rows[query], tolerance=2 * float(double_error[query]))
        found = min(k, len(order))
        item_indices[query, :found] = rows[query][order[:found]]
        out[query, :found] = ordered[:found]
        if found == k:
            kth_scores[query] = np.partition(exact, len(exact) - k)[len(exact) - k] - double_error[query]
    reevaluated = np.array([len(chosen) for chosen in rows], dtype=np.int64)
    passes = (Pass("float64", time.perf_counter() - started, reevaluated),)
    return Rescored(item_indices=item_indices, scores=out, kth_scores=kth_scores, passes=passes)


def within_reach(scores: npt.NDArray[np.float32], k: int, error: float) -> Indices:
    """Positions (n,) that may be among the top `k` if each score (X,) errs by up to `error`, without those at -inf."""
    k = min(k, len(scores))
    kth = float(np.partition(scores, len(scores) - k)[len(scores) - k])
    if kth == -np.inf:
        return np.flatnonzero(scores > -np.inf)
    # The K-th exact score is at least kth - error. If an item's exact score reaches it, its float32 score is at least
    # kth - 2 error.
    with np.errstate(over="ignore"):  # a limit below every float32 keeps all positions
        return np.flatnonzero(scores >= np.nextafter(np.float32(kth - 2 * error), np.float32(-np.inf)))
