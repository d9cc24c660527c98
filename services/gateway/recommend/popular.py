"""Popular items under a request's filter: what people take now, and what training saw.

An item's count is what the stream says of it, faded (`algorithms.items.popularity`), and three hundredths of what
training counted: that orders a catalogue that nobody uses yet, and soon gives way. Also what applies category limits
where the reranker can't. Reads the catalogue once; keeps ids, counts and categories.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from services.algorithms.rules.attributes import AttributeColumns, AttributeTable, Values, no_attributes
from services.algorithms.rules.filters import ItemFilter, Mask, passing
from services.gateway.domain import ScoredItem

# What an interaction of training counts beside one of now (docs/decisions/057).
TRAINING_COUNTS = 0.03


@dataclass(frozen=True, slots=True)
class _Now:
    """Rows that the stream speaks of, each with the negative of its count, highest counts first; and of a category."""

    counts: Sequence[tuple[float, int]] = ()
    by_category: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    by_row: Mapping[int, float] = field(default_factory=dict)
    total: float = 0.0


class _CategoryRows:
    """The rows of each category, ascending. Rows that left it stay until they are half of its list: who reads looks at
    each row's own categories. What is longer than a number is replaced or added to, so that others may read."""

    def __init__(self, categories: Sequence[Sequence[str]]) -> None:
        self._categories = categories
        self._rows: dict[str, list[int]] = {}
        self._num_left: Counter[str] = Counter()
        for row, names in enumerate(categories):
            for name in names:
                self._rows.setdefault(name, []).append(row)

    def of(self, name: str) -> Sequence[int]:
        """Every row of the category, and some that were."""
        return self._rows.get(name, ())

    def moved(self, row: int, old: Collection[str], new: Collection[str]) -> None:
        """The row left these categories, and came into those."""
        for name in old:
            self._num_left[name] += 1
            if 2 * self._num_left[name] > len(rows := self._rows[name]):
                self._rows[name] = [other for other in rows if name in self._categories[other]]
                del self._num_left[name]
        for name in new:
            rows = self._rows.setdefault(name, [])
            at = bisect_left(rows, row)
            if rows[at : at + 1] == [row]:
                self._num_left[name] -= 1
            else:
                rows.insert(at, row)


