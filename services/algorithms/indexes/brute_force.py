"""Exact top-K by scoring every item: the algorithm that the others are measured against.

Exact in the design's sense: the top K of s in float64 over the stored states. A float32 pass over everything finds the
K-th score; whatever lies within the float32 error bound of it is re-evaluated in float64, and what float64 itself
cannot tell apart is ordered by item id.

Letters: B queries, X items, K results. Cost: one pass of `mol_scores` over X, then float64 on K and a few more.
"""

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import (
    EXACT,
    Indices,
    Mask,
    Pass,
    Pool,
    TopK,
    check_request,
    check_tie_ranks,
    empty_answer,
    take_queries,
)
from services.algorithms.indexes.ranking import best_rows
from services.algorithms.indexes.rescoring import finish, within_reach
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import ItemStates, PairGate, QueryStates

# Queries are taken in groups whose (b, X) scores stay below this, so a large catalogue doesn't cost B times its scores.
_SCORE_BYTES = 64 << 20


class BruteForce:
    """Scores every allowed item. Certificate: always exact."""

    name = "brute_force"

    def __init__(
        self,
        items: ItemStates | MolScorer,
        pair_gate: PairGate | None = None,
        *,
        tie_ranks: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Prepare X items; `tie_ranks` (X,) is each item's place in id order (the row number when not given).

        A MolScorer is shared, not copied. Raises: ValueError for an empty index or shapes that disagree.
        """
        self.scorer = items if isinstance(items, MolScorer) else MolScorer(items, pair_gate)
        self._ranks = check_tie_ranks(tie_ranks, self.scorer.num_items)

    @property
    def num_items(self) -> int:
        return self.scorer.num_items

    @property
    def nbytes(self) -> int:
        return self.scorer.nbytes + int(self._ranks.nbytes)

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """The exact top `k` among the allowed items. See `Index.search`."""
        check_request(k=k, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        self.scorer.check(queries)
        started = time.perf_counter()
        error = self.scorer.error_bounds(queries) + self.scorer.error_bounds_float64(queries)
        pools, scores = [], []
        for query, row_scores in self._passes(queries, allowed):
            rows = within_reach(row_scores, k, float(error[query]))
            pools.append(rows)
            scores.append(row_scores[rows])
        full = Pass("full", time.perf_counter() - started, self._touched(queries))
        answer = finish(self.scorer, queries, pools, scores, k, self._ranks)
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=(EXACT,) * len(queries),
            passes=(full, *answer.passes),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best by the float32 pass, and the best score left out plus its error bound."""
        check_request(k=size, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        self.scorer.check(queries)
        started = time.perf_counter()
        error = self.scorer.error_bounds(queries)
        item_indices, out = empty_answer(len(queries), min(size, self.num_items))
        bounds = np.full(len(queries), -np.inf)
        for query, scores in self._passes(queries, allowed):
            rows = best_rows(scores, size + 1, self._ranks)
            if len(rows) > size:
                bounds[query] = float(scores[rows[size]]) + error[query]
                rows = rows[:size]
            item_indices[query, : len(rows)] = rows
            out[query, : len(rows)] = scores[rows]
        full = Pass("full", time.perf_counter() - started, self._touched(queries))
        return Pool(item_indices=item_indices, scores=out, bounds=bounds, passes=(full,))

    def _touched(self, queries: QueryStates) -> Indices:
        """Items scored per query (B,): all of them, as a mask is laid over the scores."""
        return np.full(len(queries), self.num_items, dtype=np.int64)

    def _passes(self, queries: QueryStates, allowed: Mask | None) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Each query's number and float32 scores (X,), -inf where not allowed, a bounded group at a time."""
        step = max(1, _SCORE_BYTES // (4 * self.num_items))
        for start in range(0, len(queries), step):
            group = queries if len(queries) <= step else take_queries(queries, start, start + step)
            scores = self.scorer.scores(group)
            if allowed is not None:
                mask = allowed if allowed.ndim == 1 else allowed[start : start + step]
                scores[~np.broadcast_to(mask, scores.shape)] = -np.inf
            yield from enumerate(scores, start)
