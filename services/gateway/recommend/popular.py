"""Popular items under a request's filter.

An item's count is its faded stream count (`algorithms.items.popularity`) plus 0.03 times its training count. Most
answers have the same few items, which stay decoded; others are filtered by columns (`popular_rows.py`).

Letters: n items of the bundle, m requested items.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import compress

import numpy as np
import numpy.typing as npt

from services.algorithms.item_table.attributes import AttributeRows, AttributeTable, no_attributes
from services.algorithms.item_table.categories import CategoryRows
from services.algorithms.item_table.file import ByPopularity
from services.algorithms.item_table.strings import Indices
from services.algorithms.rules.attributes import Condition, Values
from services.algorithms.rules.filters import ItemFilter, ListedItems, Mask, passing
from services.catalogue.follower import Listener
from services.contracts.topics.items import CatalogueItem
from services.gateway.domain import ScoredItem
from services.gateway.recommend.popular_rows import TRAINING_COUNTS, Entry, ItemRows, NegatedCounts, StreamCounts

# The first `_FIRST` items stay decoded; later rows are filtered in chunks that double up to `_MOST`.
_FIRST, _MOST = 256, 4096
_DECODED = 512  # most rows decoded at a time
_WARNINGS, _NEAR, _COMPARED = 3, 3, 500
_WITHDRAWN, _UNAVAILABLE = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownItem:
    """An item. is_trained: the bundle has it. first_seen_ms: when an item outside the bundle was first described."""

    item: CatalogueItem
    is_trained: bool
    first_seen_ms: int | None


class PopularItems(Listener):
    """The catalogue by popularity: a bundle's, with the changes of the topic `items`. A follower's thread writes it
    while the event loop reads; other processes count unusable records.

    knows_withdrawn: whether the topic was read to its end.
    """

    def __init__(
        self,
        item_ids: Iterable[str],
        counts: npt.NDArray[np.int64],
        categories: Sequence[Sequence[str]],
        attributes: AttributeTable | None = None,
        by_popularity: ByPopularity | None = None,
        titles: Sequence[str] = (),
    ) -> None:
        """Take a bundle's columns without copying them. counts (n,): each item's count in training. by_popularity: the
        order by count, if known. titles: () if the bundle has none.
        """
        self.rows = ItemRows(item_ids, counts, categories, by_popularity, titles)
        self._counts, self._total = counts, TRAINING_COUNTS * int(counts.sum())
        self._attributes = AttributeRows(attributes or no_attributes(len(self.rows)), self.rows.order)
        self._by_category = CategoryRows(self.rows.categories, self.rows.rank)
        self.knows_withdrawn = False
        # The offset of the last applied record.
        self.applied = -1
        # Attributes that other models declare, and records of watched items, by item.
        self._undeclared: dict[str, Values] = {}
        self._watched: dict[str, list[CatalogueItem]] = {}
        # By row of an item that no answer may contain: the sum of _WITHDRAWN and _UNAVAILABLE.
        self._withheld: dict[int, int] = {}
        # The first description (Unix milliseconds) and the row of each item that the bundle lacks.
        self._new: list[tuple[int, int]] = []
        self.take({})

    def take(self, counts: Mapping[str, float]) -> None:
        """Replace the stream's counts, from any thread. Unknown ids are ignored."""
        rows = self.rows.rows_of(list(counts)).tolist()
        live = dict(sorted((row, count) for row, count in zip(rows, counts.values(), strict=True) if row >= 0))
        now = StreamCounts.of(live, self._negatives(np.fromiter(live, np.int64, len(live))))
        negatives, some = next(self._behind(now, frozenset()), (np.zeros(0), np.zeros(0, np.int64)))
        negatives, some = negatives[:_FIRST], some[:_FIRST]
        is_live, _ = now.places(some)
        after = int(some[~is_live].max(initial=-1)) + 1, int(is_live.sum())
        first = zip(
            negatives.tolist(), some.tolist(), self.rows.ids_of(some), self.rows.bundled_names(some), strict=True
        )
        self._now = replace(now, first=list(first), after=after)

    def caught_up(self) -> None:
        """Record that the topic `items` was read to its end."""
        self.knows_withdrawn = True

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Apply items' descriptions, from any thread: readers see a new item when it is complete. Under new categories,
        an item has its training count until the next `take`. An empty title leaves the known one.
        """
        for item in items:
            self._put(item)
            if item.item_id in self._watched:
                self._watched[item.item_id].append(item)
        self.applied = max((item.offset for item in items), default=self.applied)

    def _put(self, item: CatalogueItem) -> None:
        rows, item_id = self.rows, item.item_id
        row = rows.row(item_id)
        is_new, row = row < 0, row if row >= 0 else len(rows)
        withheld = _WITHDRAWN * item.withdrawn + _UNAVAILABLE * (not item.available)
        if withheld:
            self._withheld[row] = withheld
        self._attributes.put(row, item.attributes)
        if item.undeclared:
            self._undeclared[item_id] = item.undeclared
        else:
            self._undeclared.pop(item_id, None)
        new = set(item.categories)
        old = set(rows.put(row, item_id, tuple(item.categories), item.title))
        if is_new:
            self._new.append((item.written_ms, row))
        self._by_category.moved(row, old - new, new - old)
        if not withheld:
            self._withheld.pop(row, None)

    @contextmanager
    def watch(self, item_ids: Iterable[str]) -> Iterator[dict[str, list[CatalogueItem]]]:
        """Collect the records of these items that are applied meanwhile. Only one watch may run at a time."""
        watched: dict[str, list[CatalogueItem]] = {item_id: [] for item_id in item_ids}
        self._watched = watched
        try:
            yield watched
        finally:
            self._watched = {}

    def newest(self, since_ms: int, most: int) -> list[str]:
        """Return items that the bundle lacks and that were first described since `since_ms`, newest first."""
        found: list[str] = []
        for written_ms, row in reversed(self._new):
            if written_ms < since_ms or len(found) == most:
                break
            if row not in self._withheld:
                found += self.rows.ids_of(np.array([row]))
        return found

    def rows_in(self, category: str) -> Indices:
        """Return the rows of a category, or of all items for "", ascending."""
        if not category:
            return np.arange(len(self.rows))
        rows = np.unique(np.concatenate([np.asarray(part, np.int64) for part in self._by_category.of(category)]))
        return rows[self.rows.of_categories(rows, {category})]

    def known(self, rows: Indices) -> list[KnownItem]:
        """Return the items of m rows."""
        found = []
        item_ids = self.rows.ids_of(rows)
        texts = item_ids, self.rows.titles_of(item_ids), self.rows.names_of(rows)
        for row, item_id, title, categories in zip(rows.tolist(), *texts, strict=True):
            withheld, number = self._withheld.get(row, 0), row - self.rows.num_trained
            item = CatalogueItem(
                item_id=item_id,
                title=title,
                categories=categories,
                attributes=self._attributes.of_row(row),
                undeclared=self._undeclared.get(item_id, {}),
                withdrawn=bool(withheld & _WITHDRAWN),
                available=not withheld & _UNAVAILABLE,
            )
            first_seen_ms = self._new[number][0] if 0 <= number < len(self._new) else None
            found.append(KnownItem(item=item, is_trained=number < 0, first_seen_ms=first_seen_ms))
        return found

    def item(self, item_id: str) -> KnownItem | None:
        """Return the item, None if unknown."""
        row = self.rows.row(item_id)
        return self.known(np.array([row]))[0] if row >= 0 else None

    @property
    def num_withdrawn(self) -> int:
        return len(self._withheld)

    def are_withdrawn(self, item_ids: Sequence[str]) -> list[bool]:
        """Return whether each of m items is withdrawn or unavailable; False if unknown."""
        return [row in self._withheld for row in self.rows.rows_of(item_ids).tolist()]

    def top(self, k: int, wanted: ItemFilter, seen: Iterable[str], max_per_category: int) -> list[ScoredItem]:
        """Return the k most popular allowed items. Scores are shares of all counts."""
        now = self._now
        denied = frozenset([*wanted.deny_item_ids, *(seen if wanted.exclude_seen else ())])
        choice = _Choice(k, denied, self._withheld, max_per_category, (self._total + now.total) or 1.0)
        if wanted.allow_item_ids:
            chunks = iter([self._asked(wanted.allow_item_ids, now)])
        else:
            choice.take(self._first(wanted, now))
            chunks = self._behind(now, frozenset(wanted.allow_categories))
        while not choice.is_made and (chunk := next(chunks, None)) is not None:
            # `choice` checks ids.
            by_columns = replace(wanted, allow_item_ids=(), deny_item_ids=(), exclude_seen=False)
            self._take(choice, by_columns, *chunk)
        return choice.items

    def __len__(self) -> int:
        return len(self.rows)

    def categories_of(self, item_ids: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the categories of m items, () for an unknown one."""
        return self.rows.names_of(self.rows.rows_of(item_ids))

    def titles_of(self, item_ids: Sequence[str]) -> list[str]:
        """Return the titles of m items, "" if unknown."""
        return self.rows.titles_of(item_ids)

    def warnings(self, wanted: ItemFilter) -> list[str]:
        """Return warnings for the filter's first categories without items; none before all items are known."""
        found: list[str] = []
        for field in ("allow_categories", "deny_categories") if self.knows_withdrawn else ():
            for position, name in enumerate(getattr(wanted, field)):
                if self._by_category.has(name):
                    continue
                if len(found) == _WARNINGS:
                    return found
                near = near_names(name, self._by_category.names())
                found.append(f"filter.{field}[{position}]={name!r}: no item has it; near: {', '.join(near) or 'none'}")
        return found

    def named(self, item_ids: Sequence[str], which: Sequence[ItemFilter]) -> list[Mask]:
        """Return, for each filter, which of m items match: (m,)."""
        rows = self.rows.rows_of(item_ids)
        return [passing(one, _Rows(self.rows, self._attributes, rows, item_ids)) for one in which]

    def _first(self, wanted: ItemFilter, now: StreamCounts) -> Iterable[Entry]:
        """Filter as `passing` does, but item by item, since most answers need only a few."""
        first: Iterable[Entry] = now.first
        if wanted.where:
            rows = np.fromiter((row for _, row, _, _ in now.first), np.int64, len(now.first))
            first = compress(first, self._attributes.mask(wanted.where, rows).tolist())
        if described := self.rows.described:
            first = ((negative, row, item_id, described.get(row, names)) for negative, row, item_id, names in first)
        if allowed := frozenset(wanted.allow_categories):
            first = (one for one in first if not allowed.isdisjoint(one[3]))
        if denied := frozenset(wanted.deny_categories):
            first = (one for one in first if denied.isdisjoint(one[3]))
        return first

    def _take(self, choice: "_Choice", wanted: ItemFilter, negatives: NegatedCounts, rows: Indices) -> None:
        """Filter by columns, then decode a few rows at a time."""
        if not wanted.is_open:
            passes = passing(wanted, _Rows(self.rows, self._attributes, rows))
            negatives, rows = negatives[passes], rows[passes]
        size, full = choice.k + 16, 0
        while len(rows) and not choice.is_made:
            if full < len(choice.full):
                full = len(choice.full)
                passes = ~self.rows.of_categories(rows, choice.full)
                negatives, rows = negatives[passes], rows[passes]
            some, size = slice(min(size, _DECODED)), 2 * size
            names = self.rows.names_of(rows[some]) if choice.limit else [()] * len(rows[some])
            item_ids = self.rows.ids_of(rows[some])
            choice.take(zip(negatives[some].tolist(), rows[some].tolist(), item_ids, names, strict=True))
            negatives, rows = negatives[some.stop :], rows[some.stop :]

    def _asked(self, item_ids: Sequence[str], now: StreamCounts) -> tuple[NegatedCounts, Indices]:
        rows = np.unique(self.rows.rows_of(item_ids))
        rows = rows[rows >= 0]
        negatives = self._negatives(rows)
        is_live, at = now.places(rows)
        negatives[is_live] = now.of_ascending[at]
        return _by_count(negatives, rows)

    def _behind(self, now: StreamCounts, allowed: Set[str]) -> Iterator[tuple[NegatedCounts, Indices]]:
        """Yield the rows after the first items, by count. Rows without a stream count are only those of the
        `allowed` categories (empty: all).
        """
        start, at = now.after
        for some in self._trained(allowed, start):
            rows = some[~now.places(some)[0]] if len(now.rows) else some
            if not len(rows):
                continue
            negatives = self._negatives(rows)
            end = now.before(negatives[-1], rows[-1])
            if end > at:
                negatives = np.concatenate([negatives, now.negatives[at:end]])
                negatives, rows = _by_count(negatives, np.concatenate([rows, now.rows[at:end]]))
                at = end
            yield negatives, rows
        if at < len(now.rows):
            yield now.negatives[at:], now.rows[at:]

    def _trained(self, allowed: Set[str], start: int) -> Iterator[Indices]:
        """Yield the rows of the `allowed` categories (empty: all), ascending, in chunks."""
        size, lists = _FIRST, [part for name in allowed for part in self._by_category.of(name)]
        if not allowed:
            while start < (length := len(self.rows)):
                end, size = min(start + size, length), min(2 * size, _MOST)
                yield np.arange(start, end)
                start = end
            return
        is_last, size = False, max(1, _FIRST // len(lists))
        while not is_last:
            # A chunk ends at a row, since writes shift indices into lists, but not rows.
            firsts = [bisect_left(one, start) for one in lists]
            ends = [one[first + size] for one, first in zip(lists, firsts, strict=True) if first + size < len(one)]
            is_last, end, size = not ends, min(ends, default=len(self.rows)), min(2 * size, _MOST)
            parts = [one[first : bisect_left(one, end)] for one, first in zip(lists, firsts, strict=True)]
            yield np.unique(np.concatenate([np.asarray(part, np.int64) for part in parts]))
            start = end

    def _negatives(self, rows: Indices) -> NegatedCounts:
        """Return each row's training count times -TRAINING_COUNTS, 0 for a new item: (m,)."""
        counts = np.zeros(len(rows))
        is_bundled = rows < self.rows.num_trained
        counts[is_bundled] = -TRAINING_COUNTS * self._counts[self.rows.order[rows[is_bundled]]]
        return counts


@dataclass(frozen=True, slots=True)
class _Rows:
    """m rows to filter (`rules.filters.Filterable`)."""

    items: ItemRows
    attributes: AttributeRows
    rows: Indices
    item_ids: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def named(self, item_ids: Sequence[str]) -> Mask:
        return ListedItems(self.item_ids).named(item_ids)

    def of_categories(self, names: Sequence[str]) -> Mask:
        return self.items.of_categories(self.rows, frozenset(names))

    def meeting(self, where: Sequence[Condition]) -> Mask:
        return self.attributes.mask(where, self.rows)


class _Choice:
    """The chosen items. withheld: rows to omit. limit: most per category; 0: no limit. total: sum of all counts."""

    def __init__(self, k: int, denied: Set[str], withheld: Container[int], limit: int, total: float) -> None:
        self.k, self.limit, self._denied, self._withheld, self._total = k, limit, denied, withheld, total
        self._taken = Counter[str]()
        self.full: set[str] = set()
        self.items: list[ScoredItem] = []

    @property
    def is_made(self) -> bool:
        return len(self.items) >= self.k

    def take(self, entries: Iterable[Entry]) -> None:
        for negative, row, item_id, names in entries:
            if row in self._withheld or item_id in self._denied:
                continue
            if self.limit:
                if not self.full.isdisjoint(names):
                    continue
                self._taken.update(names)
                self.full.update(name for name in names if self._taken[name] >= self.limit)
            self.items.append(ScoredItem(item_id, -negative / self._total, "popular"))
            if len(self.items) == self.k:
                return


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names that are most similar, ignoring case."""
    folded = {one.casefold(): one for one in known[:_COMPARED]}
    return [folded[one] for one in get_close_matches(name.casefold(), folded, _NEAR)]


def _by_count(negatives: NegatedCounts, rows: Indices) -> tuple[NegatedCounts, Indices]:
    order = np.lexsort((rows, negatives))
    return negatives[order], rows[order]