class PopularItems:
    """The catalogue in order of popularity (ties: as training had them, by item id), then items that are new.

    `knows_withdrawn`: whether what was withdrawn since training is known; whoever follows the topic `items` sets it.
    """

    def __init__(
        self,
        item_ids: Sequence[str],
        counts: npt.NDArray[np.int64],
        categories: Sequence[Sequence[str]],
        attributes: AttributeTable | None = None,
    ) -> None:
        order = sorted(range(len(item_ids)), key=lambda index: (-int(counts[index]), item_ids[index]))
        # Row by row: training's items by their counts, then new ones as they are heard of.
        self._item_ids = [item_ids[index] for index in order]
        self._counts = [TRAINING_COUNTS * int(counts[index]) for index in order]
        self._total = sum(self._counts)
        self._categories = [tuple(categories[index]) for index in order]
        self._row = {item_id: row for row, item_id in enumerate(self._item_ids)}
        self._attributes = AttributeColumns((attributes or no_attributes(len(item_ids))).take(order))
        self._by_category = _CategoryRows(self._categories)
        self.knows_withdrawn = True
        # By row: 1 where the catalogue says that the item may not be answered.
        self._is_hidden = bytearray(len(self._item_ids))
        self.withdrawn: set[str] = set()
        # Rows of items that training never saw, and when they were first heard of (Unix milliseconds), oldest first.
        self._new: list[tuple[int, int]] = []
        self._now = _Now()

    def take(self, counts: Mapping[str, float]) -> None:
        """What items count in the stream now, of those that it speaks of, in the place of what was taken before. Ids
        that neither the bundle nor the catalogue knows are left out. May be called from another thread."""
        live = {row: count for id_, count in counts.items() if (row := self._row.get(id_)) is not None}
        by_row = {row: count + self._counts[row] for row, count in live.items()}
        ordered = sorted((-count, row) for row, count in by_row.items())
        by_category: dict[str, list[tuple[float, int]]] = {}
        for entry in ordered:
            for name in self._categories[entry[1]]:
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
        (self.withdrawn.discard if is_served else self.withdrawn.add)(item_id)
        row = self._row.get(item_id, len(self._item_ids))
        self._attributes.put(row, attributes)
        old, new = set[str](), set(categories)
        if row < len(self._item_ids):
            old = set(self._categories[row])
            self._categories[row] = tuple(categories)
            self._is_hidden[row] = not is_served
        else:
            self._counts.append(0.0)
            self._categories.append(tuple(categories))
            self._is_hidden.append(not is_served)
            self._item_ids.append(item_id)  # readers go through these
            self._row[item_id] = row
            self._new.append((written_ms, row))
        self._by_category.moved(row, old - new, new - old)

    def newest(self, since_ms: int, most: int) -> list[str]:
        """Items that training never saw, first heard of since then and not withdrawn: the newest so many."""
        found: list[str] = []
        for written_ms, row in reversed(self._new):
            if written_ms < since_ms or len(found) == most:
                break
            if not self._is_hidden[row]:
                found.append(self._item_ids[row])
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
        items: list[ScoredItem] = []
        taken = Counter[str]()
        for row in self._rows(wanted, now):
            names = self._categories[row]
            if self._is_hidden[row] or self._item_ids[row] in denied or not deny_categories.isdisjoint(names):
                continue
            if allow_categories and allow_categories.isdisjoint(names):
                continue
            if meets is not None and not (row < len(meets) and meets[row]):
                continue
            if max_per_category and any(taken[name] >= max_per_category for name in names):
                continue
            taken.update(names)
            share = now.by_row.get(row, self._counts[row]) / total
            items.append(ScoredItem(self._item_ids[row], share, "popular"))
            if len(items) == k:
                break
        return items

    def categories_of(self, item_id: str) -> Sequence[str]:
        row = self._row.get(item_id)
        return () if row is None else self._categories[row]

    def named(self, which: ItemFilter, item_ids: Sequence[str]) -> Mask:
        """Which of n items the ids, categories and conditions name: (n,)."""
        wanted = ItemFilter(allow_item_ids=which.allow_item_ids, allow_categories=which.allow_categories)
        found = passing(wanted, item_ids, [self.categories_of(item_id) for item_id in item_ids])
        if which.where:
            meets = np.append(self._attributes.mask(which.where), False)
            found &= meets[[min(self._row.get(item_id, len(meets)), len(meets) - 1) for item_id in item_ids]]
        return found

    def _rows(self, wanted: ItemFilter, now: _Now) -> Iterator[int]:
        """Rows worth looking at, by count and without repetition."""
        if wanted.allow_item_ids:
            rows = {self._row[item_id] for item_id in wanted.allow_item_ids if item_id in self._row}
            return iter(sorted(rows, key=lambda row: (-now.by_row.get(row, self._counts[row]), row)))
        if wanted.allow_categories:
            names = set(wanted.allow_categories)
            lists = [iter(now.by_category.get(name, ())) for name in names]
            lists += [self._counted(self._by_category.of(name)) for name in names]
            return _once(heapq.merge(*lists), now)
        return _once(heapq.merge(now.counts, self._counted(range(len(self._item_ids)))), now)

    def _counted(self, rows: Iterable[int]) -> Iterator[tuple[float, int]]:
        """Rows in their order, with what training counted of them."""
        return ((-self._counts[row], row) for row in rows)


def _once(entries: Iterable[tuple[float, int]], now: _Now) -> Iterator[int]:
    """Each row where it comes first, which is at its highest count."""
    found, before = set[int](), -1
    for _, row in entries:
        if row == before or row in found:
            continue
        if row in now.by_row:  # it comes again, among those that training counted
            found.add(row)
        before = row
        yield row
