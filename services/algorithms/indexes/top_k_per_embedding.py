"""TopKPerEmbedding(N): full scores of the union of the N best items of every component pair.

From arXiv:2407.15462, section 3.2. An omitted item is in no list, so its cosine of pair p is at most t_p, the (N +
1)-th best. So s <= max_p t_p, which gate_bounds.py lowers by bounding gate weights. The paper's Theorem 2 takes phi of
the (N + 1)-th items, which is not a bound; the tests have a counterexample.

Letters: B queries, X items, P component pairs, d width, N per pair. Cost: X P d multiply-adds per query, then full
scores on N to N P items. Memory: only the scorer's.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.gate_bounds import GateBounds
from services.algorithms.indexes.passes import Array, Lists, Request
from services.algorithms.indexes.pools import Depths, PooledIndex
from services.algorithms.indexes.protocol import Indices, Mask, Pass, Pool, Scores, asked_again, empty_answer
from services.algorithms.lazy import lazy_property
from services.algorithms.ops.top_rows import count_passing
from services.algorithms.scoring.states import QueryStates


class TopKPerEmbedding(PooledIndex):
    """The union of the N best items per component pair, reordered by s. Certificate: a bound on items outside the
    lists.

    N is doubled while the union has fewer than k items.
    """

    name = "top_k_per_embedding"

    def _prepare(self) -> None:
        self._gate_bounds = GateBounds(self.scorer)

    def depths(self, k: int) -> Depths:
        return (self.pool_size,)

    def deeper(self, depths: Depths, k: int) -> Depths | None:
        return (min(2 * depths[0], k),) if depths[0] < min(k, self.num_items) else None

    def lists(self, request: Request, depths: Depths) -> tuple[Lists, ...]:
        return (self.passes.pairs(request, depths[0]),)

    def listed(self, lists: tuple[Lists, ...], depths: Depths) -> tuple[Array, ...]:
        return (lists[0].rows,)

    def scanned(self, request: Request, lists: tuple[Lists, ...], depths: Depths) -> "PairScan":
        return PairScan(self, request, lists[0])

    def upper_bounds(self, request: Request, thresholds: Scores) -> Scores:
        """Bounds (B,) on s of items whose computed cosines are at most `thresholds` (B, P)."""
        return self._gate_bounds.upper_bounds(request.queries, thresholds + self.passes.cosine_errors(request))

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """A pool of `size` items: all lists to the same depth, then items of the next depth with the best cosines.

        A score is the item's best listed cosine.
        """
        self.check(queries, size, allowed)
        return self._first_stage(queries, size, allowed, -(-2 * size // self.scorer.num_pairs))

    def _first_stage(self, queries: QueryStates, size: int, allowed: Mask | None, depth: int) -> Pool:
        def cut(request: Request, lists: tuple[Lists, ...]) -> tuple[Pool, Indices]:
            scan = PairScan(self, request, lists[0])
            started = time.perf_counter()
            item_indices, scores = empty_answer(len(queries), min(size, self.num_items))
            depths = np.zeros(len(queries), dtype=np.int64)
            for query in range(len(queries)):
                rows, levels, cosines = scan.levels(query)
                # Rows are ordered by (level, -cosine, row), so the first `size` are whole levels and the best of the
                # next.
                depths[query] = scan.depth if len(rows) <= size else levels[size]
                rows, cosines = rows[:size], cosines[:size]
                order = np.lexsort((rows, -cosines))
                item_indices[query, : len(rows)], scores[query, : len(rows)] = rows[order], cosines[order]
            bounds = scan.bounds_at(depths)
            found = np.count_nonzero(item_indices >= 0, axis=1)
            bounds[found == count_passing(allowed, len(queries), self.num_items)] = -np.inf
            first = Pass("first_stage", scan.seconds + time.perf_counter() - started, self.every_item(queries))
            pool = Pool(item_indices=item_indices, scores=scores, bounds=bounds, passes=(first,))
            deeper = self.passes.fetch(lists[0].following).min(axis=1, initial=np.inf) > -np.inf
            return pool, np.flatnonzero((found < size) & deeper)

        pool, short = self.passes.run(
            queries, allowed, (self, "first stage", depth), lambda request: self.lists(request, (depth,)), cut
        )
        if depth >= min(size, self.num_items):
            return pool
        return asked_again(
            pool,
            short,
            queries,
            allowed,
            lambda queries, allowed: self._first_stage(queries, size, allowed, min(4 * depth, size)),
        )


class PairScan:
    """Every component pair's best items, for B queries."""

    def __init__(self, index: TopKPerEmbedding, request: Request, lists: Lists) -> None:
        self._index, self._request, self._lists = index, request, lists
        self.depth, self.seconds = int(lists.rows.shape[2]), lists.seconds

    @lazy_property
    def _rows(self) -> npt.NDArray[Any]:
        return self._index.passes.fetch(self._lists.rows)

    @lazy_property
    def _scores(self) -> npt.NDArray[Any]:
        return self._index.passes.fetch(self._lists.scores)

    def bounds(self, kth_scores: Scores | None = None) -> Scores:
        """See `PoolScan.bounds`; these bounds are never NaN."""
        return self.bounds_at(np.full(len(self._request.queries), self.depth, dtype=np.int64))

    def bounds_at(self, sizes: Indices) -> Scores:
        """Bounds (B,) on items outside the union of each query's `sizes` (B,) best items per pair."""
        started = time.perf_counter()
        bounds = self._index.upper_bounds(self._request, self._thresholds(sizes))
        self.seconds += time.perf_counter() - started
        return bounds

    def levels(self, query: int) -> tuple[Indices, Indices, Scores]:
        """Return rows (n,), their best positions in any list (n,) and best listed cosines (n,), ordered by position."""
        rows, cosines = self._rows[query].ravel(), self._scores[query].ravel().astype(np.float64)
        positions = np.tile(np.arange(self._rows.shape[2]), self._rows.shape[1])
        listed = rows >= 0
        rows, positions, cosines = rows[listed], positions[listed], cosines[listed]
        found, inverse = np.unique(rows, return_inverse=True)
        level = np.full(len(found), self._rows.shape[2])
        np.minimum.at(level, inverse, positions)
        best = np.full(len(found), -np.inf)
        np.maximum.at(best, inverse, cosines)
        order = np.lexsort((-best, level))
        return found[order], level[order], best[order]

    def _thresholds(self, sizes: Indices) -> Scores:
        """t_p (B, P): the best cosine outside each pair's `sizes` (B,) best; -inf if none is outside."""
        following = self._index.passes.fetch(self._lists.following)
        if (sizes == self.depth).all():
            return following.astype(np.float64)
        values = np.concatenate([self._scores, following[:, :, None]], axis=2)
        return np.take_along_axis(values, sizes[:, None, None], axis=2)[:, :, 0].astype(np.float64)
