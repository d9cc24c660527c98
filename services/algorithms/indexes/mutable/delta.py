"""The delta of a mutable index: changes since the main segment was built, scored exactly, item by item.

New rows are appended to the tail, a fixed buffer; a full one becomes a block in id order. A block is joined with its
older neighbour while that is less than 8 times as large. So n rows make at most log8(n / 256) + 2 blocks, and each row
is copied about 8 times per level.

Letters: B queries, n rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.indexes.mutable.merged_answer import PartialAnswer
from services.algorithms.indexes.mutable.segment import Segment, rows_of
from services.algorithms.indexes.mutable.segment_merge import Source, gather, order_by_id
from services.algorithms.indexes.protocol import Indices, Mask, Scores
from services.algorithms.indexes.rescoring import within_reach
from services.algorithms.item_table.attributes import row_type
from services.algorithms.item_table.categories import CategoryLists
from services.algorithms.item_table.ids import Hashes, ItemIds
from services.algorithms.item_table.strings import Strings
from services.algorithms.lazy import lazy_property
from services.algorithms.rules.attributes import Columns, Kinds
from services.algorithms.scoring.states import ItemShape, ItemStates, PairGate, QueryStates

TAIL_ROWS = 256
_GROWTH = 8


class Tail:
    """Up to `TAIL_ROWS` rows in order of arrival, each written once; deaths are appended to a list."""

    def __init__(self, shape: ItemShape, pair_gate: PairGate | None, kinds: Kinds) -> None:
        self._attributes = np.empty(TAIL_ROWS, row_type(kinds))
        self._pair_gate = pair_gate
        self._components = np.empty((TAIL_ROWS, shape.num_components, shape.width), dtype=np.float32)
        self._gate = np.empty((TAIL_ROWS, shape.num_pairs), dtype=np.float32) if shape.gated else None
        self._hashes = np.empty(TAIL_ROWS, dtype=np.int64)
        self._ids: list[str] = []
        self._categories: list[tuple[int, ...]] = []
        self._living: dict[str, int] = {}  # the writer's view
        self.dead: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        gate = 0 if self._gate is None else self._gate.nbytes
        return self._components.nbytes + gate + self._hashes.nbytes + self._attributes.nbytes

    def append(
        self,
        item_ids: Collection[str],
        hashes: Hashes,
        states: ItemStates,
        categories: Sequence[tuple[int, ...]],
        attributes: Columns,
    ) -> None:
        """Append rows; the ids must not be alive here."""
        start, end = len(self), len(self) + len(item_ids)
        self._components[start:end] = states.components
        if self._gate is not None and states.gate is not None:
            self._gate[start:end] = states.gate
        self._hashes[start:end] = hashes
        for name, column in attributes.items():
            self._attributes[name][start:end] = column
        self._living.update(zip(item_ids, range(start, end), strict=True))
        self._categories += categories
        self._ids += item_ids

    def row(self, item_id: str) -> int | None:
        return self._living.get(item_id)

    def categories(self, row: int) -> tuple[int, ...]:
        return self._categories[row]

    def attributes(self, row: int) -> np.void:
        entries: np.void = self._attributes[row]
        return entries

    def kill(self, item_id: str) -> None:
        self.dead.append(self._living.pop(item_id))

    def segment(self, count: int, num_dead: int) -> Segment | None:
        """The living of the first `count` rows after `num_dead` deaths, in id order; None without any."""
        dead = set(self.dead[:num_dead])
        living = [row for row in range(count) if row not in dead]
        if not living:
            return None
        rows = np.array(living)
        states = ItemStates(components=self._components[rows], gate=None if self._gate is None else self._gate[rows])
        ids, categories = self._ids, self._categories
        return Segment(
            rows_of(
                ItemIds(Strings.of(ids[row] for row in living), self._hashes[rows]),
                states,
                CategoryLists.of([categories[row] for row in living]),
                {name: self._attributes[name][rows] for name in self._attributes.dtype.names or ()},
            ),
            self._pair_gate,
        )


@dataclass(frozen=True)
class TailView:
    """The tail as of a version. The first search makes its segment."""

    tail: Tail
    count: int
    num_dead: int

    @property
    def num_living(self) -> int:
        return self.count - self.num_dead

    @lazy_property
    def source(self) -> Source | None:
        segment = self.tail.segment(self.count, self.num_dead) if self.num_living else None
        return None if segment is None else Source(segment, 0)


def join_blocks(blocks: Sequence[Segment], frozen: int, pair_gate: PairGate | None) -> list[Segment]:
    """Join the newest blocks until each older one is at least 8 times as large; the first `frozen` stay.

    Blocks without a living row are dropped. Only the writer may call this: it uses the blocks' current deaths.
    """
    kept = list(blocks[:frozen])
    loose = [block for block in blocks[frozen:] if block.num_dead < len(block)]
    while len(loose) > 1 and len(loose[-2]) < _GROWTH * len(loose[-1]):
        pair = [Source(block, block.num_dead) for block in loose[-2:]]
        joined = Segment(gather(order_by_id(pair), _go_on), pair_gate)
        joined.prepare()
        loose[-2:] = [joined]
    return kept + loose


def candidates(source: Source, queries: QueryStates, k: int, thresholds: Scores, allowed: Mask | None) -> PartialAnswer:
    """Per query the rows that may be in the union's top `k`, and their float64 scores.

    thresholds (B,): lower scores are not in the answer (-inf: none). allowed: as in Index.search.
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


def all_scores(source: Source, queries: QueryStates, allowed: Mask | None) -> PartialAnswer:
    """Per query every allowed row and its float32 score, with error bounds."""
    scorer = source.segment.scorer
    if scorer.num_pairs == 1:  # see BruteForce.first_stage
        scores = np.stack(scorer.scores_at(queries, [np.arange(scorer.num_items)] * len(queries)))
    else:
        scores = scorer.scores(queries)
    if allowed is not None:
        scores[~np.broadcast_to(allowed, scores.shape)] = -np.inf
    found = [(rows := np.flatnonzero(row > -np.inf), row[rows].astype(np.float64)) for row in scores]
    return PartialAnswer(segment=source.segment, found=found, error=scorer.error_bounds(queries))


def _go_on() -> None: ...
