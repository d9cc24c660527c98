"""Filters of answers by allow and deny lists, categories, attributes and seen items.

Unknown ids and categories match nothing, since a caller's list may be newer or older than the catalogue. An undeclared
attribute is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.rules.attributes import MAX_CONDITIONS, Condition, Kinds, Values

Mask = npt.NDArray[np.bool_]

MAX_IDS = 20_000
MAX_CATEGORIES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFilter:
    """Rules over item ids, categories and attributes. An empty allow list allows everything; all conditions of `where`
    must hold.

    Only `check` validates. seen_item_ids: items excluded if `exclude_seen`.
    """

    allow_item_ids: Sequence[str] = ()
    deny_item_ids: Sequence[str] = ()
    allow_categories: Sequence[str] = ()
    deny_categories: Sequence[str] = ()
    where: Sequence[Condition] = ()
    exclude_seen: bool = True
    seen_item_ids: Sequence[str] = ()

    def check(self, kinds: Kinds) -> None:
        """Raise ValueError that names the field if a list is too long, or an attribute of `where` is undeclared or of
        another kind.
        """
        for name in ("allow_item_ids", "deny_item_ids", "seen_item_ids", "allow_categories", "deny_categories"):
            limit = MAX_CATEGORIES if name.endswith("categories") else MAX_IDS
            if len(getattr(self, name)) > limit:
                raise ValueError(f"len({name})={len(getattr(self, name))} allowed: 0-{limit}")
        if len(self.where) > MAX_CONDITIONS:
            raise ValueError(f"len(where)={len(self.where)} allowed: 0-{MAX_CONDITIONS}")
        for position, one in enumerate(self.where):
            try:
                one.check(kinds)
            except ValueError as exc:
                raise ValueError(f"where[{position}]: {exc}") from exc

    @property
    def denied_ids(self) -> Sequence[str]:
        return [*self.deny_item_ids, *(self.seen_item_ids if self.exclude_seen else ())]

    @property
    def is_open(self) -> bool:
        return not (
            self.allow_item_ids
            or self.deny_item_ids
            or self.allow_categories
            or self.deny_categories
            or self.where
            or (self.exclude_seen and self.seen_item_ids)
        )


class Filterable(Protocol):
    """n items to filter; the caller owns each mask (n,)."""

    def __len__(self) -> int: ...
    def named(self, item_ids: Sequence[str]) -> Mask: ...
    def of_categories(self, names: Sequence[str]) -> Mask: ...
    def meeting(self, where: Sequence[Condition]) -> Mask: ...


def passing(wanted: ItemFilter, items: Filterable) -> Mask:
    passes = np.ones(len(items), dtype=bool)
    if wanted.allow_item_ids:
        passes &= items.named(wanted.allow_item_ids)
    if wanted.allow_categories:
        passes &= items.of_categories(wanted.allow_categories)
    if wanted.where:
        passes &= items.meeting(wanted.where)
    if wanted.deny_categories:
        passes &= ~items.of_categories(wanted.deny_categories)
    if denied := wanted.denied_ids:
        passes &= ~items.named(denied)
    return passes


@dataclass(frozen=True, slots=True)
class ListedItems:
    """n items with categories; a filter with conditions also needs their attributes."""

    item_ids: Sequence[str]
    categories: Sequence[Sequence[str]] = ()
    attributes: Sequence[Values] = ()

    def __len__(self) -> int:
        return len(self.item_ids)

    def named(self, item_ids: Sequence[str]) -> Mask:
        wanted = frozenset(item_ids)
        return np.array([item_id in wanted for item_id in self.item_ids], dtype=bool)

    def of_categories(self, names: Sequence[str]) -> Mask:
        wanted = frozenset(names)
        return np.array([not wanted.isdisjoint(one) for one in self.categories], dtype=bool)

    def meeting(self, where: Sequence[Condition]) -> Mask:
        return np.array([all(one.holds(of.get(one.name)) for one in where) for of in self.attributes], dtype=bool)
