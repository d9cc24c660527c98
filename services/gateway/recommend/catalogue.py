"""The gateway's view of the topic `items`: titles, and the items of the fallback.

Candidates and reranker apply the same records; this is for answers made without them. A follower's thread calls it
while the event loop reads.
"""

from collections.abc import Iterable, Sequence

from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings
from services.contracts.topics.index_deltas import Batch
from services.contracts.topics.items import CatalogueItem
from services.gateway.recommend.popular import PopularItems


class Titles:
    """Titles by item id: those put after training, and the bundle's columns. Only one thread may call `put`."""

    def __init__(self, item_ids: Iterable[str] = (), titles: Sequence[str] = ()) -> None:
        self._ids = item_ids if isinstance(item_ids, ItemIds) else ItemIds.of(item_ids)
        self._titles, self._described = Strings.of(titles), dict[str, str]()

    def put(self, item_id: str, title: str) -> None:
        """Set the title."""
        row = self._ids.get(item_id, -1)
        if row >= 0 and self._titles[row] == title:
            self._described.pop(item_id, None)
        else:
            self._described[item_id] = title

    def of(self, item_ids: Sequence[str]) -> list[str]:
        """Return each title, "" if unknown."""
        rows = self._ids.find(item_ids)
        known = rows >= 0
        bundled, described = iter(self._titles.take(rows[known])), self._described
        titles = [next(bundled) if is_known else "" for is_known in known.tolist()]
        return [described.get(item_id, title) for item_id, title in zip(item_ids, titles, strict=True)]


class DescribedItems:
    """A listener of `services.catalogue.follower` that follows only `items`.

    titles: the bundle's at first, and live: a later record's title replaces an earlier one's.
    """

    def __init__(self, titles: Titles, popular: PopularItems) -> None:
        self.titles = titles
        self._popular = popular
        popular.knows_withdrawn = False

    def caught_up(self) -> None:
        """The topic was read to its end once."""
        self._popular.knows_withdrawn = True

    def apply(self, batch: Batch, *, is_live: bool) -> bool:
        """Do nothing: the gateway has no item states."""
        return True

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Apply titles, categories, and whether items are served."""
        for item in items:
            if item.title:
                self.titles.put(item.item_id, item.title)
            self._popular.describe(
                item.item_id, item.categories, item.attributes, is_served=item.is_served, written_ms=item.written_ms
            )

    def reset(self) -> None:
        """Do nothing: the gateway has nothing of `index-deltas`."""

    def counted(self, kind: str, records: int) -> None:
        """Do nothing: the processes that serve items count."""
