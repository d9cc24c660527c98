"""Which items a request may be answered with: allow and deny lists, categories, attributes, what the user has seen.

The rules, and their verdict item by item over a pool (the reranker's second look); inside a scan, a segment of the
index makes a mask of them. Unknown ids and categories match nothing; they are not errors, since a caller's list may be
newer or older than the catalogue. Attributes are declared, so an unknown one is an error.

Letters: n pool size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.rules.attributes import MAX_CONDITIONS, Condition, Kinds, Values

Mask = npt.NDArray[np.bool_]

MAX_IDS = 20_000
MAX_CATEGORIES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFilter:
    """Rules over item ids, categories and attributes; an empty allow list allows everything, all of `where` must hold.
    Nothing is checked before `check`.

    `seen_item_ids` is what `exclude_seen` leaves out; without it they are ignored.
    """

    allow_item_ids: Sequence[str] = ()
    deny_item_ids: Sequence[str] = ()
    allow_categories: Sequence[str] = ()
    deny_categories: Sequence[str] = ()
    where: Sequence[Condition] = ()
    exclude_seen: bool = True
    seen_item_ids: Sequence[str] = ()

    def check(self, kinds: Kinds) -> None:
        """Raise ValueError, naming the field, for lists longer than a request may carry, and for attributes that are
        not declared or of another kind."""
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
    def is_open(self) -> bool:
        """Whether every item passes."""
        return not (
            self.allow_item_ids
            or self.deny_item_ids
            or self.allow_categories
            or self.deny_categories
            or self.where
            or (self.exclude_seen and self.seen_item_ids)
        )


def passing(
    wanted: ItemFilter, item_ids: Sequence[str], categories: Sequence[Sequence[str]], attributes: Sequence[Values] = ()
) -> Mask:
    """Which of n items pass, decided item by item: (n,). `categories`: each item's; `attributes`, too, for `where`."""
    if wanted.is_open:
        return np.ones(len(item_ids), dtype=bool)
    allow_ids, allow_names = frozenset(wanted.allow_item_ids), frozenset(wanted.allow_categories)
    deny_names = frozenset(wanted.deny_categories)
    denied = {*wanted.deny_item_ids, *(wanted.seen_item_ids if wanted.exclude_seen else ())}
    passes = np.array(
        [
            (not allow_ids or item_id in allow_ids)
            and item_id not in denied
            and (not allow_names or not allow_names.isdisjoint(names))
            and deny_names.isdisjoint(names)
            for item_id, names in zip(item_ids, categories, strict=True)
        ],
        dtype=bool,
    )
    if wanted.where:
        for row, values in enumerate(attributes):
            passes[row] &= all(one.holds(values.get(one.name)) for one in wanted.where)
    return passes
