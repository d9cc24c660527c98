"""Which items a request may be answered with: allow and deny lists, categories, what the user has seen.

Pure features of a request: ids and categories in, a mask over the catalogue (inside a scan) or over a pool (the
reranker's second look) out. Unknown ids and categories match nothing; they are not errors, since a caller's list may
be newer or older than the catalogue.

Letters: X items, n pool size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MAX_IDS = 20_000
MAX_CATEGORIES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFilter:
    """Rules over item ids and categories; an empty allow list allows everything.

    `seen_item_ids` is what `exclude_seen` leaves out; without it they are ignored.
    """

    allow_item_ids: Sequence[str] = ()
    deny_item_ids: Sequence[str] = ()
    allow_categories: Sequence[str] = ()
    deny_categories: Sequence[str] = ()
    exclude_seen: bool = False
    seen_item_ids: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, for lists longer than a request may carry."""
        for name in ("allow_item_ids", "deny_item_ids", "seen_item_ids", "allow_categories", "deny_categories"):
            limit = MAX_CATEGORIES if name.endswith("categories") else MAX_IDS
            if len(getattr(self, name)) > limit:
                raise ValueError(f"len({name})={len(getattr(self, name))} allowed: 0-{limit}")

    @property
    def is_open(self) -> bool:
        """Whether every item passes."""
        return not (
            self.allow_item_ids
            or self.deny_item_ids
            or self.allow_categories
            or self.deny_categories
            or (self.exclude_seen and self.seen_item_ids)
        )


class CatalogueRules:
    """A catalogue's ids and categories, laid out so that a filter costs only as much as it names."""

    def __init__(self, item_index: Mapping[str, int], categories: Sequence[Sequence[str]]) -> None:
        """`item_index`: dense row of each id; `categories`: each row's categories.

        Raises: ValueError if the two differ in length.
        """
        if len(item_index) != len(categories):
            raise ValueError(f"{len(item_index)} distinct item ids but categories of {len(categories)} items")
        self._item_index = item_index
        self.num_items = len(item_index)
        members: dict[str, list[int]] = {}
        for row, names in enumerate(categories):
            for name in names:
                members.setdefault(name, []).append(row)
        self._members = {name: np.unique(np.array(rows, dtype=np.int64)) for name, rows in members.items()}
        self._codes = {name: code for code, name in enumerate(self._members)}
        self.category_codes: list[tuple[int, ...]] = [
            tuple(dict.fromkeys(self._codes[name] for name in names)) for names in categories
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the category lists."""
        return sum(int(rows.nbytes) for rows in self._members.values())

    def rows(self, item_ids: Iterable[str]) -> Rows:
        """Dense rows of the known ids, in order; unknown ones are left out."""
        index = self._item_index
        return np.array([index[item_id] for item_id in item_ids if item_id in index], dtype=np.int64)

    def mask(self, wanted: ItemFilter) -> Mask | None:
        """Which items pass: (X,), or None when all do."""
        if wanted.is_open:
            return None
        if wanted.allow_item_ids:
            allowed = np.zeros(self.num_items, dtype=bool)
            allowed[self.rows(wanted.allow_item_ids)] = True
        else:
            allowed = np.ones(self.num_items, dtype=bool)
        if wanted.allow_categories:
            in_category = np.zeros(self.num_items, dtype=bool)
            for rows in self._category_rows(wanted.allow_categories):
                in_category[rows] = True
            allowed &= in_category
        for rows in self._category_rows(wanted.deny_categories):
            allowed[rows] = False
        allowed[self.rows(wanted.deny_item_ids)] = False
        if wanted.exclude_seen:
            allowed[self.rows(wanted.seen_item_ids)] = False
        return allowed

    def mask_pool(self, wanted: ItemFilter, pool: Rows) -> Mask:
        """Which of a pool's rows (n,) pass: (n,). Decided item by item, independently of `mask`."""
        allowed = np.ones(len(pool), dtype=bool)
        if wanted.is_open:
            return allowed
        if wanted.allow_item_ids:
            allowed &= np.isin(pool, self.rows(wanted.allow_item_ids))
        if wanted.deny_item_ids:
            allowed &= ~np.isin(pool, self.rows(wanted.deny_item_ids))
        if wanted.exclude_seen and wanted.seen_item_ids:
            allowed &= ~np.isin(pool, self.rows(wanted.seen_item_ids))
        if wanted.allow_categories or wanted.deny_categories:
            allow = self._known_codes(wanted.allow_categories)
            deny = self._known_codes(wanted.deny_categories)
            for position, row in enumerate(pool.tolist()):
                codes = self.category_codes[row]
                if (wanted.allow_categories and allow.isdisjoint(codes)) or not deny.isdisjoint(codes):
                    allowed[position] = False
        return allowed

    def _category_rows(self, names: Iterable[str]) -> Iterable[Rows]:
        return (self._members[name] for name in names if name in self._members)

    def _known_codes(self, names: Iterable[str]) -> frozenset[int]:
        return frozenset(self._codes[name] for name in names if name in self._codes)
