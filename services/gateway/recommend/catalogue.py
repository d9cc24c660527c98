"""What the topic `items` says, as far as the gateway needs it: titles for people, and what the fallback may answer.

Candidates and reranker apply the same records; this is for answers that come about without them. A follower's thread
calls it while the event loop reads.
"""

from collections.abc import Mapping, Sequence

from services.contracts.topics.index_deltas import Batch
from services.contracts.topics.items import CatalogueItem
from services.gateway.recommend.popular import PopularItems


class DescribedItems:
    """A listener of `services.catalogue.follower` that follows `items` alone.

    `titles` are the bundle's to begin with, and live: a later record's title replaces an earlier one's.
    """

    def __init__(self, titles: Mapping[str, str], popular: PopularItems) -> None:
        self.titles = dict(titles)
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
                self.titles[item.item_id] = item.title
            self._popular.describe(
                item.item_id, item.categories, item.attributes, is_served=item.is_served, written_ms=item.written_ms
            )

    def reset(self) -> None:
        """Nothing of `index-deltas` is held."""

    def counted(self, kind: str, records: int) -> None:
        """The processes that serve items count."""
