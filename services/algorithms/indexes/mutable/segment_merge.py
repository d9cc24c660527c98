"""Merge the living rows of several segments into one without delaying searches, and join the blocks of a delta.

Work that grows with the catalogue runs in NumPy calls, which release the interpreter lock, or in short slices with
pauses. Without pauses, each native call of a concurrent search would wait 5 ms for the lock.

Letters: n rows of the result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.mutable.segment import Rows, Segment
from services.algorithms.indexes.protocol import Indices
from services.algorithms.item_table.categories import CategoryLists
from services.algorithms.item_table.ids import Hashes, ItemIds
from services.algorithms.item_table.strings import Strings, joined
from services.algorithms.ops.string_order import rows_before
from services.algorithms.rules.attributes import Columns
from services.algorithms.scoring.states import ItemStates, PairGate

Pause = Callable[[], None]

_GROWTH = 8
_COPIED_IDS = 16_384  # per slice: NumPy's `repeat` holds the interpreter lock, here for 0.5 ms
_COPIED_BYTES = 4 << 20  # per slice of states, so that searches keep the CPU cache


@dataclass(frozen=True, slots=True)
class Source:
    segment: Segment
    num_dead: int

    @property
    def num_living(self) -> int:
        return len(self.segment) - self.num_dead


@dataclass(frozen=True, slots=True)
class Order:
    """The origin of n living rows, which are in order of ids: source (n,), and row (n,) in that source."""

    sources: Sequence[Source]
    source: npt.NDArray[np.int16]
    row: Indices

    def __len__(self) -> int:
        return len(self.row)

    def new_rows(self, source: int) -> Indices:
        """The new row of each row of `source`, -1 for a dead row."""
        new_rows = np.full(len(self.sources[source].segment), -1, dtype=np.int64)
        here = np.flatnonzero(self.source == source)
        new_rows[self.row[here]] = here
        return new_rows

    def parts(self, size: int) -> Iterator[tuple[slice, list[tuple[int, Indices | slice, Indices]]]]:
        """Yield slices of `size`, each with (source, positions within the slice, rows of the source)."""
        for start in range(0, len(self), size):
            part = slice(start, min(start + size, len(self)))
            source, row = self.source[part], self.row[part]
            present = np.unique(source).tolist()
            if len(present) == 1:
                yield part, [(present[0], slice(None), row)]
            else:
                yield part, [(here, (at := np.flatnonzero(source == here)), row[at]) for here in present]


def order_by_id(sources: Sequence[Source]) -> Order:
    """All sources' living rows in order of ids; living ids must be distinct."""
    smallest_first = sorted(range(len(sources)), key=lambda number: len(sources[number].segment))
    source = np.empty(0, dtype=np.int16)
    row = np.empty(0, dtype=np.int64)
    ids = Strings.of(())
    for step, number in enumerate(smallest_first):
        segment, alive = sources[number].segment, sources[number].segment.alive(sources[number].num_dead)
        larger = segment.rows.ids.strings
        # Positions among all rows of the larger segment; its dead rows are dropped afterwards.
        before = rows_before(larger.data, larger.ends, ids.data, ids.ends)
        living = np.arange(len(larger)) if alive is None else np.flatnonzero(alive)
        order = np.argsort(np.concatenate([2 * living + 1, 2 * before]), kind="stable")
        source = np.concatenate([np.full(len(living), number, dtype=np.int16), source])[order]
        row = np.concatenate([living, row])[order]
        if step + 1 < len(smallest_first):
            ids = joined([larger if alive is None else larger.taken(living), ids]).taken(order)
    return Order(sources, source, row)


def joined_blocks(blocks: Sequence[Segment], frozen: int, pair_gate: PairGate | None) -> list[Segment]:
    """Join the newest blocks until each older one is at least 8 times as large. The first `frozen` blocks stay.

    So n rows make at most log8(n / 256) + 2 blocks, and each row is copied about 8 times per level. Blocks without a
    living row are dropped. Only the writer may call this: it uses the blocks' current deaths.
    """
    loose = [block for block in blocks[frozen:] if block.num_dead < len(block)]
    while len(loose) > 1 and len(loose[-2]) < _GROWTH * len(loose[-1]):
        pair = [Source(block, block.num_dead) for block in loose[-2:]]
        loose[-2:] = [joined := Segment(gather(order_by_id(pair)), pair_gate)]
        joined.prepare()
    return [*blocks[:frozen], *loose]


