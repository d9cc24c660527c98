"""An index over item ids that changes while it answers (decision 008).

A batch of changes makes the next version, published by one assignment. `merge` builds a new main segment while searches
and changes continue, then marks the rows that died meanwhile.

Letters: K results, P_x item components, P pairs, d component width.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.indexes.mutable.item_batch import Change, ItemBatch, check_ids
from services.algorithms.indexes.mutable.segment import Segment, rows_of
from services.algorithms.indexes.mutable.segment_merge import Pause, Source, gather, joined_blocks, order_by_id
from services.algorithms.indexes.mutable.tail import TAIL_ROWS, Tail, TailView
from services.algorithms.indexes.mutable.version import Version
from services.algorithms.indexes.protocol import Index, Indices
from services.algorithms.item_table.attributes import encoded, no_attributes, row_type
from services.algorithms.item_table.categories import Categories, CategoryLists
from services.algorithms.item_table.ids import ItemIds, hash_ids
from services.algorithms.item_table.strings import Strings
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.rules.attributes import Columns, Kinds
from services.algorithms.scoring.states import PairGate, QueryStates, shape_of

# A merge is wanted when delta and dead rows reach this share of the main segment's rows: searches score at most this
# share of extra rows, and a merge copies and builds 10 rows per update.
MERGE_SHARE = 0.1
# No merge is wanted below this number of delta or dead rows. At 8x4x64 a delta row costs a search 1.3 us, a merge of
# 3,706 items 55 ms of CPU. With 250 changes and 40 searches a second, the total is least near 700 rows; 2,048 rows
# double a search's time.
MERGE_ROWS = 512
# The delta becomes one "coded" block, with its own algorithms, when its other rows reach this number and share of its
# coded rows: scoring a tenth of ten million rows one by one takes 30 ms. With a million items and 1,000 changes a
# second, a search among tangents took 4.0 to 5.3 ms (docs/benchmarks/large-catalogues.md).
CODED_ROWS = 16_384
CODED_SHARE = 1 / 16
_ROW_OVERHEAD = 64  # bytes per row besides states, for an id of 12 bytes, hashes, two categories and masks


# Builds a segment's algorithms, by name; the first is the default.
Build = Callable[[MolScorer], Mapping[str, Index]]


def only(make: Callable[[MolScorer], Index]) -> Build:
    """A build of one algorithm, under its `name`."""

    def build(items: MolScorer) -> Mapping[str, Index]:
        index = make(items)
        return {index.name: index}

    return build


class IndexFullError(ValueError):
    """A change would exceed the index's memory limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the main segment with its algorithms, the delta, and the segment that a merge is building."""

    main: int
    delta: int
    building: int

    @property
    def total(self) -> int:
        return self.main + self.delta + self.building


