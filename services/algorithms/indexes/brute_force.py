"""Exact top-K by scoring every item: the algorithm that the others are measured against.

Exact in the design's sense: the top K of s in float64 over the stored states. A float32 pass over everything finds the
K-th score; whatever lies within the float32 error bound of it is re-evaluated in float64, and what float64 itself
cannot tell apart is ordered by item id.

Letters: B queries, X items, K results, b queries of a group, n items of a pass. Cost: one pass of `mol_scores` over
the allowed items, then float64 on K and a few more.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import (
    EXACT,
    Indices,
    Mask,
    Pass,
    Pool,
    TopK,
    empty_answer,
    take_queries,
)
from services.algorithms.indexes.rescoring import finish
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.ops.mol_scores.rounding import FLOAT64_PER_FLOAT32
from services.algorithms.ops.top_rows import top_rows
from services.algorithms.states import QueryStates

# Queries are taken in groups whose (b, X) scores stay below this, so a large catalogue doesn't cost B times its scores
# (one query's scores where those alone are more). Nothing else here grows with X.
_SCORE_BYTES = 64 << 20


# Scoring gathered rows costs each query its own tiles: 1.15 to 1.3 times as much per item (8x8x32, B 32 and 1).
_GATHERED_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class _Part:
    """Scores (b, n) of some queries for the items `rows` (n,), or for all; `allowed` (n,) or (b, n) if not all may."""

    queries: slice
    scores: npt.NDArray[np.float32]
    rows: Indices | None
    allowed: Mask | None


class BruteForce(ScoredIndex):
    """Scores every allowed item. Certificate: always exact."""

    name = "brute_force"

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """The exact top `k` among the allowed items. See `Index.search`."""
        self.check(queries, k, allowed)
        started = time.perf_counter()
        error = self.scorer.error_bounds(queries)
        reach = 2 * (1 + FLOAT64_PER_FLOAT32) * error
        pools: list[Indices] = []
        scores: list[npt.NDArray[np.float32]] = []
        touched = np.empty(len(queries), dtype=np.int64)
        for part in self._parts(queries, allowed):
            # The K-th exact score is at least kth - error, so what reaches it scores at least kth - 2 error here.
            found = top_rows(part.scores, k, reach[part.queries], part.allowed)
            pools += [rows if part.rows is None else part.rows[rows] for rows in found]
            scores += [row[rows] for row, rows in zip(part.scores, found, strict=True)]
            touched[part.queries] = part.scores.shape[1]
        full = Pass("full", time.perf_counter() - started, touched)
        answer = finish(self.scorer, queries, pools, scores, k, self.ranks, error=error)
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=(EXACT,) * len(queries),
            passes=(full, *answer.passes),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best by the float32 pass, and the best score left out plus its error bound."""
        self.check(queries, size, allowed)
        started = time.perf_counter()
        error = self.scorer.error_bounds(queries)
        item_indices, out = empty_answer(len(queries), min(size, self.num_items))
        bounds = np.full(len(queries), -np.inf)
        touched = np.empty(len(queries), dtype=np.int64)
        for part in self._parts(queries, allowed):
            touched[part.queries] = part.scores.shape[1]
            # BLAS adds up a dot product (P = 1) in an order that depends on the batch: whoever may be among the best is
            # scored again by the kernel, item by item. Both are within `error` of the exact score.
            dots = self.scorer.num_pairs == 1
            found = top_rows(part.scores, size + 1, (4 if dots else 0) * error[part.queries], part.allowed)
            near = found if part.rows is None else [part.rows[rows] for rows in found]
            if dots:
                scored = self.scorer.scores_at(queries.take(part.queries), near)
            else:
                scored = [scores[rows] for scores, rows in zip(part.scores, found, strict=True)]
            for query, (rows, scores) in enumerate(zip(near, scored, strict=True), part.queries.start):
                order = np.lexsort((self.ranks[rows], -scores))
                if len(rows) > size:
                    bounds[query] = float(scores[order[size]]) + error[query]
                order = order[:size]
                item_indices[query, : len(order)], out[query, : len(order)] = rows[order], scores[order]
        full = Pass("full", time.perf_counter() - started, touched)
        return Pool(item_indices=item_indices, scores=out, bounds=bounds, passes=(full,))

    def _parts(self, queries: QueryStates, allowed: Mask | None) -> Iterator[_Part]:
        """Float32 scores, a bounded group of queries at a time.

        A filter that few items pass has those gathered and scored; one that most pass is laid over all scores. A plain
        dot product (P = 1) is so little work that gathering never pays.
        """
        if allowed is not None and self.scorer.num_pairs > 1:
            passing = np.atleast_2d(allowed).sum(axis=1)
            if passing.max(initial=0) <= _GATHERED_SHARE * self.num_items:
                yield from self._gathered_parts(queries, allowed)
                return
        for group in self._groups(len(queries), 4 * self.num_items):
            scores = self.scorer.scores(take_queries(queries, group.start, group.stop))
            mask = allowed if allowed is None or allowed.ndim == 1 else allowed[group]
            yield _Part(group, scores, None, mask)

    def _gathered_parts(self, queries: QueryStates, allowed: Mask) -> Iterator[_Part]:
        shared = np.flatnonzero(allowed) if allowed.ndim == 1 else None
        if shared is None:
            groups: Iterator[slice] = (slice(query, query + 1) for query in range(len(queries)))
        else:
            groups = self._groups(len(queries), 12 * len(shared))
        for group in groups:
            rows = np.flatnonzero(allowed[group.start]) if shared is None else shared
            chosen = take_queries(queries, group.start, group.stop)
            yield _Part(group, np.stack(self.scorer.scores_at(chosen, [rows] * len(chosen))), rows, None)

    def _groups(self, num_queries: int, bytes_per_query: int) -> Iterator[slice]:
        step = max(1, _SCORE_BYTES // max(1, bytes_per_query))
        for start in range(0, num_queries, step):
            yield slice(start, min(start + step, num_queries))
