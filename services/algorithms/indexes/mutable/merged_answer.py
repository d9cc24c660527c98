"""Merge the answers of main segment and delta: exact top K of their union, one certificate per query.

Only a segment with an algorithm can have a gap: items omitted there score at most its K-th score plus its gap.

Letters: B queries, K results, n candidates of one segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.indexes.mutable.segment import Segment
from services.algorithms.indexes.protocol import (
    ESTIMATE,
    EXACT,
    Certificate,
    Indices,
    Pass,
    Scores,
    TopK,
    certificate,
)
from services.algorithms.indexes.ranking import order_by_score_then_id


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


def as_partial(segment: Segment, top: TopK, error: Scores) -> PartialAnswer:
    counts = (top.item_indices >= 0).sum(axis=1).tolist()
    found = [
        (rows[:count], scores[:count]) for rows, scores, count in zip(top.item_indices, top.scores, counts, strict=True)
    ]
    return PartialAnswer(segment=segment, found=found, error=error)


def merge_query(parts: Sequence[PartialAnswer], query: int, k: int, tolerance: float) -> tuple[tuple[str, ...], Scores]:
    """One query's top `k` of several segments' candidates; scores within `tolerance` are ties.

    The first part's candidates are ordered.
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


def tie_tolerance(parts: Sequence[PartialAnswer], query: int) -> float:
    """The largest difference between computed values of equal scores of one query."""
    return 2 * max((float(part.error[query]) for part in parts), default=0.0)


def merged_certificate(
    answers: Sequence[tuple[Certificate, Scores]], scores: Scores, k: int, tolerance: float
) -> Certificate:
    """The certificate of the union with scores (n',), best first.

    answers: certificate and scores (n,) of each segment with an algorithm.
    """
    if any(one.gap is None for one, _ in answers):
        return ESTIMATE
    bounds = [float(np.nextafter(own[k - 1] + one.gap, np.inf)) for one, own in answers if one.gap]
    return certificate(bound=max(bounds), kth_score=float(scores[k - 1]) - tolerance) if bounds else EXACT
