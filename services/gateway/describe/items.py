"""DescribeCatalogue, GetItem and ListItems, and details of an answer's items.

A page of ListItems examines a limited number of items, so a rare prefix may need several pages.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.contracts.topics.items import MAX_CATEGORY_BYTES, MAX_TITLE_BYTES
from services.gateway.domain import ServedModel
from services.gateway.ports import ItemProgress, Refreshers
from services.gateway.recommend.popular import KnownItem, PopularItems
from services.platform.errors import InvalidRequest, NotFound
from services.platform.validation import validate_id, validate_text

DEFAULT_CATEGORIES, MAX_CATEGORIES = 1_000, 10_000


@dataclass(frozen=True, slots=True)
class ItemDetails:
    """One item: its title ("": unknown) and categories."""

    title: str
    categories: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueDescription:
    """The catalogue, including withdrawn items. categories: the largest, with counts; `num_categories` counts all."""

    model: ServedModel
    num_items: int
    num_withdrawn: int
    categories: Sequence[tuple[str, int]]
    num_categories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeCatalogue:
    """DescribeCatalogue."""

    items: PopularItems
    model: ServedModel

    async def __call__(self, max_categories: int) -> CatalogueDescription:
        """Describe the catalogue. Raises: InvalidRequest."""
        if max_categories > MAX_CATEGORIES:
            raise InvalidRequest.of("max_categories", max_categories, f"0-{MAX_CATEGORIES}")
        # Counting the codes of a million items takes some 10 ms.
        counts = await asyncio.to_thread(self.items.rows.category_counts)
        largest = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        return CatalogueDescription(
            model=self.model,
            num_items=len(self.items),
            num_withdrawn=self.items.num_withdrawn,
            categories=largest[: max_categories or DEFAULT_CATEGORIES],
            num_categories=len(largest),
        )

    def details(self, item_ids: Sequence[str]) -> list[ItemDetails]:
        titles, categories = self.items.titles_of(item_ids), self.items.categories_of(item_ids)
        return [ItemDetails(title, names) for title, names in zip(titles, categories, strict=True)]


DEFAULT_PAGE, MAX_PAGE = 50, 1_000
MAX_LOOKED, _AT_ONCE = 100_000, 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemReport:
    """An item. progress: None if the item's refresher did not answer."""

    known: KnownItem
    progress: ItemProgress | None
    model_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetItem:
    """GetItem."""

    items: PopularItems
    refreshers: Refreshers
    model: ServedModel
    timeout_s: float = 0.5

    async def __call__(self, item_id: str) -> ItemReport:
        """Describe an item. Raises: InvalidRequest, NotFound."""
        validate_id("item_id", item_id)
        known = self.items.item(item_id)
        if known is None:
            raise NotFound(f"the catalogue has no item {item_id!r}")
        answers, all_answered = await self.refreshers.item(item_id, self.timeout_s)
        progress = max(answers, key=lambda one: one.num_interactions, default=None)
        if progress is not None and not (all_answered or progress.num_interactions):
            progress = None
        return ItemReport(known=known, progress=progress, model_version=self.model.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsQuery:
    """Fields as in `ListItemsRequest`."""

    prefix: str = ""
    category: str = ""
    newest_first: bool = False
    page_size: int = 0
    page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListItems:
    """ListItems."""

    items: PopularItems
    model: ServedModel

    async def __call__(self, query: ItemsQuery) -> tuple[Sequence[KnownItem], str]:
        """Return a page's items and the next page's token ("": the last page). Raises: InvalidRequest."""
        validate_text("prefix", query.prefix, 0, MAX_TITLE_BYTES)
        validate_text("category", query.category, 0, MAX_CATEGORY_BYTES)
        if query.page_size > MAX_PAGE:
            raise InvalidRequest.of("page_size", query.page_size, f"0-{MAX_PAGE}")
        return await asyncio.to_thread(self._page, query, self._start(query.page_token))

    def _start(self, token: str) -> int | None:
        """Return the page's first key. Keys are valid for one model."""
        key, _, model = token.partition("@")
        if not token:
            return None
        if model != self.model.version or len(key) > 12 or not key.removeprefix("-").isdecimal():
            raise InvalidRequest.of(
                "page_token", token[:64], "that of a page of this model, or empty for the first one"
            )
        return int(key)

    def _page(self, query: ItemsQuery, start: int | None) -> tuple[Sequence[KnownItem], str]:
        popular, prefix = self.items, query.prefix.encode().lower()
        keys = popular.rows_in(query.category)
        if query.newest_first:
            # New items have negative keys; the newest has the smallest.
            keys = np.sort(np.where(keys >= popular.rows.num_trained, -keys, keys))
        first = 0 if start is None else int(np.searchsorted(keys, start))
        size, last = query.page_size or DEFAULT_PAGE, min(first + MAX_LOOKED, len(keys))
        found: list[int] = []
        while first < last and len(found) < size:
            rows = np.abs(keys[first : min(first + _AT_ONCE, last)])
            passes = popular.rows.starting(rows, prefix) if prefix else np.ones(len(rows), dtype=bool)
            hits = np.flatnonzero(passes)[: size - len(found)]
            found += rows[hits].tolist()
            # A full page ends behind its last item.
            first += int(hits[-1]) + 1 if len(found) == size else len(rows)
        items = popular.known(np.array(found, np.int64))
        return items, f"{keys[first]}@{self.model.version}" if first < len(keys) else ""
