"""DescribeCatalogue, and details of an answer's items."""

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
    """One item: its title ("": unknown) and categories."""

    title: str
    categories: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueDescription:
    """The catalogue, with withdrawn items. categories: the largest of `num_categories`, with counts."""

    model: ServedModel
    num_items: int
    num_withdrawn: int
    categories: Sequence[tuple[str, int]]
    num_categories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeCatalogue:
    """DescribeCatalogue."""

    titles: Titles
    popular: PopularItems
    model: ServedModel

    async def __call__(self, max_categories: int) -> CatalogueDescription:
        """Describe the catalogue. Raises: InvalidRequest."""
        if max_categories > MAX_CATEGORIES:
            raise InvalidRequest.of("max_categories", max_categories, f"0-{MAX_CATEGORIES}")
        # Counting the codes of a million items takes some 10 ms.
        counts = await asyncio.to_thread(self.popular.rows.category_counts)
        largest = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        return CatalogueDescription(
            model=self.model,
            num_items=len(self.popular),
            num_withdrawn=self.popular.num_withdrawn,
            categories=largest[: max_categories or DEFAULT_CATEGORIES],
            num_categories=len(largest),
        )

    def details(self, item_ids: Sequence[str]) -> list[ItemDetails]:
        titles, categories = self.titles.of(item_ids), self.popular.categories_of(item_ids)
        return [ItemDetails(title, names) for title, names in zip(titles, categories, strict=True)]
