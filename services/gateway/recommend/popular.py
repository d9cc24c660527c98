"""Popular items under a request's filter: what people take now, and what training saw.

An item's count is what the stream says of it, faded (`algorithms.items.popularity`), and three hundredths of what
training counted: that orders a catalogue that nobody uses yet, and soon gives way. Also what applies category limits
where the reranker can't.

What the bundle says stays in its columns. Held here are their order, each category's rows, and what the stream says
otherwise. A row is a place in that order; then come items that are new.

Letters: n items of the bundle, m items asked for.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.category_rows import CategoryRows
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.rules.attributes import AttributeColumns, AttributeTable, Values, no_attributes
from services.algorithms.rules.filters import ItemFilter, Mask, passing
from services.gateway.domain import ScoredItem

# What an interaction of training counts beside one of now (docs/decisions/057).
TRAINING_COUNTS = 0.03
# Rows that are looked at together: so many at first, then twice as many each time, up to so many.
_FIRST, _MOST = 16, 512

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Now:
    """Rows that the stream speaks of, each with the negative of its count, highest counts first; and of a category."""

    counts: Sequence[tuple[float, int]] = ()
    by_category: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    by_row: Mapping[int, float] = field(default_factory=dict)
    total: float = 0.0


class _ItemRows:
    """Ids, categories and training's counts by row: of the bundle's columns, and of what the stream said since."""

    def __init__(
        self, item_ids: Iterable[str], counts: npt.NDArray[np.int64], categories: Sequence[Sequence[str]]
    ) -> None:
        self._ids = item_ids if isinstance(item_ids, ItemIds) else ItemIds.of(item_ids)
        self._counts, self.categories = counts, Categories.of(categories)
        self._codes = {name: code for code, name in enumerate(self.categories.names)}
        by_id = self._ids.strings.order()
        # Which of the bundle's items is in each row, and the row of each.
        self.order: Rows = by_id[np.argsort(-counts[by_id], kind="stable")].astype(np.int32)
        self.rank = np.empty_like(self.order)
        self.rank[self.order] = np.arange(len(self.order), dtype=np.int32)
        # By row: categories where they are not the bundle's.
        self._described: dict[int, tuple[str, ...]] = {}
        self._new_ids: list[str] = []
        self._new_rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.order) + len(self._new_ids)

    def row(self, item_id: str) -> int:
        """-1 for an unknown one."""
        bundled: int = self._ids.get(item_id, -1)
        return int(self.rank[bundled]) if bundled >= 0 else self._new_rows.get(item_id, -1)

    def put(self, row: int, item_id: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """The categories of a row from now on, which may be the one behind the last; return what they were."""
        is_bundled = row < len(self.order)
        bundled = self.categories[int(self.order[row])] if is_bundled else ()
        before = self._described.get(row, bundled)
        if is_bundled and bundled == names:
            self._described.pop(row, None)
        else:
            self._described[row] = names
        if row == len(self):
            self._new_ids.append(item_id)  # readers go through these
            self._new_rows[item_id] = row
        return before

    def not_ruled_out(
        self, entries: Sequence[tuple[float, int]], allowed: Set[str], denied: Set[str]
    ) -> list[tuple[float, int]]:
        """Without those that the bundle's categories rule out: most, where few of many rows are wanted."""
        size, described, codes = len(self.order), self._described, self._codes
        known = [number for number, (_, row) in enumerate(entries) if row < size and row not in described]
        lists = self.categories.lists.take(self.order[[entries[number][1] for number in known]])
        passes = ~lists.having([codes[name] for name in denied if name in codes], len(codes))
        if allowed:
            passes &= lists.having([codes[name] for name in allowed if name in codes], len(codes))
        out = {number for number, is_in in zip(known, passes.tolist(), strict=True) if not is_in}
        return [entry for number, entry in enumerate(entries) if number not in out]

    def rows_of(self, item_ids: Sequence[str]) -> list[int]:
        """Of m items, -1 for an unknown one."""
        found = self._ids.find(item_ids)
        bundled = found >= 0
        found[bundled] = self.rank[found[bundled]]
        rows: list[int] = found.tolist()
        new = self._new_rows
        if new and not bundled.all():
            return [row if row >= 0 else new.get(item_id, -1) for item_id, row in zip(item_ids, rows, strict=True)]
        return rows

    def ids_of(self, rows: Sequence[int]) -> list[str]:
        size = len(self.order)
        bundled = iter(self._ids.strings.take(self.order[[row for row in rows if row < size]]))
        return [next(bundled) if row < size else self._new_ids[row - size] for row in rows]

    def names_of(self, rows: Sequence[int]) -> list[tuple[str, ...]]:
        """Categories of each row; none of row -1."""
        size, described = len(self.order), self._described
        bundled = iter(self.categories.of_rows(self.order[[row for row in rows if 0 <= row < size]]))
        names = [next(bundled) if 0 <= row < size else () for row in rows]
        return [described.get(row, one) for row, one in zip(rows, names, strict=True)] if described else names

    def counted(self, rows: Rows | Sequence[int]) -> Iterator[tuple[float, int]]:
        """Rows, which ascend, each with the negative of what training counted of it."""
        start, size = 0, _FIRST
        while len(some := np.asarray(rows[start : start + size], np.int64)):
            counts = np.zeros(len(some))
            bundled = self.order[some[: int(np.searchsorted(some, len(self.order)))]]
            counts[: len(bundled)] = TRAINING_COUNTS * self._counts[bundled]
            yield from zip((-counts).tolist(), some.tolist(), strict=True)
            start, size = start + size, min(2 * size, _MOST)


