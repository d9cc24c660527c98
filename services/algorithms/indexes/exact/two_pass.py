"""Exact top-K in two passes: a certified bound drops nearly every item, the rest is scored in full.

The best items by averaged components form a pool and are scored. The pool's K-th best s, less all rounding errors, is a
proven threshold. The bound pass keeps all items that might reach it. `rescoring` ranks those in float32, then in
float64 within the error.
This is the paper's Algorithm 1 with a better threshold (the pool's K-th best, not its least) and, in all strategies but
the first, with bounds on the gates, too. docs/decisions/006-exact-top-k.md has the proof and the measurements.

If an answer may have a gap, the bound pass keeps only items that might score more than the gap above the threshold. A
dropped item then scores at most the gap above the pool's K-th, and the pool itself stays among the scored items.

Letters: B queries, X items, P_q, P_x components, P = P_q * P_x, d component width, K results, N pool size.
"""

import time
from dataclasses import dataclass

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
from services.algorithms.indexes.ranking import best_rows
from services.algorithms.indexes.rescoring import finish
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.ops.mol_bounds import AverageItems, BoundItems, BoundPass, best_averages
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates

# At the Books shape (K = 100) a pool of 1,000 finds a threshold within 0.005 of the exact K-th score. In a small
# catalogue it would be a large part: of 3,706 films, a pool of 240 leaves as many survivors as one of 1,000, in three
# quarters of the time.
_POOL, _POOL_OF_ITEMS = 1_000, 16
_POOL_PER_RESULT = 4
# Items at and just below the K-th place, where tight gate bounds matter.
_CENTRE_ITEMS = 64
# With this margin, all items that BruteForce re-evaluates in float64 survive here, so that even ties are equal.
_REACH = 4


@dataclass(frozen=True, slots=True)
class _Start:
    """The pool's rows and float32 scores per query, thresholds (B,) and centres (B, P)."""

    pools: list[Indices]
    scores: list[npt.NDArray[np.float32]]
    thresholds: npt.NDArray[np.float64]
    centres: npt.NDArray[np.float64]


