"""What the topic `items` says, as far as the gateway needs it: titles for people, and what the fallback may answer.

Candidates and reranker apply the same records; this is for answers that come about without them. A follower's thread
calls it while the event loop reads.
"""

from collections.abc import Iterator, Mapping, Sequence

from services.contracts.topics.index_deltas import Batch
from services.contracts.topics.items import CatalogueItem
from services.gateway.recommend.popular import PopularItems


class Titles(Mapping[str, str]):
    """Titles by item id: those that were put since training, and the bundle's. `put` is for one thread."""

    def __init__(self, bundled: Mapping[str, str]) -> None:
        self._bundled, self._described = bundled, dict[str, str]()

    def put(self, item_id: str, title: str) -> None:
        """The title from now on."""
        if self._bundled.get(item_id) == title:
            self._described.pop(item_id, None)
        else:
            self._described[item_id] = title

    def __getitem__(self, item_id: str) -> str:
        title = self._described.get(item_id)
        return self._bundled[item_id] if title is None else title

    def __iter__(self) -> Iterator[str]:
        yield from self._bundled
        yield from (item_id for item_id in list(self._described) if item_id not in self._bundled)

    def __len__(self) -> int:
        return len(self._bundled) + sum(item_id not in self._bundled for item_id in list(self._described))


class DescribedItems:
    """A listener of `services.catalogue.follower` that follows `items` alone.

    `titles` are the bundle's to begin with, and live: a later record's title replaces an earlier one's.
    """

    def __init__(self, titles: Mapping[str, str], popular: PopularItems) -> None:
        self.titles = Titles(titles)
        self._popular = popular
        popular.knows_withdrawn = False

    def caught_up(self) -> None:
        """The topic was read to its end once."""
        self._popular.knows_withdrawn = True

    def apply(self, batch: Batch, *, is_live: bool) -> bool:
        """Item states are none of the gateway's business."""
        return True

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Take titles, categories, and what may be answered."""
        for item in items:
            if item.title:
                self.titles.put(item.item_id, item.title)
            self._popular.describe(
                item.item_id, item.categories, item.attributes, is_served=item.is_served, written_ms=item.written_ms
            )

    def reset(self) -> None:
        """Nothing of `index-deltas` is held."""

    def counted(self, kind: str, records: int) -> None:
        """The processes that serve items count."""
