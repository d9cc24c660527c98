"""The gateway's view of the topic `items`: titles, and the items of the fallback.

A follower's thread writes it while the event loop reads.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Indices, Strings
from services.algorithms.rules.attributes import Values
from services.algorithms.rules.filters import Mask
from services.contracts.topics.index_deltas import Batch
from services.contracts.topics.items import CatalogueItem
from services.gateway.recommend.popular import KnownItem, PopularItems


class Titles:
    """Titles by item id: those put after training, and the bundle's columns. Only one thread may call `put`."""

    def __init__(self, item_ids: Iterable[str] = (), titles: Sequence[str] = ()) -> None:
        self._ids = item_ids if isinstance(item_ids, ItemIds) else ItemIds.of(item_ids)
        self._titles, self._described = Strings.of(titles), dict[str, str]()
        # By row: whether `_described` has another title.
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


class DescribedItems:
    """A listener of `services.catalogue.follower` that follows only `items`.

    titles: the bundle's at first; a record's title replaces the earlier one.
    """

    def __init__(self, titles: Titles, popular: PopularItems) -> None:
        self.titles, self.popular = titles, popular
        popular.knows_withdrawn = False
        # By item: attributes that other models declare; records of watched items.
        self.applied = -1
        self._undeclared: dict[str, Values] = {}
        self._watched: dict[str, list[CatalogueItem]] = {}

    def caught_up(self) -> None:
        """Record that the topic was read to its end once."""
        self.popular.knows_withdrawn = True

    def apply(self, batch: Batch, *, is_live: bool) -> bool:
        """Do nothing: the gateway has no item states."""
        return True

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
        """Collect the records of these items that are applied meanwhile. One watch at a time."""
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
        """Return one item, None for an unknown one."""
        row = self.popular.row(item_id)
        return self.known(np.array([row]))[0] if row >= 0 else None

    def starting(self, rows: Indices, prefix: bytes) -> Mask:
        """Return which of m rows have an id or a title that begins with `prefix` (lower case): (m,)."""
        passes, others = self.titles.starting(self.popular.bundled(rows), prefix)
        numbers = np.flatnonzero(others)
        for number, title in zip(numbers, self.titles.of(self.popular.ids_of(rows[numbers])), strict=True):
            passes[number] = title.encode().lower().startswith(prefix)
        return passes | self.popular.ids_starting(rows, prefix)

    def reset(self) -> None:
        """Do nothing: the gateway does not apply `index-deltas`."""

    def counted(self, kind: str, records: int) -> None:
        """Do nothing: the processes that serve items count the records."""