class TwoPass(ScoredIndex):
    """The common part of the strategies. Certificate: exact, or within a search's allowed gap."""

    name: str
    _low_precision: bool
    _by_gates: bool
    _expanded: bool = False

    def __init__(
        self,
        items: ItemStates | MolScorer,
        pair_gate: PairGate | None = None,
        *,
        tie_ranks: npt.NDArray[np.integer] | None = None,
        pool_size: int | None = None,
        averages: AverageItems | None = None,
        codes: BoundItems | None = None,
    ) -> None:
        """As `ScoredIndex`; `averages` and `codes` of the same items are shared.

        pool_size: items scored for a threshold, at least 4 k; None: 1,000, or a sixteenth of the items if fewer.
        Raises: ValueError also for a pool_size below 1.
        """
        if pool_size is not None:
            check_pool_size("pool_size", pool_size)
        super().__init__(items, pair_gate, tie_ranks=tie_ranks)
        self._pool_size = min(_POOL, self.num_items // _POOL_OF_ITEMS) if pool_size is None else pool_size
        self._averages = AverageItems(self.scorer) if averages is None else averages
        self._bounds = BoundPass(
            self.scorer,
            low_precision=self._low_precision,
            by_gates=self._by_gates,
            expanded=self._expanded,
            items=codes,
        )

    @property
    def codes(self) -> BoundItems:
        """The items in the bound pass's format, for sharing with a strategy of the same precision."""
        return self._bounds.items

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._averages.nbytes + self._bounds.nbytes

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """Return the exact top `k` among the allowed items. See `Index.search`."""
        return self.search_within(queries, k, allowed, 0.0)

    def search_within(self, queries: QueryStates, k: int, allowed: Mask | None, max_gap: float) -> TopK:
        """See `GapIndex`. Raises: as `search`."""
        self.check(queries, k, allowed)
        pools, scores, thresholds, passes = self._reaching(queries, k, allowed, max_gap)
        answer = finish(self.scorer, queries, pools, scores, k, self.ranks)
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=certificates(thresholds, answer.kth_scores) if max_gap else (EXACT,) * len(queries),
            passes=(*passes, *answer.passes),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """Return the `size` best by s in float32, and the best omitted score plus its error bound."""
        self.check(queries, size, allowed)
        pools, all_scores, thresholds, passes = self._reaching(queries, size + 1, allowed)
        error = self.scorer.error_bounds(queries)
        item_indices, out = empty_answer(len(queries), min(size, self.num_items))
        bounds = np.full(len(queries), -np.inf)
        for query, (pool, scores) in enumerate(zip(pools, all_scores, strict=True)):
            if not len(pool):
                continue
            best = best_rows(scores, size + 1, self.ranks[pool])
            if len(best) > size:
                bounds[query] = max(float(scores[best[size]]) + error[query], thresholds[query])
                best = best[:size]
            item_indices[query, : len(best)] = pool[best]
            out[query, : len(best)] = scores[best]
        return Pool(item_indices=item_indices, scores=out, bounds=bounds, passes=passes)

    def _reaching(
        self, queries: QueryStates, k: int, allowed: Mask | None, max_gap: float = 0.0
    ) -> tuple[list[Indices], list[npt.NDArray[np.float32]], npt.NDArray[np.float64], tuple[Pass, ...]]:
        """Return rows and float32 scores of a pool's K best and of all that may score more than `max_gap` above its
        K-th; every other item is below `thresholds`.
        """
        num_queries = len(queries)
        everything = self.every_item(queries)
        started = time.perf_counter()
        size = max(self._pool_size, _POOL_PER_RESULT * k)
        pools = best_averages(self._averages, queries, size, allowed)
        pooled = time.perf_counter()
        first = Pass("first_stage", pooled - started, everything)
        begin = self._start(queries, pools, k)
        scored = time.perf_counter()
        sizes = np.array([len(pool) for pool in pools], dtype=np.int64)
        passes: tuple[Pass, ...] = (first, Pass("threshold", scored - pooled, sizes))
        if num_queries == 0 or sizes.max() < min(size, self.num_items):
            # Fewer than requested: the pools have all allowed items.
            return begin.pools, begin.scores, np.full(num_queries, -np.inf), passes
        thresholds = begin.thresholds + max_gap
        found = self._bounds.survivors(queries, thresholds, begin.centres, allowed)
        bounded = time.perf_counter()
        rows = found.rows
        if max_gap:  # the pool's K best may be below `thresholds`
            near = [
                here[row >= least] for here, row, least in zip(begin.pools, begin.scores, begin.thresholds, strict=True)
            ]
            rows = [np.union1d(here, best) for here, best in zip(rows, near, strict=True)]
        scores = self.scorer.scores_at(queries, rows)
        full = time.perf_counter()
        counts = np.array([len(here) for here in rows], dtype=np.int64)
        passes += (Pass("bounds", bounded - scored, everything),)
        if self._by_gates:
            passes += (Pass("gate_intervals", 0.0, found.tested),)
        return rows, scores, thresholds, (*passes, Pass("full", full - bounded, counts))

    def _start(self, queries: QueryStates, pools: list[Indices], k: int) -> _Start:
        """Return thresholds and centres from the pools' scores."""
        scores = self.scorer.scores_at(queries, pools)
        error = self.scorer.error_bounds(queries) + self.scorer.error_bounds_float64(queries)
        thresholds = np.full(len(queries), -np.inf)
        centres = np.zeros((len(queries), self.scorer.num_pairs))
        for query, (pool, row) in enumerate(zip(pools, scores, strict=True)):
            if len(pool) >= k:
                kth = float(np.partition(row, len(row) - k)[len(row) - k])
                thresholds[query] = kth - _REACH * error[query]
            if len(pool) and self._bounds.reads_centres:
                order = np.argsort(-row)
                near = order[min(k, len(pool)) // 2 : 2 * k]
                near = near[:: max(1, len(near) // _CENTRE_ITEMS)]
                components = self.scorer.components[pool[near]].mean(axis=0, dtype=np.float64)
                centres[query] = (queries.components[query] @ components.T).reshape(-1)
        return _Start(pools, scores, thresholds, centres)


class ExactAlgorithm1(TwoPass):
    """The paper's Algorithm 1: drops items whose largest cosine is below the threshold. No extra memory.

    Cost: X P d multiply-adds in float32; on a lightly trained model nearly every item survives.
    """

    name = "exact_algorithm_1"
    _low_precision = False
    _by_gates = False


class ExactGateBounds(TwoPass):
    """Drops items by bounds from gate intervals and float32 cosines. Memory: the item gates again, in int8."""

    name = "exact_gate_bounds"
    _low_precision = False
    _by_gates = True


class ExactLowPrecision(TwoPass):
    """Drops items by bounds from gate intervals and int8 cosines. Memory: 332 bytes an item at 8 x 8 x 32.

    The bounds include the cosines' error. With P = 1 it is exact inner-product search by an int8 scan.
    """

    name = "exact_low_precision"
    _low_precision = True
    _by_gates = True


class ExactExpandedGates(ExactLowPrecision):
    """As ExactLowPrecision, but the gate intervals come from an expansion around the pool's mean cosines.

    It takes a third of the work per item and the same memory. Its bounds are tight if the gate's Jacobian is nearly of
    low rank (the trained ml-1m model), and loose if cosines spread widely (docs/decisions/006).
    """

    name = "exact_expanded_gates"
    _expanded = True
