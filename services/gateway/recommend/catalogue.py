"""The gateway's view of the topic `items`. A follower's thread writes it while the event loop reads."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Indices, Strings
from services.algorithms.rules.attributes import Values
from services.algorithms.rules.filters import Mask
from services.catalogue.follower import Listener
from services.contracts.topics.items import CatalogueItem
from services.gateway.recommend.popular import KnownItem, PopularItems


class Titles:
    """Titles by item id: the bundle's columns, and later ones. Only one thread may call `put`."""

    def __init__(self, item_ids: Iterable[str] = (), titles: Sequence[str] = ()) -> None:
        self._ids = item_ids if isinstance(item_ids, ItemIds) else ItemIds.of(item_ids)
        self._titles, self._described = Strings.of(titles), dict[str, str]()
        # Whether `_described` has another title, by row.
        self._is_described = np.zeros(len(self._titles), dtype=bool)

    def put(self, item_id: str, title: str) -> None:
        row = self._ids.get(item_id, -1)
        is_bundled = row >= 0 and self._titles[row] == title
        if is_bundled:
            self._described.pop(item_id, None)
        else:
            self._described[item_id] = title
        if row >= 0:
            self._is_described[row] = not is_bundled

    def of(self, item_ids: Sequence[str]) -> list[str]:
        """Return each title, "" if unknown."""
        rows = self._ids.find(item_ids)
        known = rows >= 0
        bundled, described = iter(self._titles.take(rows[known])), self._described
        titles = [next(bundled) if is_known else "" for is_known in known.tolist()]
        return [described.get(item_id, title) for item_id, title in zip(item_ids, titles, strict=True)]

    def starting(self, rows: Indices, prefix: bytes) -> tuple[Mask, Mask]:
        """Return which of m rows have a bundle title that begins with `prefix` (lower case), and which have another
        title: (m,) each.
        """
        others = (rows < 0) | (rows >= len(self._titles))
        others[~others] = self._is_described[rows[~others]]
        passes = np.zeros(len(rows), dtype=bool)
        passes[~others] = self._titles.starting(rows[~others], prefix)
        return passes, others


class DescribedItems(Listener):
    """Applies the topic `items` to titles and popular items; other processes count its unusable records."""

    def __init__(self, titles: Titles, popular: PopularItems) -> None:
        self.titles, self.popular = titles, popular
        popular.knows_withdrawn = False
        # The offset of the last applied record.
        self.applied = -1
        # Attributes that other models declare, and records of watched items, by item.
        self._undeclared: dict[str, Values] = {}
        self._watched: dict[str, list[CatalogueItem]] = {}

    def caught_up(self) -> None:
        """Record that the topic was read to its end."""
        self.popular.knows_withdrawn = True

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Apply titles, categories, attributes, and whether items are served."""
        for item in items:
            if item.title:
                self.titles.put(item.item_id, item.title)
            if item.undeclared:
                self._undeclared[item.item_id] = item.undeclared
            elif item.item_id in self._undeclared:
                del self._undeclared[item.item_id]
            self.popular.describe(
                item.item_id,
                item.categories,
                item.attributes,
                withdrawn=item.withdrawn,
                available=item.available,
                written_ms=item.written_ms,
            )
            if item.item_id in self._watched:
                self._watched[item.item_id].append(item)
        self.applied = max((item.offset for item in items), default=self.applied)

    @contextmanager
    def watch(self, item_ids: Iterable[str]) -> Iterator[dict[str, list[CatalogueItem]]]:
        """Collect the records of these items that are applied meanwhile. Only one watch may run at a time."""
        watched: dict[str, list[CatalogueItem]] = {item_id: [] for item_id in item_ids}
        self._watched = watched
        try:
            yield watched
        finally:
            self._watched = {}

    def known(self, rows: Indices) -> list[KnownItem]:
        """Return the items of m rows of `popular`."""
        found = self.popular.known(rows)
        titles = self.titles.of([one.item.item_id for one in found])
        undeclared = [self._undeclared.get(one.item.item_id, {}) for one in found]
        return [
            replace(one, item=replace(one.item, title=title, undeclared=others))
            for one, title, others in zip(found, titles, undeclared, strict=True)
        ]

    def item(self, item_id: str) -> KnownItem | None:
        """Return the item, None if unknown."""
        row = self.popular.rows.row(item_id)
        return self.known(np.array([row]))[0] if row >= 0 else None

    def starting(self, rows: Indices, prefix: bytes) -> Mask:
        """Return which of m rows have an id or a title that begins with `prefix` (lower case): (m,)."""
        passes, others = self.titles.starting(self.popular.rows.bundled(rows), prefix)
        numbers = np.flatnonzero(others)
        for number, title in zip(numbers, self.titles.of(self.popular.rows.ids_of(rows[numbers])), strict=True):
            passes[number] = title.encode().lower().startswith(prefix)
        return passes | self.popular.rows.ids_starting(rows, prefix)
