"""A mutable index behind the Index protocol, so that the conformance suite holds it to the same claims.

Half of the items are in its main segment, the rest in its delta; some were removed, some updated on the way. With
`coded`, most of the delta is one block with the algorithm over it. With `moving`, items change before each search, and
some searches follow a merge.
"""

import threading
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.mutable import index as mutable
from services.algorithms.indexes.mutable.index import MutableIndex, only
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.version import Version
from services.algorithms.indexes.protocol import Index, Mask, Pool, TopK, check_request
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import ItemStates, QueryStates


class MutableAsIndex:
    """Rows as ids and back; masks as deny lists."""

    name = "mutable"

    def __init__(
        self,
        scorer: MolScorer,
        build: Callable[[MolScorer], Index],
        *,
        coded: bool = False,
        moving: bool = False,
    ) -> None:
        if not scorer.num_items:
            raise ValueError("the index is empty")
        items, self.num_items = ItemStates(components=scorer.components, gate=scorer.item_gate), scorer.num_items
        self.ids = np.array([f"{row:06d}" for row in range(self.num_items)], dtype=object)
        self.row = {item_id: row for row, item_id in enumerate(self.ids)}

        def some(rows: npt.NDArray[np.int64], states: npt.NDArray[np.int64]) -> ItemBatch:
            return ItemBatch(item_ids=self.ids[rows].tolist(), states=items.take(states))

        self._some, self._moving, self._moves, self._lock = some, moving, 0, threading.Lock()
        rows = np.arange(len(items))
        first, later = rows[::2], rows[1::2]
        self.index = MutableIndex(some(first, first), scorer.pair_gate, model_version="model", build=only(build))
        if len(later):
            self.index.apply(upserts=some(later, later[::-1]))  # each with another's state at first
            self.index.apply(removals=self.ids[later[::3]].tolist())
            self.index.apply(upserts=some(later, later))
            if coded:
                with patch.object(mutable, "CODED_ROWS", 1), patch.object(mutable, "MERGE_ROWS", 10**9):
                    self.index.tidy()
            self.index.apply(upserts=some(first[:1], first[:1]))

    @property
    def nbytes(self) -> int:
        return self.index.memory.total

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None, max_gap: float = 0.0) -> TopK:
        filters, version = self._filters(queries, k, allowed), self._next_version()
        answer = version.search(queries, k, filters, max_gap=max_gap)
        return TopK(
            item_indices=self._rows(answer.item_ids, answer.scores.shape),
            scores=answer.scores,
            certificates=answer.certificates,
            passes=answer.passes,
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        filters = self._filters(queries, size, allowed)
        pool = self._next_version().first_stage(queries, size, filters)
        return Pool(
            item_indices=self._rows(pool.item_ids, pool.scores.shape),
            scores=pool.scores,
            bounds=pool.bounds,
            passes=pool.passes,
        )

    def _next_version(self) -> Version:
        """The items as they were given; `moving`: after other states, removals and merges in between."""
        with self._lock:
            if self._moving:
                rows = np.arange(self._moves % 3, self.num_items, 3)
                self.index.apply(upserts=self._some(rows, rows[::-1]))
                self.index.apply(removals=self.ids[rows[::2]].tolist())
                if self._moves % 4 == 1:
                    self.index.merge()
                self.index.apply(upserts=self._some(rows, rows))
                self._moves += 1
            return self.index.version

    def _filters(self, queries: QueryStates, k: int, allowed: Mask | None) -> list[ItemFilter] | ItemFilter | None:
        check_request(k=k, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        if allowed is None:
            return None
        if allowed.ndim == 1:
            return ItemFilter(deny_item_ids=self.ids[~allowed].tolist())
        return [ItemFilter(deny_item_ids=self.ids[~row].tolist()) for row in allowed]

    def _rows(self, item_ids: tuple[tuple[str, ...], ...], shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        out = np.full(shape, -1, dtype=np.int64)
        for query, ids in enumerate(item_ids):
            out[query, : len(ids)] = [self.row[item_id] for item_id in ids]
        return out