class PopularItems:
    """The catalogue in order of popularity (ties: as training had them, by item id), then items that are new.

    `knows_withdrawn`: whether what was withdrawn since training is known; whoever follows the topic `items` sets it.
    """

    def __init__(
        self,
        item_ids: Iterable[str],
        counts: npt.NDArray[np.int64],
        categories: Sequence[Sequence[str]],
        attributes: AttributeTable | None = None,
    ) -> None:
        """Of n items; a bundle's columns are not copied. counts (n,): of training."""
        self._rows = _ItemRows(item_ids, counts, categories)
        self._total = -sum(negative for negative, _ in self._rows.counted(range(len(self._rows))))
        self._attributes = AttributeColumns((attributes or no_attributes(len(self._rows))).take(self._rows.order))
        self._by_category = CategoryRows(self._rows.categories, self._rows.rank)
        self.knows_withdrawn = True
        self.withdrawn: set[str] = set()
        # Rows of items that training never saw, and when each was first heard of (Unix milliseconds).
        self._new: list[tuple[int, int]] = []
        self._now = _Now()

    def take(self, counts: Mapping[str, float]) -> None:
        """What items count in the stream now, of those that it speaks of, in the place of what was taken before. Ids
        that neither the bundle nor the catalogue knows are left out. May be called from another thread."""
        rows = self._rows.rows_of(list(counts))
        live = {row: count for row, count in zip(rows, counts.values(), strict=True) if row >= 0}
        by_row = {row: live[row] - negative for negative, row in self._rows.counted(sorted(live))}
        ordered = sorted((-count, row) for row, count in by_row.items())
        by_category: dict[str, list[tuple[float, int]]] = {}
        for entry, names in zip(ordered, self._rows.names_of([row for _, row in ordered]), strict=True):
            for name in names:
                by_category.setdefault(name, []).append(entry)
        self._now = _Now(ordered, by_category, by_row, sum(live.values()))

    def describe(
        self,
        item_id: str,
        categories: Sequence[str],
        attributes: Values = MappingProxyType({}),
        *,
        is_served: bool,
        written_ms: int = 0,
    ) -> None:
        """Take what the catalogue says of an item since training.

        May be called from another thread: what is longer than a flag is replaced or added to, and readers find a new
        item once all of it is there. Its new categories find it at its training's count until the next `take`.
        """
        if not is_served:
            self.withdrawn.add(item_id)
        rows = self._rows
        row = rows.row(item_id)
        is_new, row = row < 0, row if row >= 0 else len(rows)
        self._attributes.put(row, attributes)
        old, new = set(rows.put(row, item_id, tuple(categories))), set(categories)
        if is_new:
            self._new.append((written_ms, row))
        self._by_category.moved(row, old - new, new - old)
        if is_served:
            self.withdrawn.discard(item_id)

    def newest(self, since_ms: int, most: int) -> list[str]:
        """Items that training never saw, first heard of since then and not withdrawn: the newest so many."""
        found: list[str] = []
        for written_ms, row in reversed(self._new):
            if written_ms < since_ms or len(found) == most:
                break
            (item_id,) = self._rows.ids_of([row])
            if item_id not in self.withdrawn:
                found.append(item_id)
        return found

    def top(self, k: int, wanted: ItemFilter, seen: Iterable[str], max_per_category: int) -> list[ScoredItem]:
        """The k most popular items that the filter allows; score is the share of all that is counted."""
        denied = set(wanted.deny_item_ids)
        if wanted.exclude_seen:
            denied.update(seen)
        deny_categories = set(wanted.deny_categories)
        allow_categories = set(wanted.allow_categories)
        now = self._now
        total = (self._total + now.total) or 1.0
        meets = self._attributes.mask(wanted.where) if wanted.where else None
        reads_names = bool(deny_categories or allow_categories or max_per_category)
        items: list[ScoredItem] = []
        taken = Counter[str]()
        entries, size = self._entries(wanted, now), _FIRST
        while len(items) < k and (batch := list(islice(entries, size))):
            size = min(2 * size, _MOST)
            if reads_names:
                full = {name for name, count in taken.items() if count >= max_per_category > 0}
                batch = self._rows.not_ruled_out(batch, allow_categories, deny_categories | full)
            rows = [row for _, row in batch]
            all_names = self._rows.names_of(rows) if reads_names else [()] * len(rows)
            for (negative, row), item_id, names in zip(batch, self._rows.ids_of(rows), all_names, strict=True):
                if item_id in self.withdrawn or item_id in denied or not deny_categories.isdisjoint(names):
                    continue
                if allow_categories and allow_categories.isdisjoint(names):
                    continue
                if meets is not None and not (row < len(meets) and meets[row]):
                    continue
                if max_per_category and any(taken[name] >= max_per_category for name in names):
                    continue
                taken.update(names)
                items.append(ScoredItem(item_id, now.by_row.get(row, -negative) / total, "popular"))
                if len(items) == k:
                    break
        return items

    def categories_of(self, item_ids: Sequence[str]) -> list[tuple[str, ...]]:
        """Of m items; none of an unknown one."""
        return self._rows.names_of(self._rows.rows_of(item_ids))

    def named(self, item_ids: Sequence[str], which: Sequence[ItemFilter]) -> list[Mask]:
        """Of each, which of m items its ids, categories and conditions name: (m,)."""
        rows = self._rows.rows_of(item_ids) if any(one.allow_categories or one.where for one in which) else []
        names = self._rows.names_of(rows) if any(one.allow_categories for one in which) else [()] * len(item_ids)
        masks = []
        for one in which:
            wanted = ItemFilter(allow_item_ids=one.allow_item_ids, allow_categories=one.allow_categories)
            found = passing(wanted, item_ids, names)
            if one.where:
                meets = np.append(self._attributes.mask(one.where), False)
                found &= meets[[row if row < len(meets) else -1 for row in rows]]
            masks.append(found)
        return masks

    def _entries(self, wanted: ItemFilter, now: _Now) -> Iterator[tuple[float, int]]:
        """Rows worth looking at, each with the negative of its count, by count and without repetition."""
        if wanted.allow_item_ids:
            rows = sorted({row for row in self._rows.rows_of(wanted.allow_item_ids) if row >= 0})
            return iter(sorted((-now.by_row.get(row, -negative), row) for negative, row in self._rows.counted(rows)))
        if not wanted.allow_categories:
            everything = range(len(self._rows))
            return _once(heapq.merge(now.counts, self._rows.counted(everything)), now)
        lists: list[Iterable[tuple[float, int]]] = []
        for name in set(wanted.allow_categories):
            bundled, joined = self._by_category.of(name)
            lists += [now.by_category.get(name, ()), self._rows.counted(bundled), self._rows.counted(joined)]
        return _once(heapq.merge(*lists), now)


def _once(entries: Iterable[tuple[float, int]], now: _Now) -> Iterator[tuple[float, int]]:
    """Each row where it comes first, which is at its highest count."""
    found, before = set[int](), -1
    for entry in entries:
        row = entry[1]
        if row == before or row in found:
            continue
        if row in now.by_row:  # it comes again, among those that training counted
            found.add(row)
        before = row
        yield entry
