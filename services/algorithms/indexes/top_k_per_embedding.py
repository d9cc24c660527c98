"""TopKPerEmbedding(N): the union of the N best items of every component pair, then full scores within it.

From arXiv:2407.15462, section 3.2. A left-out item is in none of the lists, so its cosine of pair p is at most t_p,
the (N + 1)-th best: s <= max_p t_p, and less by the bound on its gating weights (gate_bounds.py). The paper's own
Theorem 2, phi of the (N + 1)-th items, is no bound (counterexample in the tests).

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d width, K results, N per pair.
Cost: X P d multiply-adds per query, then full scores on N to N P items. Memory: nothing beside the scorer's.
"""

import time

import numpy as np

from services.algorithms.filters import count_passing
from services.algorithms.indexes.gate_bounds import GateBounds
from services.algorithms.indexes.pools import PooledIndex
from services.algorithms.indexes.protocol import (
    Indices,
    Mask,
    Pass,
    Pool,
    Scores,
    TopK,
    asked_again,
    empty_answer,
)
from services.algorithms.ops.grouped_top_k import GroupedTopK
from services.algorithms.ops.mol_scores import MolScorer, rounding
from services.algorithms.states import QueryStates


class TopKPerEmbedding(PooledIndex):
    """The union of the N best per component pair, reordered by s. Certificate: bounded by what the lists left out.

    N is doubled while the union of a search has fewer than k items.
    """

    name = "top_k_per_embedding"

    def _prepare(self) -> None:
        self._components = GroupedTopK(self.scorer.components, tie_ranks=self.ranks)
        self._gate_bounds = GateBounds(self.scorer)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._components.nbytes

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """The top `k` by s of the union of the N best per pair, and how far from the exact top `k` that can be."""
        self.check(queries, k, allowed)
        return self._search(queries, k, allowed, self.pool_size)

    def _search(self, queries: QueryStates, k: int, allowed: Mask | None, depth: int) -> TopK:
        """With lists of `depth`, and twice as deep for the queries whose union is short: each as it would alone."""
        scan = self.scan(queries, depth, allowed)
        answer = self._answer(scan, queries, k)
        return asked_again(
            answer,
            scan.short(k),
            queries,
            allowed,
            lambda queries, allowed: self._search(queries, k, allowed, min(2 * scan.depth, k)),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """A pool of `size`: what the lists hold down to one common depth, then some of the next depth by cosine.

        Scores are an item's best cosine among the pairs that listed it.
        """
        self.check(queries, size, allowed)
        return self._first_stage(queries, size, allowed, -(-2 * size // self.scorer.num_pairs))

    def _first_stage(self, queries: QueryStates, size: int, allowed: Mask | None, depth: int) -> Pool:
        """From lists of `depth`, and four times as deep for the queries whose union is short."""
        scan = self.scan(queries, depth, allowed)
        started = time.perf_counter()
        item_indices, scores = empty_answer(len(queries), min(size, self.num_items))
        depths = np.zeros(len(queries), dtype=np.int64)
        for query in range(len(queries)):
            rows, levels, cosines = scan.levels(query)
            # Rows come by (level, -cosine, rank), so the first `size` are whole levels and the best of one more.
            depths[query] = scan.depth if len(rows) <= size else levels[size]
            rows, cosines = rows[:size], cosines[:size]
            order = np.lexsort((self.ranks[rows], -cosines))
            item_indices[query, : len(rows)], scores[query, : len(rows)] = rows[order], cosines[order]
        bounds = scan.bounds_at(depths)
        bounds[
            np.count_nonzero(item_indices >= 0, axis=1) == count_passing(allowed, len(queries), self.num_items)
        ] = -np.inf
        first = Pass("first_stage", scan.seconds + time.perf_counter() - started, self.every_item(queries))
        pool = Pool(item_indices=item_indices, scores=scores, bounds=bounds, passes=(first,))
        return asked_again(
            pool,
            scan.short(size),
            queries,
            allowed,
            lambda queries, allowed: self._first_stage(queries, size, allowed, min(4 * scan.depth, size)),
        )

    def scan(self, queries: QueryStates, depth: int, allowed: Mask | None) -> "PairScan":
        """The `depth` best of every pair of each query."""
        self.scorer.check(queries)
        return PairScan(self._components, self._gate_bounds, self.scorer, self.ranks, queries, depth, allowed)


class PairScan:
    """The best of every component pair of B queries."""

    def __init__(
        self,
        components: GroupedTopK,
        gate_bounds: GateBounds,
        scorer: MolScorer,
        ranks: Indices,
        queries: QueryStates,
        depth: int,
        allowed: Mask | None,
    ) -> None:
        started = time.perf_counter()
        self._gate_bounds, self._queries, self._ranks = gate_bounds, queries, ranks
        self._num_items = scorer.num_items
        self.depth = max(1, min(depth, scorer.num_items))
        best = components.search(queries.components, self.depth, allowed)
        lists = (len(queries), scorer.num_pairs)
        self._rows = best.rows.reshape(*lists, self.depth)
        self._scores = best.scores.reshape(*lists, self.depth)
        self._following = best.following.reshape(lists)
        # A float32 dot product of d terms, in whatever order.
        reach = rounding.cosine_magnitudes(queries, scorer.magnitudes)
        self._error = (scorer.width + 1) * rounding.FLOAT32 * reach * 1.01
        self.seconds = time.perf_counter() - started

    def pool(self, query: int, size: int) -> Indices:
        """The union of the `size` best of every pair, by row number."""
        rows = np.unique(self._rows[query, :, :size])
        return rows[rows >= 0]

    def short(self, wanted: int) -> Indices:
        """The queries whose union has fewer than `wanted` items though deeper lists would have more: (n,)."""
        if self.depth >= min(wanted, self._num_items):
            return np.empty(0, dtype=np.int64)
        some = np.flatnonzero(self.thresholds(self.depth).min(axis=1, initial=np.inf) > -np.inf)
        return some[[len(self.pool(query, self.depth)) < wanted for query in some.tolist()]]

    def thresholds(self, size: int) -> Scores:
        """t_p: the best cosine that each list leaves out beyond its `size` best, (B, P); -inf: it holds all allowed."""
        return self._thresholds(np.full(len(self._queries), size, dtype=np.int64))

    def bounds(self, size: int, kth_scores: Scores | None = None) -> Scores:
        """See `PoolScan.bounds`: never NaN."""
        return self.bounds_at(np.full(len(self._queries), size, dtype=np.int64))

    def bounds_at(self, sizes: Indices) -> Scores:
        """Bounds on what each query's union of its own number of best per pair leaves out: sizes (B,) -> (B,)."""
        started = time.perf_counter()
        bounds = self._gate_bounds.upper_bounds(self._queries, self._thresholds(sizes) + self._error)
        self.seconds += time.perf_counter() - started
        return bounds

    def levels(self, query: int) -> tuple[Indices, Indices, Scores]:
        """Listed rows by their best position in any list: rows, positions and best listed cosines (n,) each."""
        rows, cosines = self._rows[query].ravel(), self._scores[query].ravel().astype(np.float64)
        positions = np.tile(np.arange(self._rows.shape[2]), self._rows.shape[1])
        listed = rows >= 0
        rows, positions, cosines = rows[listed], positions[listed], cosines[listed]
        found, inverse = np.unique(rows, return_inverse=True)
        level = np.full(len(found), self._rows.shape[2])
        np.minimum.at(level, inverse, positions)
        best = np.full(len(found), -np.inf)
        np.maximum.at(best, inverse, cosines)
        order = np.lexsort((self._ranks[found], -best, level))
        return found[order], level[order], best[order]

    def _thresholds(self, sizes: Indices) -> Scores:
        """As `thresholds`, with each query's own size: (B,) -> (B, P)."""
        values = np.concatenate([self._scores, self._following[:, :, None]], axis=2)
        return np.take_along_axis(values, sizes[:, None, None], axis=2)[:, :, 0].astype(np.float64)
