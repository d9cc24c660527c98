"""The ledger's rows as arrays, and a sum of row hashes that identifies a ledger whatever the order of rows.

Letters: n rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from services.platform.stream.records import MAX_OFFSET
from services.refresher.domain.records import IntArray

Rows = Mapping[str, npt.NDArray[np.generic]]

BLOCK_ROWS = 1 << 15
NO_ITEM = 0xFFFFFFFF
_BLANK = -1
DTYPES: dict[str, npt.DTypeLike] = {
    "users": np.dtype(np.uint64),
    "positions": np.dtype(np.int64),
    "offsets": np.dtype(np.int64),
    "items": np.dtype(np.uint32),
}
ROW_BYTES = 28


@dataclass(slots=True)
class Block:
    """Up to `BLOCK_ROWS` rows. positions: packed, -1 in a blank row. items: NO_ITEM for rows outside sums.

    changes: of existing rows. is_shared: a checkpoint reads the arrays.
    """

    users: npt.NDArray[np.uint64]
    positions: IntArray
    offsets: IntArray
    items: npt.NDArray[np.uint32]
    count: int = 0
    changes: int = 0
    is_shared: bool = False
    low: int = MAX_OFFSET
    high: int = -1

    @classmethod
    def empty(cls) -> "Block":
        return cls.of({name: np.empty(BLOCK_ROWS, dtype) for name, dtype in DTYPES.items()})

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> "Block":
        users, positions, offsets, items = (np.ascontiguousarray(arrays[name], dtype) for name, dtype in DTYPES.items())
        return cls(users, positions, offsets, items)

    @property
    def version(self) -> tuple[int, int]:
        """A value that every change of the content changes."""
        return self.count, self.changes

    def rows(self) -> dict[str, npt.NDArray[np.generic]]:
        return {name: getattr(self, name)[: self.count] for name in DTYPES}

    def write(self, row: int, *, user: int | None = None, item: int = NO_ITEM, is_blank: bool = False) -> None:
        if self.is_shared:
            for name in DTYPES:
                setattr(self, name, getattr(self, name).copy())
            self.is_shared = False
        if is_blank:
            self.positions[row], user = _BLANK, 0
        if user is not None:
            self.users[row] = user
        self.items[row] = item
        self.changes += 1


@dataclass(slots=True)
class Mix:
    """The sum of every row's hash, independent of their order."""

    words: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, users: npt.NDArray[np.uint64], first: IntArray, second: IntArray, sign: int = 1) -> None:
        with np.errstate(over="ignore"):
            word = _splitmix(_splitmix(users) + first.astype(np.uint64))
            word = _splitmix(word + second.astype(np.uint64))
            sums = (int(word.sum(dtype=np.uint64)), int(_splitmix(word).sum(dtype=np.uint64)))
        self.words = [(have + sign * more) % (1 << 64) for have, more in zip(self.words, sums, strict=True)]

    def add_one(self, user: int, first: int, second: int, sign: int = 1) -> None:
        self.add(np.array([user], np.uint64), np.array([first]), np.array([second]), sign)


def _splitmix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
