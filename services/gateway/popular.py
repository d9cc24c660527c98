"""The popular fallback: items by how often training saw them, under the request's filter.

Also what applies category limits where the reranker can't. Reads the catalogue once; keeps ids, ranks and categories.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from services.algorithms.attributes import AttributeColumns, AttributeTable, Values, no_attributes
from services.gateway.domain import Filter, ScoredItem


class PopularItems:
    """The catalogue in order of popularity (ties by item id).

    `knows_withdrawn`: whether what was withdrawn since training is known; whoever follows the topic `items` sets it.
    """

    def __init__(
        self,
        item_ids: Sequence[str],
        counts: npt.NDArray[np.int64],
        categories: Sequence[Sequence[str]],
        attributes: AttributeTable | None = None,
    ) -> None:
        order = sorted(range(len(item_ids)), key=lambda index: (-int(counts[index]), item_ids[index]))
        total = max(1, int(counts.sum()))
        self._item_ids = [item_ids[index] for index in order]
        self._shares = [int(counts[index]) / total for index in order]
        self._categories = [tuple(categories[index]) for index in order]
        self._rank = {item_id: rank for rank, item_id in enumerate(self._item_ids)}
        self._attributes = AttributeColumns((attributes or no_attributes(len(item_ids))).take(order))
        self._by_category: dict[str, list[int]] = {}
        for rank, names in enumerate(self._categories):
            for name in names:
                self._by_category.setdefault(name, []).append(rank)
        self.knows_withdrawn = True
        # By rank: 1 where the catalogue says that the item may not be answered.
        self._is_hidden = bytearray(len(self._item_ids))
        # Of any item, new ones too.
        self.withdrawn: set[str] = set()
        # Items that training never saw, and when they were first heard of (Unix milliseconds), oldest first.
        self._new: list[tuple[int, str]] = []
        self._known_new: set[str] = set()

    def describe(
        self,
        item_id: str,
        categories: Sequence[str],
        attributes: Values = MappingProxyType({}),
        *,
        is_served: bool,
        written_ms: int = 0,
    ) -> None:
        """Take what the catalogue says of an item since training; items that training never saw are none of these.

        May be called from another thread: one flag is set, and whatever is longer is replaced, not changed.
        """
        (self.withdrawn.discard if is_served else self.withdrawn.add)(item_id)
        rank = self._rank.get(item_id)
        if rank is None:
            if item_id not in self._known_new:
                self._known_new.add(item_id)
                self._new.append((written_ms, item_id))
            return
        self._is_hidden[rank] = not is_served
        old, new = set(self._categories[rank]), set(categories)
        for name in old - new:
            self._by_category[name] = [other for other in self._by_category[name] if other != rank]
        for name in new - old:
            self._by_category[name] = sorted([*self._by_category.get(name, ()), rank])
        self._categories[rank] = tuple(categories)
        self._attributes.put(rank, attributes)

    def newest(self, since_ms: int, most: int) -> list[str]:
        """Items that training never saw, first heard of since then and not withdrawn: the newest so many."""
        found: list[str] = []
        for written_ms, item_id in reversed(self._new):
            if written_ms < since_ms or len(found) == most:
                break
            if item_id not in self.withdrawn:
                found.append(item_id)
        return found

    def top(self, k: int, wanted: Filter, seen: Iterable[str], max_per_category: int) -> list[ScoredItem]:
        """The k most popular items that the filter allows; score is the share of all training interactions."""
        denied = set(wanted.deny_item_ids)
        if wanted.exclude_seen:
            denied.update(seen)
        deny_categories = set(wanted.deny_categories)
        allow_categories = set(wanted.allow_categories)
        by_id = bool(wanted.allow_item_ids)
        items: list[ScoredItem] = []
        room = _CategoryRoom(max_per_category)
        for rank in self._ranks(wanted):
            names = self._categories[rank]
            if self._is_hidden[rank] or self._item_ids[rank] in denied or not deny_categories.isdisjoint(names):
                continue
            if by_id and allow_categories and allow_categories.isdisjoint(names):
                continue
            if room.take(names):
                items.append(ScoredItem(self._item_ids[rank], self._shares[rank], "popular"))
                if len(items) == k:
                    break
        return items

    def limit_categories(self, item_ids: Iterable[str], k: int, max_per_category: int) -> list[int]:
        """Rows of the first k of `item_ids` that keep at most `max_per_category` (0: any number) of a category."""
        room = _CategoryRoom(max_per_category)
        rows: list[int] = []
        for row, item_id in enumerate(item_ids):
            rank = self._rank.get(item_id)
            if room.take(() if rank is None else self._categories[rank]):
                rows.append(row)
                if len(rows) == k:
                    break
        return rows

    def _ranks(self, wanted: Filter) -> Iterator[int]:
        """Ranks worth looking at, ascending and without repetition; all of them meet `where`."""
        ranks = self._named_ranks(wanted)
        if not wanted.where:
            return ranks
        meets = self._attributes.mask(wanted.where)
        return (rank for rank in ranks if meets[rank])

    def _named_ranks(self, wanted: Filter) -> Iterator[int]:
        if wanted.allow_item_ids:
            return iter(sorted({self._rank[item_id] for item_id in wanted.allow_item_ids if item_id in self._rank}))
        if wanted.allow_categories:
            lists = [self._by_category.get(name, []) for name in set(wanted.allow_categories)]
            return (rank for rank, _ in groupby(heapq.merge(*lists)))
        return iter(range(len(self._item_ids)))


class _CategoryRoom:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()

    def take(self, names: Sequence[str]) -> bool:
        """Count an item in, unless one of its categories is full."""
        if not self._limit:
            return True
        if any(self._taken[name] >= self._limit for name in names):
            return False
        self._taken.update(names)
        return True
