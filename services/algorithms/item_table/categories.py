"""Category lists as a column of concatenated codes with names, and the rows of each category.

Letters: n items, m requested rows.
"""

from bisect import insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from services.algorithms.item_table.strings import Strings

Indices = npt.NDArray[np.integer[Any]]
Codes = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CategoryLists:
    """Each row's categories as codes: offsets (n + 1,), codes (total,)."""

    offsets: npt.NDArray[np.int64]
    codes: Codes

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> "CategoryLists":
        offsets = np.cumsum([0, *map(len, lists)])
        return cls(offsets, np.fromiter((code for codes in lists for code in codes), np.int32, int(offsets[-1])))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: Indices | Sequence[int]) -> "CategoryLists":
        """The lists of some rows, in order; row -1 has none."""
        rows = np.asarray(rows, np.int64)
        lengths = np.where(rows < 0, 0, self.offsets[rows + 1] - self.offsets[rows])
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        taken = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return CategoryLists(offsets, self.codes[taken])

    def of_row(self, row: int) -> tuple[int, ...]:
        return tuple(self.codes[self.offsets[row] : self.offsets[row + 1]].tolist())

    def having(self, codes: Sequence[int], num_codes: int) -> Mask:
        """Which rows have any of these codes (n,). num_codes: number of all codes."""
        is_wanted = np.zeros(num_codes, dtype=bool)
        is_wanted[list(codes)] = True
        before = np.concatenate([[0], np.cumsum(is_wanted[self.codes])])
        return np.asarray(before[self.offsets[1:]] > before[self.offsets[:-1]])

    def recoded(self, codes: Codes) -> "CategoryLists":
        return CategoryLists(self.offsets, codes[self.codes])


class Categories(Sequence[tuple[str, ...]]):
    """Each item's distinct categories by name. Equal to any sequence of equal lists of names."""

    __slots__ = ("lists", "names")

    def __init__(self, lists: CategoryLists, names: Sequence[str]) -> None:
        """Raise ValueError for inconsistent offsets and codes, or codes without a name."""
        offsets, codes = lists.offsets, lists.codes
        is_one = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(codes)
        if not is_one or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"category offsets do not ascend from 0 to the number of category codes, {len(codes)}")
        if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < len(names):
            raise ValueError(f"category codes {codes.min()} to {codes.max()}; there are {len(names)} names")
        self.lists, self.names = lists, list(names)
        if len(set(self.names)) < len(self.names):
            twice = next(name for number, name in enumerate(self.names) if name in self.names[:number])
            raise ValueError(f"category names hold {twice!r} more than once; allowed: each name once")

    @classmethod
    def of(cls, categories: Sequence[Sequence[str]]) -> "Categories":
        if isinstance(categories, Categories):
            return categories
        known: dict[str, int] = {}
        lists = [[known.setdefault(name, len(known)) for name in dict.fromkeys(names)] for names in categories]
        return cls(CategoryLists.of(lists), list(known))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> "Categories":
        """Read columns. Raises: KeyError for a missing column, ValueError for invalid columns."""
        names = Strings.from_tensors(tensors, "category_names")
        return cls(CategoryLists(tensors["category_offsets"], tensors["category_codes"]), names)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "category_offsets": self.lists.offsets,
            "category_codes": self.lists.codes,
            **Strings.of(self.names).tensors("category_names"),
        }

    def __len__(self) -> int:
        return len(self.lists)

    @overload
    def __getitem__(self, row: int) -> tuple[str, ...]: ...
    @overload
    def __getitem__(self, row: slice) -> list[tuple[str, ...]]: ...
    def __getitem__(self, row: int | slice) -> tuple[str, ...] | list[tuple[str, ...]]:
        if isinstance(row, slice):
            return self.of_rows(np.arange(len(self))[row])
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} items")
        return tuple(self.names[code] for code in self.lists.of_row(row % len(self)))

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        for start in range(0, len(self), 65_536):
            yield from self.of_rows(np.arange(start, min(start + 65_536, len(self))))

    def of_rows(self, rows: Indices) -> list[tuple[str, ...]]:
        lists = self.lists.take(rows)
        names = [self.names[code] for code in lists.codes.tolist()]
        return [tuple(names[start:end]) for start, end in pairwise(lists.offsets.tolist())]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(mine == tuple(theirs) for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def take(self, rows: Indices) -> "Categories":
        return Categories(self.lists.take(rows), self.names)


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
        """The category's rows, without removed ones."""
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
