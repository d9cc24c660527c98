"""One version of a mutable index, and a search of it: what a reader holds from its first step to its last.

The main segment answers through its algorithm with the dead masked out; that answer's K-th score is the threshold for
the delta, whose rows are scored one by one; the two make one answer.

Letters: B queries, K results, n rows of a segment.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.filters import ItemFilter
from services.algorithms.indexes.delta import TailView, candidates
from services.algorithms.indexes.item_batch import ItemShape
from services.algorithms.indexes.merged_answer import (
    Answer,
    PartialAnswer,
    as_partial,
    merge_query,
    merged_certificate,
)
from services.algorithms.indexes.protocol import EXACT, Mask, Pass, check_request, empty_answer
from services.algorithms.indexes.segment import HashedFilter
from services.algorithms.indexes.segment_merge import Order, Pause, Source, order_by_id
from services.algorithms.ops.mol_scores.shapes import check_queries
from services.algorithms.states import QueryStates

Wanted = tuple[HashedFilter | None, ...]  # one for all queries, or one per query


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """Immutable. `name` is the index version of its answers: model version, number of changes, digest of them all."""

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
        """The delta's segments that have a living row."""
        parts = (*self.blocks, self.tail.source)
        return [part for part in parts if part is not None and part.num_living]

    def in_order(self, pause: Pause) -> Order:
        """All living items in order of their ids; `pause` as in `MutableIndex.merge`."""
        main = [self.main] if self.main is not None and self.main.num_living else []
        return order_by_id([*main, *self.delta()], pause)


def search_version(
    version: Version,
    shape: ItemShape,
    queries: QueryStates,
    k: int,
    filters: ItemFilter | Sequence[ItemFilter] | None,
    codes: Mapping[str, int],
) -> Answer:
    """The top `k` of s in one version; `codes` maps category names. See `MutableIndex.search`."""
    check_request(k=k, allowed=None, num_queries=len(queries), num_items=version.num_items)
    check_queries(
        queries,
        num_pairs=shape.num_pairs,
        num_item_components=shape.num_components,
        width=shape.width,
        gated=shape.gated,
    )
    wanted = _hashed(filters, len(queries), codes)
    thresholds = np.full(len(queries), -np.inf)
    parts: list[PartialAnswer] = []
    passes: tuple[Pass, ...] = ()
    top = None
    if version.main is not None and version.main.num_living and version.main.segment.index is not None:
        segment = version.main.segment
        top = version.main.segment.index.search(queries, k, _mask(version.main, wanted))
        passes = top.passes
        error = segment.scorer.error_bounds_float64(queries)
        parts.append(as_partial(segment, top, error))
        if top.scores.shape[1] == k:
            thresholds = top.scores[:, k - 1] - 2 * error
    started = time.perf_counter()
    touched = 0
    for source in version.delta() if len(queries) else ():
        parts.append(candidates(source, queries, k, thresholds, _mask(source, wanted)))
        touched += len(source.segment)
    item_ids, certificates = [], []
    _, scores = empty_answer(len(queries), min(k, version.num_items))
    for query in range(len(queries)):
        ids, best, tolerance = merge_query(parts, query, k)
        item_ids.append(ids)
        scores[query, : len(best)] = best
        certificates.append(
            EXACT if top is None else merged_certificate(top.certificates[query], top.scores[query], best, k, tolerance)
        )
    delta = Pass("delta", time.perf_counter() - started, np.full(len(queries), touched, dtype=np.int64))
    return Answer(
        item_ids=tuple(item_ids),
        scores=scores,
        certificates=tuple(certificates),
        version=version.name,
        passes=(*passes, delta),
    )


def _hashed(filters: ItemFilter | Sequence[ItemFilter] | None, num_queries: int, codes: Mapping[str, int]) -> Wanted:
    if filters is None:
        return (None,)
    if isinstance(filters, ItemFilter):
        return (HashedFilter.of(filters, codes),)
    if len(filters) != num_queries:
        raise ValueError(f"len(filters)={len(filters)} allowed: one for all queries or one for each of {num_queries}")
    hashed = tuple(HashedFilter.of(wanted, codes) for wanted in filters)
    return (None,) if all(wanted is None for wanted in hashed) else hashed


def _mask(source: Source, wanted: Wanted) -> Mask | None:
    """Which rows live and pass: (n,) or (B, n), None when all do."""
    segment, alive = source.segment, source.segment.alive(source.num_dead)
    if wanted == (None,):
        return alive
    masks = [None if one is None else segment.passing(one) for one in wanted]
    mask: Mask
    if len(masks) == 1 and masks[0] is not None:
        mask = masks[0]
    else:
        everything = np.ones(len(segment), dtype=bool)
        mask = np.stack([everything if one is None else one for one in masks])
    if alive is not None:
        mask &= alive
    return mask
