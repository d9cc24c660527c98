"""The newest changes of a mutable index: a fixed buffer to which rows are appended.

A change writes only its own rows. The first search of each index version copies the buffer's living rows into a
segment, which searches can read. A full buffer is copied into a block in id order.

Letters: n rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.indexes.mutable.segment import Segment, rows_of
from services.algorithms.indexes.mutable.segment_merge import Source
from services.algorithms.item_table.attributes import row_type
from services.algorithms.item_table.categories import CategoryLists
from services.algorithms.item_table.ids import Hashes, ItemIds
from services.algorithms.item_table.strings import Strings
from services.algorithms.lazy import lazy_property
from services.algorithms.rules.attributes import Columns, Kinds
from services.algorithms.scoring.states import ItemShape, ItemStates, PairGate

TAIL_ROWS = 256


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
        self._living: dict[str, int] = {}  # the rows that live after the writer's last change
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
        """The rows, among the first `count`, that live after `num_dead` deaths, in id order; None if no row lives."""
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
