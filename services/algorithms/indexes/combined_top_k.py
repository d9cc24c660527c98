"""CombinedTopK(N1, N2): full scores of the union of TopKPerEmbedding(N1) and TopKAvg(N2).

arXiv:2407.15462, section 3.2. TopKPerEmbedding's bound at N1 is the certificate (decision 011).

Letters: B queries, N1 per component pair, N2 by the average. Cost: both scans, then full scores.
"""

import time

import numpy as np

from services.algorithms.indexes.passes import Array, Lists, Passes, Request
from services.algorithms.indexes.pools import Depths, PooledIndex, check_pool_size
from services.algorithms.indexes.protocol import Mask, Pass, Pool, Scores, empty_answer
from services.algorithms.indexes.top_k_avg import AverageScan, TopKAvg
from services.algorithms.indexes.top_k_per_embedding import PairScan, TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates


class CombinedTopK(PooledIndex):
    """The union of the N1 best per component pair and the N2 best by the average, ordered by s.

    pair_pool_size: N1. average_pool_size: N2; a search for k > N2 items uses k.
    """

    name = "combined_top_k"

    def __init__(
        self,
        items: MolScorer | Passes,
        *,
        pair_pool_size: int,
        average_pool_size: int,
    ) -> None:
        """Prepare like `ScoredIndex`. Raises: ValueError also for sizes below 1."""
        check_pool_size("pair_pool_size", pair_pool_size)
        check_pool_size("average_pool_size", average_pool_size)
        self.average_pool_size = average_pool_size
        super().__init__(items, pool_size=pair_pool_size)

    def _prepare(self) -> None:
        self._average = TopKAvg(self.passes, pool_size=self.average_pool_size)
        self._pairs = TopKPerEmbedding(self.passes, pool_size=self.pool_size)

    @property
    def nbytes(self) -> int:
        return self._average.nbytes + self._pairs.nbytes - super().nbytes

    def depths(self, k: int) -> Depths:
        return self.pool_size, max(k, self.average_pool_size)

    def lists(self, request: Request, depths: Depths) -> tuple[Lists, ...]:
        return (*self._pairs.lists(request, depths[:1]), *self._average.lists(request, depths[1:]))

    def listed(self, lists: tuple[Lists, ...], depths: Depths) -> tuple[Array, ...]:
        return (*self._pairs.listed(lists[:1], depths[:1]), *self._average.listed(lists[1:], depths[1:]))

    def scanned(self, request: Request, lists: tuple[Lists, ...], depths: Depths) -> "CombinedScan":
        pairs = self._pairs.scanned(request, lists[:1], depths[:1])
        average = self._average.scanned(request, lists[1:], depths[1:])
        return CombinedScan(pairs, average)

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """A pool of `size` items: half from the pairs' lists, the rest by average score. All scores are averages."""
        self.check(queries, size, allowed)
        pairs = self._pairs.first_stage(queries, -(-size // 2), allowed)

        def cut(request: Request, lists: tuple[Lists, ...]) -> Pool:
            scan = self._average.scanned(request, lists, (size,))
            started = time.perf_counter()
            item_indices, scores = empty_answer(len(queries), min(size, self.num_items))
            bounds = pairs.bounds.copy()
            for query in range(len(queries)):
                listed = pairs.item_indices[query]
                listed = listed[listed >= 0]
                averaged = scan.pool(query)
                rows = np.concatenate([listed, averaged[~np.isin(averaged, listed)]])[:size]
                found = scan.average_scores(query, rows)
                order = np.lexsort((rows, -found))
                item_indices[query, : len(rows)], scores[query, : len(rows)] = rows[order], found[order]
                if len(rows) < size:
                    # the average's list is shorter than `size`: it has all allowed items
                    bounds[query] = -np.inf
            seconds = pairs.passes[0].seconds + scan.seconds + time.perf_counter() - started
            first = Pass("first_stage", seconds, self.every_item(queries))
            return Pool(item_indices=item_indices, scores=scores, bounds=bounds, passes=(first,))

        key = (self, "first stage", size)
        return self.passes.run(queries, allowed, key, lambda request: self._average.lists(request, (size,)), cut)


class CombinedScan:
    """Both scans of B queries."""

    def __init__(self, pairs: PairScan, average: AverageScan) -> None:
        self._pairs, self._average = pairs, average

    @property
    def seconds(self) -> float:
        return self._pairs.seconds + self._average.seconds

    def bounds(self, kth_scores: Scores | None = None) -> Scores:
        """The pairs' bounds; -inf if the average's list has all allowed items."""
        return np.where(self._average.is_complete(), -np.inf, self._pairs.bounds(kth_scores))
