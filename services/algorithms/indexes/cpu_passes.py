"""The passes over item states on the CPU, by compiled kernels (`passes.py`).

Letters: B queries, X items, P component pairs, d component width, b queries of a group, n items of a pass.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.passes import Answer, Found, Lists
from services.algorithms.indexes.protocol import (
    Indices,
    Mask,
    Pass,
    Pool,
    Scores,
    empty_answer,
    take_queries,
)
from services.algorithms.indexes.rescoring import Rescored, finish, rescore
from services.algorithms.ops.grouped_top_k import GroupedTopK, Storage, from_bfloat16, to_bfloat16
from services.algorithms.ops.mol_scores import MolScorer, rounding
from services.algorithms.ops.top_rows import top_rows
from services.algorithms.scoring.states import FloatArray, QueryStates

_SCORE_BYTES = 64 << 20  # limit of scores (b, X) in memory, unless one query needs more
# Gathered rows need separate tiles per query and cost 1.15 to 1.3 times as much per item (8x8x32, B 32 and 1).
_GATHERED_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class CpuRequest:
    """B queries; the allowed items (X,) or (B, X)."""

    queries: QueryStates
    allowed: Mask | None


@dataclass(frozen=True, slots=True)
class _Part:
    """Scores (b, n) of some queries. rows (n,): the scored items. allowed: (n,) or (b, n). None: all items."""

    queries: slice
    scores: FloatArray
    rows: Indices | None
    allowed: Mask | None


class CpuPasses:
    """X items in memory. See `Passes`."""

    def __init__(self, scorer: MolScorer) -> None:
        """Prepare X items. Raises: ValueError for no items."""
        if not scorer.num_items:
            raise ValueError("the index is empty: num_items=0 allowed: at least 1")
        self.scorer = scorer
        self._components = GroupedTopK(scorer.components)

    @property
    def num_items(self) -> int:
        return self.scorer.num_items

    @property
    def nbytes(self) -> int:
        return self.scorer.nbytes + self._components.nbytes

    def run(
        self,
        queries: QueryStates,
        allowed: Mask | None,
        key: Hashable,
        steps: Callable[[CpuRequest], Found],
        then: Callable[[CpuRequest, Found], Answer],
    ) -> Answer:
        request = CpuRequest(queries, allowed)
        return then(request, steps(request))

    def pairs(self, request: CpuRequest, size: int) -> Lists:
        return _lists(self._components, request, request.queries.components, size)

    def cosine_errors(self, request: CpuRequest) -> Scores:
        return rounding.cosine_errors(request.queries, self.scorer.magnitudes)

    def round_means(self, means: npt.NDArray[np.float64]) -> FloatArray:
        rounded = means.astype(np.float32)
        return from_bfloat16(to_bfloat16(rounded)) if self._storage == "bfloat16" else rounded

    def means(self, vectors: FloatArray) -> "_CpuMeans":
        return _CpuMeans(GroupedTopK(vectors, storage=self._storage))

    def pool(self, request: CpuRequest, rows: Sequence[Indices]) -> list[Indices]:
        if len(rows) == 1 and rows[0].shape[1] == 1:
            return [listed[listed >= 0] for listed in rows[0][:, 0]]
        unions = [np.unique(np.concatenate([lists[query].ravel() for lists in rows])) for query in range(len(rows[0]))]
        return [union[union >= 0] for union in unions]

    def top_k(self, request: CpuRequest, pool: list[Indices] | None, k: int) -> Rescored:
        if pool is None:
            return self._top_k_of_all(request.queries, k, request.allowed)
        return rescore(self.scorer, request.queries, pool, k)

    def best_of_all(self, queries: QueryStates, size: int, allowed: Mask | None) -> Pool:
        """Return float32 scores. The best omitted score plus its error bounds all omitted scores."""
        started = time.perf_counter()
        error = self.scorer.error_bounds(queries)
        item_indices, out = empty_answer(len(queries), min(size, self.num_items))
        bounds = np.full(len(queries), -np.inf)
        touched = np.empty(len(queries), dtype=np.int64)
        for part in self._parts(queries, allowed):
            touched[part.queries] = part.scores.shape[1]
            # BLAS sums a dot product (P = 1) in an order that depends on the batch, so the kernel scores possible
            # results again.
            dots = self.scorer.num_pairs == 1
            found = top_rows(part.scores, size + 1, (4 if dots else 0) * error[part.queries], part.allowed)
            near = found if part.rows is None else [part.rows[rows] for rows in found]
            if dots:
                scored = self.scorer.scores_at(queries.take(part.queries), near)
            else:
                scored = [scores[rows] for scores, rows in zip(part.scores, found, strict=True)]
            for query, (rows, scores) in enumerate(zip(near, scored, strict=True), part.queries.start):
                order = np.argsort(-scores, kind="stable")  # rows ascend
                if len(rows) > size:
                    bounds[query] = float(scores[order[size]]) + error[query]
                order = order[:size]
                item_indices[query, : len(order)], out[query, : len(order)] = rows[order], scores[order]
        full = Pass("full", time.perf_counter() - started, touched)
        return Pool(item_indices=item_indices, scores=out, bounds=bounds, passes=(full,))

    def rescored(self, request: CpuRequest, found: Rescored) -> Rescored:
        return found

    def fetch(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return array

    @property
    def _storage(self) -> Storage:
        return "bfloat16" if self.scorer.num_item_components > 1 else "float32"

    def _top_k_of_all(self, queries: QueryStates, k: int, allowed: Mask | None) -> Rescored:
        started = time.perf_counter()
        error = self.scorer.error_bounds(queries)
        reach = 2 * (1 + rounding.FLOAT64_PER_FLOAT32) * error
        pools: list[Indices] = []
        scores: list[FloatArray] = []
        touched = np.empty(len(queries), dtype=np.int64)
        for part in self._parts(queries, allowed):
            # The K-th exact score is at least kth - error, so results have float32 scores of at least kth - 2 error.
            found = top_rows(part.scores, k, reach[part.queries], part.allowed)
            pools += [rows if part.rows is None else part.rows[rows] for rows in found]
            scores += [row[rows] for row, rows in zip(part.scores, found, strict=True)]
            touched[part.queries] = part.scores.shape[1]
        full = Pass("full", time.perf_counter() - started, touched)
        answer = finish(self.scorer, queries, pools, scores, k, error=error)
        return replace(answer, passes=(full, *answer.passes))

    def _parts(self, queries: QueryStates, allowed: Mask | None) -> Iterator[_Part]:
        """Yield float32 scores, a bounded group of queries at a time.

        With a selective filter, only allowed items are gathered and scored, except for dot products (P = 1), where this
        is never faster.
        """
        if allowed is not None and self.scorer.num_pairs > 1:
            passing = np.atleast_2d(allowed).sum(axis=1)
            if passing.max(initial=0) <= _GATHERED_SHARE * self.num_items:
                yield from self._gathered_parts(queries, allowed)
                return
        for group in _groups(len(queries), 4 * self.num_items):
            scores = self.scorer.scores(take_queries(queries, group.start, group.stop))
            mask = allowed if allowed is None or allowed.ndim == 1 else allowed[group]
            yield _Part(group, scores, None, mask)

    def _gathered_parts(self, queries: QueryStates, allowed: Mask) -> Iterator[_Part]:
        shared = np.flatnonzero(allowed) if allowed.ndim == 1 else None
        if shared is None:
            groups: Iterator[slice] = (slice(query, query + 1) for query in range(len(queries)))
        else:
            groups = _groups(len(queries), 12 * len(shared))
        for group in groups:
            rows = np.flatnonzero(allowed[group.start]) if shared is None else shared
            chosen = take_queries(queries, group.start, group.stop)
            yield _Part(group, np.stack(self.scorer.scores_at(chosen, [rows] * len(chosen))), rows, None)


class _CpuMeans:
    unit = rounding.FLOAT32

    def __init__(self, items: GroupedTopK) -> None:
        self._items = items

    @property
    def nbytes(self) -> int:
        return self._items.nbytes

    def best(self, request: CpuRequest, size: int) -> Lists:
        # An item's last coordinate is its radius, which has weight 0 in the average.
        extended = np.zeros((len(request.queries), 1, self._items.width), dtype=np.float32)
        extended[:, 0, :-1] = self.average(request)
        return _lists(self._items, request, extended, size)

    def average(self, request: CpuRequest) -> Scores:
        components = request.queries.components.astype(np.float64)
        return np.asarray(components.mean(axis=1).astype(np.float32).astype(np.float64))

    def at(self, rows: Indices) -> tuple[FloatArray, FloatArray]:
        vectors = self._items.vectors_of(rows)[..., 0, :]
        return vectors[..., :-1], vectors[..., -1]

    def largest(self, vectors: FloatArray, allowed: Mask) -> Scores:
        best = self._items.search(vectors, 1, allowed)
        return np.asarray(best.scores[:, :, 0, 0].max(axis=1, initial=-np.inf), dtype=np.float64)


def _lists(items: GroupedTopK, request: CpuRequest, vectors: FloatArray, size: int) -> Lists:
    """The best items by vectors (B, Q, d), one list per vector and item component: lists (B, L)."""
    started = time.perf_counter()
    best = items.search(vectors, size, request.allowed)
    lists = (len(vectors), vectors.shape[1] * items.num_groups)
    return Lists(
        rows=best.rows.reshape(*lists, best.rows.shape[-1]),
        scores=best.scores.reshape(*lists, best.rows.shape[-1]),
        following=best.following.reshape(lists),
        seconds=time.perf_counter() - started,
    )


def _groups(num_queries: int, bytes_per_query: int) -> Iterator[slice]:
    step = max(1, _SCORE_BYTES // max(1, bytes_per_query))
    for start in range(0, num_queries, step):
        yield slice(start, min(start + step, num_queries))
