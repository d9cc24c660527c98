"""Exact top-K by scoring every item: the reference for the other algorithms.

A fast pass scores all items; `rescoring.py` finds the top K of s in float64. On a card this is also algorithm "exact",
because there bounds would cost as much as the scores (decision 010).

Letters: K results. Cost: one pass over the allowed items, then float64 scores of K and a few more items.
"""

from collections.abc import Callable, Hashable
from typing import Any

from services.algorithms.indexes.passes import Request
from services.algorithms.indexes.protocol import EXACT, Mask, Pool, TopK
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.scoring.states import QueryStates


class BruteForce(ScoredIndex):
    """Scores every allowed item. Certificate: always exact."""

    name = "brute_force"

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None, max_gap: float = 0.0) -> TopK:
        self.check(queries, k, allowed)
        return self.passes.run(queries, allowed, *self.steps(k), self._answer)

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best items of the fast pass, and a bound on the rest."""
        self.check(queries, size, allowed)
        return self.passes.best_of_all(queries, size, allowed)

    def steps(self, k: int) -> tuple[Hashable, Callable[[Request], Any]]:
        """Key and steps of a search for `k`, see `Passes.run`."""
        return (self, k), lambda request: self.passes.top_k(request, None, k)

    def _answer(self, request: Request, found: Any) -> TopK:
        answer = self.passes.rescored(request, found)
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=(EXACT,) * len(request.queries),
            passes=answer.passes,
        )
