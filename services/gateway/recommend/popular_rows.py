"""A table of items: the bundle's columns, and the stream's later changes.

A bundle item's row is its training rank. New items follow in order of arrival.

Letters: n items of the bundle, m requested items.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.file import ByPopularity
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Indices, Strings
from services.algorithms.rules.filters import Mask

# The weight of a training interaction; a stream interaction has weight 1 (decision 057).
TRAINING_COUNTS = 0.03

Rows = npt.NDArray[np.int32]
NegatedCounts = npt.NDArray[np.float64]
# The count times -1, so that the highest sorts first; the row; the id; the bundle's categories.
Entry = tuple[float, int, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """Items with counts in the stream; `total` is the sum of these counts.

    A negative is the sum of the item's stream count and weighted training count, times -1. negatives, rows: by
    descending count. ascending, of_ascending: rows and their negatives, by ascending row. first: the most popular items
    of the whole catalogue. after: where the items behind `first` begin, as a row and as an index in `rows`.
    """

    negatives: NegatedCounts
    rows: Indices
    ascending: Indices
    of_ascending: NegatedCounts
    total: float = 0.0
    first: Sequence[Entry] = ()
    after: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, live: Mapping[int, float], trained: NegatedCounts) -> "StreamCounts":
        """Add the stream's counts `live`, by ascending row, to `trained` (m,), the rows' negatives without stream."""
        rows = np.fromiter(live, np.int64, len(live))
        counts = np.fromiter(live.values(), np.float64, len(live))
        order = np.lexsort((rows, trained - counts))
        negatives = trained - counts
        return cls(negatives[order], rows[order], rows, negatives, float(counts.sum()))

    def places(self, rows: Indices) -> tuple[Mask, Indices]:
        """Return which rows have a count in the stream, and their indices in `ascending`."""
        at = np.searchsorted(self.ascending, rows)
        is_here = np.append(self.ascending, -1)[at] == rows
        return is_here, at[is_here]

    def before(self, negative: float, row: int) -> int:
        """Return how many of `rows` come before an item with this negated count and row."""
        first, last = (int(np.searchsorted(self.negatives, negative, side)) for side in ("left", "right"))
        return first + int(np.searchsorted(self.rows[first:last], row))


class ItemRows:
    """Ids, titles and categories by row. Rows are ordered by training counts."""

    def __init__(
        self,
        item_ids: Iterable[str],
        counts: npt.NDArray[np.int64],
        categories: Sequence[Sequence[str]],
        by_popularity: ByPopularity | None = None,
        titles: Sequence[str] = (),
    ) -> None:
        """titles: () if the bundle has none."""
        self._ids = item_ids if isinstance(item_ids, ItemIds) else ItemIds.of(item_ids)
        self.categories = Categories.of(categories)
        self._codes = {name: code for code, name in enumerate(self.categories.names)}
        by_popularity = by_popularity or ByPopularity.of(self._ids.strings, counts)
        # order: the item index of each row. rank: the row of each item.
        self.order, self.rank = by_popularity.rows, by_popularity.rank
        # By row: categories of new items and of changed bundle items, and which bundle items changed.
        self.described: dict[int, tuple[str, ...]] = {}
        self._is_described = np.zeros(len(self.order), dtype=bool)
        # By item id: titles that differ from the bundle's. By row: which bundle items have such a title.
        self._titles, self._retitled = Strings.of(titles or [""] * len(self._ids)), dict[str, str]()
        self._is_retitled = np.zeros(len(self.order), dtype=bool)
        self._new_ids: list[str] = []
        self._new_rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.order) + len(self._new_ids)

    @property
    def num_trained(self) -> int:
        return len(self.order)

    def row(self, item_id: str) -> int:
        """Return the row, -1 if unknown."""
        bundled: int = self._ids.get(item_id, -1)
        return int(self.rank[bundled]) if bundled >= 0 else self._new_rows.get(item_id, -1)

    def put(self, row: int, item_id: str, names: tuple[str, ...], title: str = "") -> tuple[str, ...]:
        """Set the categories of a row, which may be new; return the old ones. title: "" keeps the known title."""
        is_bundled = row < len(self.order)
        bundled = self.categories[int(self.order[row])] if is_bundled else ()
        before = self.described.get(row, bundled)
        if is_bundled and bundled == names:
            self._is_described[row] = False
            self.described.pop(row, None)
        else:
            self.described[row] = names
            if is_bundled:
                self._is_described[row] = True
        if title:
            is_same = is_bundled and self._titles[int(self.order[row])] == title
            if is_same:
                self._retitled.pop(item_id, None)
            else:
                self._retitled[item_id] = title
            if is_bundled:
                self._is_retitled[row] = not is_same
        if row == len(self):
            self._new_ids.append(item_id)  # after its texts, because other threads read all rows below len(self)
            self._new_rows[item_id] = row
        return before

    def of_categories(self, rows: Indices, wanted: Set[str]) -> Mask:
        """Return which of m rows have one of these categories: (m,)."""
        by_columns = (rows >= 0) & (rows < len(self.order))
        by_columns[by_columns] = ~self._is_described[rows[by_columns]]
        lists, codes = self.categories.lists.take(self.order[rows[by_columns]]), self._codes
        passes = np.zeros(len(rows), dtype=bool)
        passes[by_columns] = lists.having([codes[name] for name in wanted if name in codes], len(codes))
        others = np.flatnonzero(~by_columns)
        for number, names in zip(others.tolist(), self.names_of(rows[others]), strict=True):
            passes[number] = not wanted.isdisjoint(names)
        return passes

    def category_counts(self) -> Counter[str]:
        """Count items per category, while other threads may put items."""
        names = self.categories.names
        counted = np.bincount(self.categories.lists.codes, minlength=len(names))
        counts = Counter(dict(zip(names, counted.tolist(), strict=True)))
        described = dict(self.described)
        rows = np.fromiter(described, np.int64, len(described))
        for before, now in zip(self.bundled_names(rows), described.values(), strict=True):
            counts.subtract(before)
            counts.update(now)
        return +counts

    def rows_of(self, item_ids: Sequence[str]) -> Indices:
        """Return the rows of m items, -1 if unknown: (m,)."""
        rows = self._ids.find(item_ids)
        bundled = rows >= 0
        rows[bundled] = self.rank[rows[bundled]]
        if self._new_rows:
            for number in np.flatnonzero(~bundled).tolist():
                rows[number] = self._new_rows.get(item_ids[number], -1)
        return rows

    def starting(self, rows: Indices, prefix: bytes) -> Mask:
        """Return which of m rows have an id or a title that begins with `prefix` (lower case): (m,)."""
        passes = np.zeros(len(rows), dtype=bool)
        is_bundled = rows < len(self.order)
        passes[is_bundled] = self._ids.strings.starting(self.order[rows[is_bundled]].astype(np.int64), prefix)
        others = ~is_bundled
        others[is_bundled] = self._is_retitled[rows[is_bundled]]
        passes[~others] |= self._titles.starting(self.order[rows[~others]].astype(np.int64), prefix)
        numbers = np.flatnonzero(others)
        item_ids = self.ids_of(rows[numbers])
        for number, *texts in zip(numbers.tolist(), item_ids, self.titles_of(item_ids), strict=True):
            passes[number] |= any(text.encode().lower().startswith(prefix) for text in texts)
        return passes

    def titles_of(self, item_ids: Sequence[str]) -> list[str]:
        """Return the titles of m items, "" if unknown."""
        items, retitled = self._ids.find(item_ids), self._retitled
        known = items >= 0
        bundled = iter(self._titles.take(items[known]))
        titles = [next(bundled) if is_known else "" for is_known in known.tolist()]
        return [retitled.get(item_id, title) for item_id, title in zip(item_ids, titles, strict=True)]

    def ids_of(self, rows: Indices) -> list[str]:
        size, new = len(self.order), self._new_ids
        is_bundled = rows < size
        if is_bundled.all():
            return self._ids.strings.take(self.order[rows])
        bundled = iter(self._ids.strings.take(self.order[rows[is_bundled]]))
        return [next(bundled) if row < size else new[row - size] for row in rows.tolist()]

    def bundled(self, rows: Indices) -> Indices:
        """Return the bundle's item of each of m rows, -1 for a new or unknown one: (m,)."""
        items = np.full(len(rows), -1)
        is_bundled = (rows >= 0) & (rows < len(self.order))
        items[is_bundled] = self.order[rows[is_bundled]]
        return items

    def bundled_names(self, rows: Indices) -> list[tuple[str, ...]]:
        """Return the bundle's categories of each row; none for other rows."""
        return self.categories.of_rows(self.bundled(rows))

    def names_of(self, rows: Indices) -> list[tuple[str, ...]]:
        """Return the categories of each row; none for row -1."""
        names, described = self.bundled_names(rows), self.described
        if not described:
            return names
        return [described.get(row, one) for row, one in zip(rows.tolist(), names, strict=True)]
