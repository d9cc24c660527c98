"""The gateway's view of the topic `items`. A follower's thread writes it while the event loop reads."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from services.algorithms.item_table.strings import Indices
from services.algorithms.rules.attributes import Values
from services.catalogue.follower import Listener
from services.contracts.topics.items import CatalogueItem
from services.gateway.recommend.popular import KnownItem, PopularItems


class DescribedItems(Listener):
    """Applies the topic `items` to the catalogue; other processes count its unusable records."""

    def __init__(self, popular: PopularItems) -> None:
        self.popular = popular
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
            if item.undeclared:
                self._undeclared[item.item_id] = item.undeclared
            elif item.item_id in self._undeclared:
                del self._undeclared[item.item_id]
            self.popular.describe(
                item.item_id,
                item.categories,
                item.attributes,
                title=item.title,
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
        undeclared = self._undeclared
        return [
            replace(one, item=replace(one.item, undeclared=undeclared.get(one.item.item_id, {})))
            for one in self.popular.known(rows)
        ]

    def item(self, item_id: str) -> KnownItem | None:
        """Return the item, None if unknown."""
        row = self.popular.rows.row(item_id)
        return self.known(np.array([row]))[0] if row >= 0 else None
