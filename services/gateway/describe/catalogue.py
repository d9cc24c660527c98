"""DescribeCatalogue: categories with counts, attributes, and what types of events mean; and the details beside answers.

It reads what the gateway holds anyway for titles and for its fallback. Knows no process.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.domain import ServedModel
from services.gateway.recommend.catalogue import Titles
from services.gateway.recommend.popular import PopularItems
from services.platform.errors import InvalidRequest

DEFAULT_CATEGORIES, MAX_CATEGORIES = 1_000, 10_000


@dataclass(frozen=True, slots=True)
class ItemDetails:
    """Of one item: its title ("": unknown) and categories."""

    title: str
    categories: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueDescription:
    """num_items: withdrawn ones too. categories: names with counts, the largest first, of `num_categories` in all."""

    model: ServedModel
    num_items: int
    num_withdrawn: int
    categories: Sequence[tuple[str, int]]
    num_categories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeCatalogue:
    """The handler; one per version set. `titles`, `popular`: live."""

    titles: Titles
    popular: PopularItems
    model: ServedModel

    async def __call__(self, max_categories: int) -> CatalogueDescription:
        """Raises: InvalidRequest."""
        if max_categories > MAX_CATEGORIES:
            raise InvalidRequest.of("max_categories", max_categories, f"0-{MAX_CATEGORIES}")
        # Counting the codes of a million items takes some 10 ms.
        counts = await asyncio.to_thread(self.popular.category_counts)
        largest = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        return CatalogueDescription(
            model=self.model,
            num_items=len(self.popular),
            num_withdrawn=self.popular.num_withdrawn,
            categories=largest[: max_categories or DEFAULT_CATEGORIES],
            num_categories=len(largest),
        )

    def details(self, item_ids: Sequence[str]) -> list[ItemDetails]:
        """Of each item, as they are known by now."""
        titles, categories = self.titles.of(item_ids), self.popular.categories_of(item_ids)
        return [ItemDetails(title, names) for title, names in zip(titles, categories, strict=True)]