class MutableIndex:
    """Insert, update and delete items by id while other threads search."""

    def __init__(
        self,
        items: ItemBatch,
        pair_gate: PairGate | None,
        *,
        model_version: str,
        build: Build,
        max_bytes: int | None = None,
        number: int = 0,
        digest: str = "",
    ) -> None:
        """Start from `items`, which are not copied if in id order. Empty arrays of states still give P_x, d and P.

        Later items must have the same kinds of attributes.
        max_bytes: limit of `memory`, including a merge's copy. number, digest: continue a stored index's versions.
        Raises: ValueError if states and pair gate disagree; the errors of `build`.
        """
        self.shape = shape_of(items.states, pair_gate)
        self.pair_gate, self.model_version, self.max_bytes = pair_gate, model_version, max_bytes
        self.merge_wanted = threading.Event()
        self._build = build
        self._writing, self._one_merge = threading.Lock(), threading.Lock()
        attributes = items.attributes or no_attributes(len(items))
        self.kinds: Kinds = dict(attributes.kinds)
        self._codes: dict[str, int] = {}  # of categories
        self._tags: dict[str, dict[str, int]] = {}
        self._main: Segment | None = None
        self._blocks: list[Segment] = []
        self._frozen = 0  # leading blocks in use by a running merge
        self._tail = Tail(self.shape, pair_gate, self.kinds)
        self._building = 0
        if len(items):
            categories = Categories.of(items.categories or [()] * len(items))
            codes = np.array([self._codes.setdefault(one, len(self._codes)) for one in categories.names], np.int32)
            rows = rows_of(items.ids, items.states, categories.lists.recoded(codes), attributes.recoded(self._tags))
            self._main = self._searchable(Segment(rows, pair_gate))
        self._number = number
        self._digest = digest or _digest("", items, ())
        self._publish()

    @property
    def version(self) -> Version:
        """The newest version."""
        return self._version

    @property
    def num_items(self) -> int:
        return self._version.num_items

    @property
    def category_codes(self) -> Mapping[str, int]:
        return self._codes

    @property
    def memory(self) -> Memory:
        """The present memory. An old main segment is freed when its last search ends."""
        version = self._version
        delta = sum(block.segment.nbytes for block in version.blocks) + version.tail.tail.nbytes
        main = 0 if version.main is None else version.main.segment.nbytes
        return Memory(main=main, delta=delta, building=self._building)

    def apply(self, *, upserts: ItemBatch | None = None, removals: Sequence[str] = ()) -> Change:
        """Insert or replace some items and remove others, as one version.

        An id may occur once. Unknown ids to remove are no error but reported, since streams repeat records.
        Cost: about 10 us per item.
        Raises: ValueError for repeated or malformed ids and states that do not fit; IndexFullError if `max_bytes` would
        be exceeded. After an error, nothing has changed.
        """
        check_ids("removals", removals)
        if upserts is not None:
            self.shape.check_items(upserts.states)
            if upserts.attributes is not None and dict(upserts.attributes.kinds) != self.kinds:
                raise ValueError(f"attributes are {dict(upserts.attributes.kinds)}; this index has {self.kinds}")
            if both := set(upserts.item_ids).intersection(removals):
                raise ValueError(f"item {min(both)!r} is both in upserts and in removals; a batch names each item once")
            self._make_room(len(upserts))
        with self._writing:
            self._require_room(0 if upserts is None else len(upserts))
            return self._apply(upserts, removals)

    def merge(self, pause: Pause = lambda: None) -> None:
        """Merge all segments into one main segment. One merge runs at a time. Items and version name do not change.

        pause: called between slices that block the interpreter lock. Cost: one copy of the living rows and one build.
        Raises: the errors of `build`; then nothing has changed.
        """
        with self._one_merge:
            self._merge(pause, with_main=True)

    def tidy(self, pause: Pause = lambda: None) -> None:
        """Make the delta one coded block if only this is wanted; else merge. Raises as `merge`."""
        with self._one_merge:
            self._merge(pause, with_main=self._wants_merge() or not self._wants_code())

    def _merge(self, pause: Pause, *, with_main: bool) -> None:
        with self._writing:
            self._seal_tail()
            self._frozen = len(self._blocks)
            old = [self._main, *self._blocks] if with_main and self._main is not None else [*self._blocks]
            sources = [Source(segment, segment.num_dead) for segment in old if segment.num_dead < len(segment)]
            self._building = self._bytes_of(sum(source.num_living for source in sources))
            self._publish()
        try:
            order = order_by_id(sources)
            merged = self._searchable(Segment(gather(order, pause), self.pair_gate)) if sources else None
            moved = [order.new_rows(number) for number in range(len(sources))]
        except BaseException:
            with self._writing:
                self._frozen = self._building = 0
            raise
        with self._writing:
            for source, new_rows in zip(sources, moved, strict=True):
                died = source.segment.died(source.num_dead, source.segment.num_dead)
                if len(died) and merged is not None:
                    merged.kill(new_rows[died])
            self._blocks = self._blocks[self._frozen :]
            if with_main:
                self._main = merged
            elif merged is not None:
                self._blocks.insert(0, merged)
            self._frozen = self._building = 0
            self._publish()

    def _apply(self, upserts: ItemBatch | None, removals: Sequence[str]) -> Change:
        num_upserts = 0 if upserts is None else len(upserts)
        if num_upserts > TAIL_ROWS - len(self._tail):
            self._seal_tail()
        item_ids = [*(() if upserts is None else upserts.item_ids), *removals]
        hashes = hash_ids(item_ids)
        in_tail = [self._tail.row(item_id) for item_id in item_ids]
        found = np.array([row is not None for row in in_tail], dtype=bool)
        found_in: list[tuple[Segment, Indices]] = []
        for segment in (self._main, *self._blocks):
            if segment is not None and not found.all():
                living = segment.find_living(item_ids, hashes)
                found_in.append((segment, living))
                found |= living >= 0
        if not found.any() and not num_upserts:
            return Change(version=self._version.name, unknown=tuple(removals))
        categories: list[tuple[int, ...]] = []
        attributes: Columns = {}
        block = None
        if upserts is not None:
            categories = self._categories(upserts, in_tail, found_in)
            attributes = self._attributes(upserts, in_tail, found_in)
            if num_upserts > TAIL_ROWS:
                ids = ItemIds(Strings.of(upserts.item_ids), hashes[:num_upserts])
                rows = rows_of(ids, upserts.states, CategoryLists.of(categories), attributes)
                block = Segment(rows, self.pair_gate)
                block.prepare()
        digest = _digest(self._digest, upserts, removals)
        for item_id, row in zip(item_ids, in_tail, strict=True):
            if row is not None:
                self._tail.kill(item_id)
        for segment, living in found_in:
            if (living >= 0).any():
                segment.kill(living[living >= 0])
        if block is not None:
            self._blocks.append(block)
        elif upserts is not None:
            self._tail.append(upserts.item_ids, hashes[:num_upserts], upserts.states, categories, attributes)
        self._number, self._digest = self._number + 1, digest
        self._publish()
        updated, removed = int(found[:num_upserts].sum()), int(found[num_upserts:].sum())
        unknown = [item_id for item_id, here in zip(removals, found[num_upserts:].tolist(), strict=True) if not here]
        return Change(
            version=self._version.name,
            added=num_upserts - updated,
            updated=updated,
            removed=removed,
            unknown=tuple(unknown),
        )

    def _categories(
        self, upserts: ItemBatch, in_tail: Sequence[int | None], found_in: Sequence[tuple[Segment, Indices]]
    ) -> list[tuple[int, ...]]:
        if upserts.categories is not None:
            return self._coded(upserts.categories)
        out: list[tuple[int, ...]] = [() if row is None else self._tail.categories(row) for row in in_tail]
        for segment, rows in found_in:
            for number in np.flatnonzero(rows[: len(upserts)] >= 0).tolist():
                out[number] = segment.rows.categories.of_row(int(rows[number]))
        return out[: len(upserts)]

    def _attributes(
        self, upserts: ItemBatch, in_tail: Sequence[int | None], found_in: Sequence[tuple[Segment, Indices]]
    ) -> Columns:
        if upserts.attributes is not None:
            return upserts.attributes.recoded(self._tags)
        out = np.array([encoded({}, self.kinds, {})] * len(upserts), row_type(self.kinds))
        for number, row in enumerate(in_tail[: len(upserts)]):
            if row is not None:
                out[number] = self._tail.attributes(row)
        for segment, rows in found_in:
            here = np.flatnonzero(rows[: len(upserts)] >= 0)
            for name, column in segment.rows.attributes.items():
                out[name][here] = column[rows[here]]
        return {name: out[name] for name in self.kinds}

    def _coded(self, categories: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
        """Give each new name the next code. Codes are never reused."""
        codes = self._codes
        return [tuple({codes.setdefault(name, len(codes)) for name in names}) for names in categories]

    def _seal_tail(self) -> None:
        sealed = self._tail.segment(len(self._tail), len(self._tail.dead))
        if sealed is not None:
            sealed.prepare()
            self._blocks.append(sealed)
        self._blocks = joined_blocks(self._blocks, max(self._frozen, self._num_coded()), self.pair_gate)
        self._tail = Tail(self.shape, self.pair_gate, self.kinds)

    def _searchable(self, segment: Segment) -> Segment:
        """Build the algorithms, and search each once to compute its lazy parts.

        The query is not zero: all items would tie and be scored again in float64.
        """
        segment.prepare()
        segment.indexes = self._build(segment.scorer)
        components = np.full((1, self.shape.num_query_components, self.shape.width), self.shape.width**-0.5, np.float32)
        gate = np.zeros((1, self.shape.num_pairs), dtype=np.float32) if self.shape.gated else None
        for index in segment.indexes.values():
            index.search(QueryStates(components=components, gate=gate), 1)
        return segment

    def _publish(self) -> None:
        main = None if self._main is None else Source(self._main, self._main.num_dead)
        blocks = tuple(Source(block, block.num_dead) for block in self._blocks)
        self._version = Version(
            shape=self.shape,
            codes=self._codes,
            tags=self._tags,
            kinds=self.kinds,
            name=f"{self.model_version}.{self._number}-{self._digest[:8]}",
            number=self._number,
            digest=self._digest,
            main=main,
            blocks=blocks,
            tail=TailView(self._tail, len(self._tail), len(self._tail.dead)),
        )
        # A running merge checks again at its end.
        if not self._building and (self._wants_merge() or self._wants_code()):
            self.merge_wanted.set()

    def _wants_merge(self) -> bool:
        delta = len(self._tail) + sum(len(block) for block in self._blocks)
        dead, share = (0, 0.0) if self._main is None else (self._main.num_dead, MERGE_SHARE * len(self._main))
        # The main segment's dead rows cost memory; the delta's rows slow every search.
        return max(delta, dead) >= MERGE_ROWS and delta + dead >= share

    def _wants_code(self) -> bool:
        coded = self._num_coded()
        loose = len(self._tail) + sum(len(block) for block in self._blocks[coded:])
        return loose >= max(CODED_ROWS, CODED_SHARE * sum(len(block) for block in self._blocks[:coded]))

    def _num_coded(self) -> int:
        return 1 if self._blocks and self._blocks[0].indexes else 0

    def _make_room(self, num_new: int) -> None:
        if self.max_bytes is None or self._bytes_with(num_new) <= self.max_bytes:
            return
        version = self._version
        if (version.main is not None and version.main.num_dead) or any(block.num_dead for block in version.blocks):
            self.merge()

    def _require_room(self, num_new: int) -> None:
        if num_new and self.max_bytes is not None and (needed := self._bytes_with(num_new)) > self.max_bytes:
            raise IndexFullError(
                f"max_bytes={self.max_bytes} but {num_new} more items make {needed}, with the copy that a merge makes"
            )

    def _bytes_with(self, num_new: int) -> int:
        memory = self.memory
        return memory.main + memory.delta + self._bytes_of(num_new) + self._bytes_of(self.num_items + num_new)

    def _bytes_of(self, num_rows: int) -> int:
        main = self._main
        per_row = (
            self.shape.bytes_per_item + _ROW_OVERHEAD + 8 * len(self.kinds) if main is None else main.nbytes / len(main)
        )
        return round(num_rows * per_row)


def _digest(before: str, upserts: ItemBatch | None, removals: Iterable[str]) -> str:
    digest = hashlib.blake2b(before.encode(), digest_size=16)
    if upserts is not None:
        _add_ids(digest, upserts.item_ids)
        digest.update(np.ascontiguousarray(upserts.states.components).data)
        if upserts.states.gate is not None:
            digest.update(np.ascontiguousarray(upserts.states.gate).data)
        if isinstance(upserts.categories, Categories):
            digest.update(np.ascontiguousarray(upserts.categories.lists.offsets, np.int64).data)
            digest.update(upserts.categories.lists.codes.data)
            digest.update(repr(upserts.categories.names).encode())
        else:
            for names in upserts.categories or ():
                digest.update(repr(tuple(names)).encode())
        if upserts.attributes is not None and upserts.attributes.kinds:
            for column in upserts.attributes.columns.values():
                digest.update(np.ascontiguousarray(column).data)
            digest.update(repr(upserts.attributes.tags).encode())
    digest.update(b"removals")
    _add_ids(digest, removals)
    return digest.hexdigest()


def _add_ids(digest: "hashlib.blake2b", item_ids: Iterable[str]) -> None:
    if isinstance(item_ids, ItemIds):
        digest.update(np.ascontiguousarray(item_ids.strings.ends).data)
        digest.update(item_ids.strings.data.data)
        return
    for item_id in item_ids:
        encoded = item_id.encode()
        digest.update(len(encoded).to_bytes(1, "big") + encoded)
