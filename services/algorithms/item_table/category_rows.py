"""The rows of each category: a bundle's, and later changes."""

from bisect import insort
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from services.algorithms.item_table.categories import Categories

Rows = npt.NDArray[np.int32]


class CategoryRows:
    """Each category's rows, ascending: an array of the bundle's and a list of later ones.

    Removed rows stay until they are more than half, so readers must check each row's categories. Arrays are never
    overwritten, so other threads may read them.
    """

    def __init__(self, categories: Categories, rows: Rows) -> None:
        """Start from the rows (n,) of the bundle's n items."""
        lists = categories.lists
        members = np.repeat(rows, lists.offsets[1:] - lists.offsets[:-1])
        members = members[np.lexsort((members, lists.codes))]
        ends = np.cumsum(np.bincount(lists.codes, minlength=len(categories.names)))
        self._bundled = dict(zip(categories.names, np.split(members, ends)[:-1], strict=True))
        self._joined: dict[str, list[int]] = {}
        self._left: dict[str, set[int]] = {}

    def of(self, name: str) -> tuple[Rows, list[int]]:
        """The bundle's rows of the category, and later ones; both may contain removed rows."""
        return self._bundled.get(name, np.zeros(0, np.int32)), self._joined.get(name, [])

    def has(self, name: str) -> bool:
        bundled, joined = self.of(name)
        return len(bundled) + len(joined) > len(self._left.get(name, ()))

    def names(self) -> list[str]:
        return [name for name in {**self._bundled, **self._joined} if self.has(name)]

    def members(self, name: str) -> Rows:
        """Exactly the category's rows."""
        rows = np.concatenate([np.asarray(part, np.int32) for part in self.of(name)])
        left = self._left.get(name)
        return rows[~np.isin(rows, list(left))] if left else rows

    def moved(self, row: int, old: Collection[str], new: Collection[str]) -> None:
        for name in old:
            left, (bundled, joined) = self._left.setdefault(name, set()), self.of(name)
            left.add(row)
            if 2 * len(left) > len(bundled) + len(joined):
                self._bundled[name] = bundled[~np.isin(bundled, list(left))]
                self._joined[name] = [other for other in joined if other not in left]
                del self._left[name]
        for name in new:
            if row in (left := self._left.get(name, set())):
                left.remove(row)
            else:
                insort(self._joined.setdefault(name, []), row)
