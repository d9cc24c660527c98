"""One immutable version of a mutable index, and searches of it.

The main segment and coded delta blocks are searched by their algorithms, with removed rows masked out. The other blocks
are scored row by row; their threshold is the highest K-th score so far. The answer is the top K of the union, with one
certificate per query. Only a segment with an algorithm can have a gap: its omitted items score at most its K-th score
plus the gap.

Letters: B queries, K results, n rows or candidates of a segment.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.indexes.mutable.segment import Segment, SegmentItems
from services.algorithms.indexes.mutable.segment_merge import Order, Source, order_by_id
from services.algorithms.indexes.mutable.tail import TailView
from services.algorithms.indexes.protocol import (
    ESTIMATE,
    EXACT,
    Certificate,
    Index,
    Indices,
    Mask,
    Pass,
    Scores,
    TopK,
    certificate,
    check_request,
    empty_answer,
)
from services.algorithms.indexes.rescoring import order_by_score_then_id, within_reach
from services.algorithms.rules.attributes import Codes, Kinds
from services.algorithms.rules.filters import ItemFilter, passing
from services.algorithms.scoring.states import ItemShape, QueryStates

Wanted = tuple[ItemFilter | None, ...]  # one filter for all queries, or one per query; None passes all items


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answers to B queries in item ids, best first, ties by id, from one index version.

    item_ids[b]: up to K ids. scores (B, K') with K' = min(K, items of the version), -inf beyond a shorter answer.
    """

    item_ids: tuple[tuple[str, ...], ...]
    scores: Scores
    certificates: tuple[Certificate, ...]
    version: str
    passes: tuple[Pass, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolAnswer:
    """First-stage pools of B queries in item ids, best first.

    item_ids[b]: up to N ids. scores (B, N') with N' = min(N, items of the version), -inf beyond a smaller pool. bounds
    (B,) as in Pool.
    """

    item_ids: tuple[tuple[str, ...], ...]
    scores: Scores
    bounds: Scores
    version: str
    passes: tuple[Pass, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialAnswer:
    """A segment's candidates per query: rows (n,) and float64 scores (n,), with their error (B,)."""

    segment: Segment
    found: Sequence[tuple[Indices, Scores]]
    error: Scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """An immutable version. name: the index version in answers, made of model version, number, and digest of all
    changes.

    codes, tags: the codes of categories and of each attribute's tags; the index owns both and only adds entries.
    """

    shape: ItemShape
    codes: Mapping[str, int]
    tags: Codes
    kinds: Kinds
    name: str
    number: int
    digest: str
    main: Source | None
    blocks: tuple[Source, ...]
    tail: TailView

    @property
    def num_items(self) -> int:
        main = 0 if self.main is None else self.main.num_living
        return main + sum(block.num_living for block in self.blocks) + self.tail.num_living

    def delta(self) -> list[Source]:
        """The changes since the main segment was built."""
        parts = (*self.blocks, self.tail.source)
        return [part for part in parts if part is not None and part.num_living]

    def sources(self) -> list[Source]:
        """All segments with a living row, the main segment first."""
        return [*([self.main] if self.main is not None and self.main.num_living else []), *self.delta()]

    def main_first(self) -> Order:
        """The main segment's living items by id, then the delta's by id."""
        delta = self.delta()
        rest = order_by_id(delta)
        if self.main is None:
            return rest
        alive = self.main.segment.alive(self.main.num_dead)
        row = np.arange(len(self.main.segment)) if alive is None else np.flatnonzero(alive)
        source = np.concatenate([np.zeros(len(row), dtype=np.int16), rest.source + np.int16(1)])
        return Order([self.main, *delta], source, np.concatenate([row, rest.row]))

    def in_order(self) -> Order:
        return order_by_id(self.sources())

    def search(
        self,
        queries: QueryStates,
        k: int,
        filters: ItemFilter | Sequence[ItemFilter] | None = None,
        algorithm: str | None = None,
        max_gap: float = 0.0,
    ) -> Answer:
        """The top `k` of s among the items that pass. filters: one for all queries, one per query, or None.

        algorithm: one of the build's algorithms; None means the first. max_gap: see `Index.search`. If the version has
        no items, answers are empty and exact. Raises: ValueError with the reason for invalid arguments.
        """
        wanted = self._checked(queries, k, filters)
        thresholds = np.full(len(queries), -np.inf)
        parts: list[PartialAnswer] = []
        passes: tuple[Pass, ...] = ()
        tops: list[TopK] = []
        started, touched = time.perf_counter(), 0
        for source in self.sources() if len(queries) else ():
            segment = source.segment
            if not segment.indexes:
                parts.append(_candidates(source, queries, k, thresholds, self.allowed(source, wanted)))
                touched += len(segment)
                continue
            tops.append(_named(segment, algorithm).search(queries, k, self.allowed(source, wanted), max_gap))
            error = segment.scorer.error_bounds_float64(queries)
            parts.append(_as_partial(segment, tops[-1], error))
            if tops[-1].scores.shape[1] == k:
                thresholds = np.maximum(thresholds, tops[-1].scores[:, k - 1] - 2 * error)
            if source is self.main:
                passes, started = tops[-1].passes, time.perf_counter()
        item_ids, certificates = [], []
        _, scores = empty_answer(len(queries), min(k, self.num_items))
        for query in range(len(queries)):
            tolerance = _tie_tolerance(parts, query)
            ids, best = _merge_query(parts, query, k, tolerance)
            item_ids.append(ids)
            scores[query, : len(best)] = best
            answers = [(top.certificates[query], top.scores[query]) for top in tops]
            certificates.append(_merged_certificate(answers, best, k, tolerance))
        delta = Pass("delta", time.perf_counter() - started, np.full(len(queries), touched, dtype=np.int64))
        return Answer(
            item_ids=tuple(item_ids),
            scores=scores,
            certificates=tuple(certificates),
            version=self.name,
            passes=(*passes, delta),
        )

    def first_stage(
        self,
        queries: QueryStates,
        size: int,
        filters: ItemFilter | Sequence[ItemFilter] | None = None,
        algorithm: str | None = None,
    ) -> PoolAnswer:
        """A pool of `size` items by the algorithm's first stage, and a bound on all other items.

        With a delta, pool and delta are scored in full, and the `size` best by s are returned. Raises as `search`.
        """
        wanted = self._checked(queries, size, filters)
        bounds = np.full(len(queries), -np.inf)
        parts: list[PartialAnswer] = []
        passes: tuple[Pass, ...] = ()
        sources, touched = self.sources() if len(queries) else [], 0
        started = time.perf_counter()
        for source in sources:
            segment = source.segment
            if not segment.indexes:
                parts.append(_all_scores(source, queries, self.allowed(source, wanted)))
                touched += len(segment)
                continue
            pool = _named(segment, algorithm).first_stage(queries, size, self.allowed(source, wanted))
            bounds = np.maximum(bounds, pool.bounds)  # NaN stays NaN
            rows = [row[row >= 0] for row in pool.item_indices]
            scores = [row[: len(kept)] for row, kept in zip(pool.scores, rows, strict=True)]
            in_full: tuple[Pass, ...] = ()
            if len(sources) > 1:
                began = time.perf_counter()
                scores = [found.astype(np.float64) for found in segment.scorer.scores_at(queries, rows)]
                sizes = np.array([len(row) for row in rows], dtype=np.int64)
                in_full = (Pass("full", time.perf_counter() - began, sizes),)
            error = segment.scorer.error_bounds(queries)
            parts.append(PartialAnswer(segment=segment, found=list(zip(rows, scores, strict=True)), error=error))
            if source is self.main:
                passes, started = (*pool.passes, *in_full), time.perf_counter()
        item_ids = []
        _, out = empty_answer(len(queries), min(size, self.num_items))
        for query in range(len(queries)):
            ids, best = _merge_query(parts, query, size + 1, 0.0)
            if len(ids) > size:  # the best omitted item bounds the others
                bounds[query] = max(bounds[query], best[size] + _tie_tolerance(parts, query) / 2)  # NaN stays NaN
            item_ids.append(ids[:size])
            out[query, : len(best[:size])] = best[:size]
        return PoolAnswer(
            item_ids=tuple(item_ids),
            scores=out,
            bounds=bounds,
            version=self.name,
            passes=(*passes, Pass("delta", time.perf_counter() - started, np.full(len(queries), touched))),
        )

    def _checked(self, queries: QueryStates, k: int, filters: ItemFilter | Sequence[ItemFilter] | None) -> Wanted:
        check_request(k=k, allowed=None, num_queries=len(queries), num_items=self.num_items)
        self.shape.check_queries(queries)
        if filters is None or isinstance(filters, ItemFilter):
            return self.checked(filters)
        if len(filters) != len(queries):
            allowed = f"one for all queries or one for each of {len(queries)}"
            raise ValueError(f"len(filters)={len(filters)} allowed: {allowed}")
        wanted = self.checked(*filters)
        return wanted if any(wanted) else (None,)

    def checked(self, *filters: ItemFilter | None) -> Wanted:
        """The filters; one that passes all items becomes None. Raises: ValueError as `ItemFilter.check`."""
        wanted = tuple(None if one is None or one.is_open else one for one in filters)
        for one in wanted:
            if one is not None:
                one.check(self.kinds)
        return wanted

    def allowed(self, source: Source, wanted: Wanted) -> Mask | None:
        """Which living rows pass the filters: (n,) or (B, n), None if all do."""
        segment, alive = source.segment, source.segment.alive(source.num_dead)
        if wanted == (None,):
            return alive
        items = SegmentItems(segment, self.codes, self.tags)
        masks = [np.ones(len(segment), dtype=bool) if one is None else passing(one, items) for one in wanted]
        mask: Mask = masks[0] if len(masks) == 1 else np.stack(masks)
        if alive is not None:
            mask &= alive
        return mask


def _candidates(
    source: Source, queries: QueryStates, k: int, thresholds: Scores, allowed: Mask | None
) -> PartialAnswer:
    """Return, per query, the rows that may be in the union's top `k`, with their float64 scores.

    thresholds (B,): lower scores are not in the answer; -inf means no threshold. allowed: see `Index.search`.
    """
    scorer = source.segment.scorer
    scores = scorer.scores(queries)
    double_error = scorer.error_bounds_float64(queries)
    error = scorer.error_bounds(queries) + double_error
    if allowed is not None:
        scores[~np.broadcast_to(allowed, scores.shape)] = -np.inf
    scores[scores < (thresholds - error)[:, None]] = -np.inf
    best = scores.max(axis=1)
    found: list[tuple[Indices, Scores]] = []
    for query in range(len(queries)):
        if best[query] == -np.inf:
            found.append((np.empty(0, dtype=np.int64), np.empty(0)))
            continue
        rows = within_reach(scores[query], k, float(error[query]))
        found.append((rows, scorer.scores_float64(queries, query, rows)))
    return PartialAnswer(segment=source.segment, found=found, error=double_error)


def _all_scores(source: Source, queries: QueryStates, allowed: Mask | None) -> PartialAnswer:
    """Per query every allowed row and its float32 score, with error bounds."""
    scorer = source.segment.scorer
    if scorer.num_pairs == 1:  # BLAS sums in an order that depends on the batch
        scores = np.stack(scorer.scores_at(queries, [np.arange(scorer.num_items)] * len(queries)))
    else:
        scores = scorer.scores(queries)
    if allowed is not None:
        scores[~np.broadcast_to(allowed, scores.shape)] = -np.inf
    found = [(rows := np.flatnonzero(row > -np.inf), row[rows].astype(np.float64)) for row in scores]
    return PartialAnswer(segment=source.segment, found=found, error=scorer.error_bounds(queries))


def _named(segment: Segment, algorithm: str | None) -> Index:
    indexes = segment.indexes
    if algorithm is None:
        return next(iter(indexes.values()))
    if algorithm not in indexes:
        raise ValueError(f"algorithm={algorithm!r} allowed: {', '.join(indexes)}")
    return indexes[algorithm]


def _as_partial(segment: Segment, top: TopK, error: Scores) -> PartialAnswer:
    counts = (top.item_indices >= 0).sum(axis=1).tolist()
    found = [
        (rows[:count], scores[:count]) for rows, scores, count in zip(top.item_indices, top.scores, counts, strict=True)
    ]
    return PartialAnswer(segment=segment, found=found, error=error)


def _merge_query(
    parts: Sequence[PartialAnswer], query: int, k: int, tolerance: float
) -> tuple[tuple[str, ...], Scores]:
    """One query's top `k` of several segments' candidates. Scores within `tolerance` are ties.

    The first part's candidates are already in order.
    """
    given = [(part.segment.rows.ids.strings, *part.found[query]) for part in parts if len(part.found[query][0])]
    if not given:
        return (), np.empty(0)
    scores = np.concatenate([part_scores for _, _, part_scores in given])
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    if len(given) > 1 and (ordered[:-1] - ordered[1:] <= tolerance).any():
        item_ids = [item_id for ids, rows, _ in given for item_id in ids.take(rows)]
        ranks = np.empty(len(scores), dtype=np.int64)
        ranks[sorted(range(len(item_ids)), key=item_ids.__getitem__)] = np.arange(len(item_ids))
        order, ordered = order_by_score_then_id(scores, ranks, tolerance=tolerance)
    best = order[:k]
    if len(given) == 1:
        return tuple(given[0][0].take(given[0][1][best])), ordered[:k]
    starts = np.cumsum([0, *(len(rows) for _, rows, _ in given)])
    found = np.searchsorted(starts, best, side="right") - 1
    out = np.empty(len(best), dtype=object)
    for number, (ids, rows, _) in enumerate(given):
        here = np.flatnonzero(found == number)
        out[here] = ids.take(rows[best[here] - starts[number]])
    return tuple(out.tolist()), ordered[:k]


def _tie_tolerance(parts: Sequence[PartialAnswer], query: int) -> float:
    """The largest difference between two computed scores of one query whose exact values are equal."""
    return 2 * max((float(part.error[query]) for part in parts), default=0.0)


def _merged_certificate(
    answers: Sequence[tuple[Certificate, Scores]], scores: Scores, k: int, tolerance: float
) -> Certificate:
    """The certificate of the merged answer.

    scores (n',): its scores, best first. answers: certificate and scores (n,) of each segment with an algorithm.
    """
    if any(one.gap is None for one, _ in answers):
        return ESTIMATE
    bounds = [float(np.nextafter(own[k - 1] + one.gap, np.inf)) for one, own in answers if one.gap]
    return certificate(bound=max(bounds), kth_score=float(scores[k - 1]) - tolerance) if bounds else EXACT