def gather(order: Order, pause: Pause = lambda: None) -> Rows:
    segments = [source.segment for source in order.sources]
    if len(segments) == 1 and len(order) == len(segments[0]):
        return segments[0].rows
    hashes = np.concatenate([segment.rows.ids.hashes for segment in segments])[_rows_end_to_end(order)]
    ids = ItemIds(gather_ids(order, pause), hashes)
    components = np.empty((len(order), *segments[0].rows.states.components.shape[1:]), dtype=np.float32)
    gate = (
        None
        if segments[0].rows.states.gate is None
        else np.empty((len(order), segments[0].rows.states.gate.shape[1]), dtype=np.float32)
    )
    _fill(components, state_slices(order, "components"), pause)
    if gate is not None:
        _fill(gate, state_slices(order, "gate"), pause)
    return Rows(
        ids=ids,
        states=ItemStates(components=components, gate=gate),
        categories=gather_categories(order),
        attributes=_gather_attributes(order),
    )


def state_slices(order: Order, name: Literal["components", "gate"]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield an order's states, a few megabytes at a time."""
    arrays = [getattr(source.segment.rows.states, name) for source in order.sources]
    size = max(1, _COPIED_BYTES // max(1, arrays[0][:1].nbytes)) if arrays else 1
    for part, pieces in order.parts(size):
        out = np.empty((part.stop - part.start, *arrays[0].shape[1:]), dtype=np.float32)
        for source, at, rows in pieces:
            if isinstance(at, slice):
                np.take(arrays[source], rows, axis=0, out=out, mode="clip")  # "clip" writes without a buffer
            else:
                out[at] = arrays[source][rows]
        yield out


def gather_ids(order: Order, pause: Pause = lambda: None) -> Strings:
    columns = [source.segment.rows.ids.strings for source in order.sources]
    parts: list[Strings] = []
    for _, pieces in order.parts(_COPIED_IDS):
        found = joined([columns[source].taken(rows) for source, _, rows in pieces])
        if len(pieces) > 1:
            places = np.concatenate([at for _, at, _ in pieces])
            found = found.taken(np.argsort(places, kind="stable"))
        parts.append(found)
        pause()
    return joined(parts)


def gather_hashes(order: Order) -> Hashes:
    hashes = np.empty(len(order), dtype=np.int64)
    for number, source in enumerate(order.sources):
        here = np.flatnonzero(order.source == number)
        hashes[here] = source.segment.rows.ids.hashes_of(order.row[here])
    return hashes


def gather_categories(order: Order) -> CategoryLists:
    lists = [source.segment.rows.categories for source in order.sources]
    starts = np.concatenate([[0], np.cumsum([len(part.codes) for part in lists])])
    ends = [part.offsets[1:] + start for part, start in zip(lists, starts, strict=False)]
    together = CategoryLists(
        np.concatenate([np.zeros(1, dtype=np.int64), *ends]),
        np.concatenate([np.zeros(0, dtype=np.int32), *[part.codes for part in lists]]),
    )
    return together.take(_rows_end_to_end(order))


def _gather_attributes(order: Order) -> Columns:
    columns = [source.segment.rows.attributes for source in order.sources]
    rows = _rows_end_to_end(order)
    return {name: np.concatenate([part[name] for part in columns])[rows] for name in columns[0]}


def _fill(out: npt.NDArray[np.float32], slices: Iterator[npt.NDArray[np.float32]], pause: Pause) -> None:
    start = 0
    for piece in slices:
        out[start : start + len(piece)] = piece
        start += len(piece)
        pause()


def _rows_end_to_end(order: Order) -> Indices:
    sizes = [0, *(len(source.segment) for source in order.sources)]
    return np.asarray(np.cumsum(sizes)[order.source] + order.row, dtype=np.int64)
