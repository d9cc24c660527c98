"""Exact top-K in two passes: a certified bound drops nearly every item; the other items are scored in full.

The best items by averaged components form a pool. Its K-th best s, less all rounding errors, is a proven threshold. The
bound pass keeps items that might reach it, or exceed it by an allowed gap (decision 091). This is the paper's Algorithm
1 with a better threshold and bounds on the gates (decision 006).

Letters: B queries, P component pairs, K results.
"""

import time

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.pools import certificates, check_pool_size
from services.algorithms.indexes.protocol import (
    EXACT,
    Indices,
    Mask,
    Pass,
    Pool,
    TopK,
    empty_answer,
)
from services.algorithms.indexes.rescoring import best_rows, finish
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.ops.mol_bounds import AverageItems, BoundPass, best_averages
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates

# At the Books shape (K = 100) a pool of 1,000 gives a threshold within 0.005 of the exact K-th score. With 3,706 films,
# a pool of 240 leaves as many survivors as one of 1,000, in three quarters of the time.
_POOL, _POOL_OF_ITEMS = 1_000, 16
_POOL_PER_RESULT = 4
# The threshold is this many error bounds below a pool's K-th score. With 4, all items that BruteForce re-evaluates in
# float64 survive, so both give the same answer, ties included.
_REACH = 4


class ExactLowPrecision(ScoredIndex):
    """Drops items by bounds from gate intervals and int8 cosines. Certificate: exact, or within a search's allowed gap.

    With P = 1 it is exact inner-product search by an int8 scan. Besides the states it needs 364 bytes per item at 8 x 8
    x 32.
    """

    name = "exact_low_precision"
    _by_gates = True

    def __init__(
        self,
        items: MolScorer,
        *,
        pool_size: int | None = None,
    ) -> None:
        """Prepare like `ScoredIndex`. Raises: ValueError also for a pool_size below 1.

        pool_size: number of items scored for a threshold, at least 4 k. None means 1,000, but at most a sixteenth of
        the items.
        """
        if pool_size is not None:
            check_pool_size("pool_size", pool_size)
        super().__init__(items)
        self._pool_size = min(_POOL, self.num_items // _POOL_OF_ITEMS) if pool_size is None else pool_size
        self._averages = AverageItems(self.scorer)
        self._bounds = BoundPass(self.scorer, by_gates=self._by_gates)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._averages.nbytes + self._bounds.nbytes

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None, max_gap: float = 0.0) -> TopK:
        self.check(queries, k, allowed)
        pools, scores, thresholds, passes = self._reaching(queries, k, allowed, max_gap)
        answer = finish(self.scorer, queries, pools, scores, k)
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=certificates(thresholds, answer.kth_scores) if max_gap else (EXACT,) * len(queries),
            passes=(*passes, *answer.passes),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best items by s in float32; the bound is the best omitted score plus its error."""
        self.check(queries, size, allowed)
        pools, all_scores, thresholds, passes = self._reaching(queries, size + 1, allowed)
        error = self.scorer.error_bounds(queries)
        item_indices, out = empty_answer(len(queries), min(size, self.num_items))
        bounds = np.full(len(queries), -np.inf)
        for query, (pool, scores) in enumerate(zip(pools, all_scores, strict=True)):
            if not len(pool):
                continue
            best = best_rows(scores, size + 1)
            if len(best) > size:
                bounds[query] = max(float(scores[best[size]]) + error[query], thresholds[query])
                best = best[:size]
            item_indices[query, : len(best)] = pool[best]
            out[query, : len(best)] = scores[best]
        return Pool(item_indices=item_indices, scores=out, bounds=bounds, passes=passes)

    def _reaching(
        self, queries: QueryStates, k: int, allowed: Mask | None, max_gap: float = 0.0
    ) -> tuple[list[Indices], list[npt.NDArray[np.float32]], npt.NDArray[np.float64], tuple[Pass, ...]]:
        """Return rows and float32 scores of a pool's K best items, and of items that may exceed its K-th score by
        `max_gap`.

        Other items score below `thresholds`.
        """
        num_queries = len(queries)
        everything = self.every_item(queries)
        started = time.perf_counter()
        size = max(self._pool_size, _POOL_PER_RESULT * k)
        pools = best_averages(self._averages, queries, size, allowed)
        pooled = time.perf_counter()
        first = Pass("first_stage", pooled - started, everything)
        pool_scores = self.scorer.scores_at(queries, pools)
        least = self._thresholds(queries, pool_scores, k)
        scored = time.perf_counter()
        sizes = np.array([len(pool) for pool in pools], dtype=np.int64)
        passes: tuple[Pass, ...] = (first, Pass("threshold", scored - pooled, sizes))
        if num_queries == 0 or sizes.max() < min(size, self.num_items):
            # The pools have all allowed items.
            return pools, pool_scores, np.full(num_queries, -np.inf), passes
        thresholds = least + max_gap
        found = self._bounds.survivors(queries, thresholds, allowed)
        bounded = time.perf_counter()
        rows = found.rows
        if max_gap:  # the pool's K best may be below `thresholds`
            near = [here[row >= bound] for here, row, bound in zip(pools, pool_scores, least, strict=True)]
            rows = [np.union1d(here, best) for here, best in zip(rows, near, strict=True)]
        scores = self.scorer.scores_at(queries, rows)
        full = time.perf_counter()
        counts = np.array([len(here) for here in rows], dtype=np.int64)
        passes += (Pass("bounds", bounded - scored, everything),)
        if self._by_gates:
            passes += (Pass("gate_intervals", 0.0, found.tested),)
        return rows, scores, thresholds, (*passes, Pass("full", full - bounded, counts))

    def _thresholds(
        self, queries: QueryStates, scores: list[npt.NDArray[np.float32]], k: int
    ) -> npt.NDArray[np.float64]:
        """A lower bound of each pool's K-th best s (B,), -inf for a pool of fewer items."""
        error = self.scorer.error_bounds(queries) + self.scorer.error_bounds_float64(queries)
        thresholds = np.full(len(queries), -np.inf)
        for query, row in enumerate(scores):
            if len(row) >= k:
                thresholds[query] = float(np.partition(row, len(row) - k)[len(row) - k]) - _REACH * error[query]
        return thresholds


class ExactAlgorithm1(ExactLowPrecision):
    """The paper's Algorithm 1: it ignores gates and drops items whose largest cosine is below the threshold.

    On a lightly trained model it drops almost none.
    """

    name = "exact_algorithm_1"
    _by_gates = False
