"""The texts and items of identifiers (titles, keywords, pseudo-queries).

Texts and item rows of the built table are flat arrays with boundaries, memory-mapped if large. Identifiers added while
serving are stored separately.

Letters: I identifiers.
"""

import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.trie_search import ItemRows, laid_end_to_end

Rows = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]

TABLE_ARRAYS = ("letters", "letter_offsets", "rows", "row_offsets")


class IdentifierTable:
    """Identifiers 0 to I - 1. Thread-safe."""

    def __init__(self, letters: npt.NDArray[np.uint8], letter_offsets: Offsets, rows: Rows, row_offsets: Offsets):
        """Take concatenated UTF-8 texts and concatenated item rows, each with I + 1 boundaries.

        Raises: ValueError for invalid boundaries, unequal numbers of texts and item lists, or a negative row.
        """
        for name, flat, offsets in (("letters", letters, letter_offsets), ("rows", rows, row_offsets)):
            if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
                raise ValueError(f"the boundaries of {name} do not run from 0 to {len(flat)}")
        if len(letter_offsets) != len(row_offsets):
            raise ValueError(f"{len(letter_offsets) - 1} texts for {len(row_offsets) - 1} lists of items")
        if len(rows) and rows.min() < 0:
            raise ValueError(f"item row {rows.min()} allowed: 0 or more")
        self._letters, self._letter_offsets = letters, letter_offsets
        self._lock = threading.Lock()
        self._added_texts: list[str] = []
        self._added_rows, self._added_offsets = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64)
        self._items = ItemRows(rows, row_offsets, self._added_rows, self._added_offsets)

    @classmethod
    def build(cls, texts: Sequence[str], item_rows: Sequence[Sequence[int]]) -> Self:
        """Build from each identifier's text and items.

        Raises: ValueError for unequal numbers of texts and item lists, a negative row, or an identifier without items.
        """
        if len(texts) != len(item_rows):
            raise ValueError(f"{len(texts)} texts for {len(item_rows)} lists of items")
        rows, row_offsets = laid_end_to_end(item_rows)
        without = np.flatnonzero(np.diff(row_offsets) == 0)
        if len(without):
            raise ValueError(f"identifier {without[0]} has no item; allowed: at least 1")
        encoded = [text.encode("utf-8", errors="replace") for text in texts]
        letter_offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), letter_offsets, rows, row_offsets)

    def __len__(self) -> int:
        return len(self._letter_offsets) - 1 + len(self._added_texts)

    @property
    def nbytes(self) -> int:
        items = self._items
        return self._letters.nbytes + self._letter_offsets.nbytes + items.rows.nbytes + items.offsets.nbytes

    def text(self, identifier: int) -> str:
        number = identifier - (len(self._letter_offsets) - 1)
        if number >= 0:
            return self._added_texts[number]
        begin, end = self._letter_offsets[identifier : identifier + 2].tolist()
        return self._letters[begin:end].tobytes().decode("utf-8")

    def items(self) -> ItemRows:
        return self._items

    def add(self, text: str, item_rows: Sequence[int]) -> int:
        """Add an identifier; return its number, the next one. Raises: ValueError for no items or a negative row."""
        rows = np.asarray(item_rows, dtype=np.int32)
        if len(rows) == 0 or rows.min() < 0:
            raise ValueError(f"item_rows={list(item_rows)[:5]} allowed: at least one, 0 or more each")
        with self._lock:
            number = len(self)
            used = len(self._added_texts)
            begin = int(self._added_offsets[used])
            # The arrays grow by half. Writes never change what readers see.
            self._added_rows = _with_room(self._added_rows, begin + len(rows))
            self._added_offsets = _with_room(self._added_offsets, used + 2)
            self._added_rows[begin : begin + len(rows)] = rows
            self._added_offsets[used + 1] = begin + len(rows)
            self._added_texts.append(text)  # before the items, so that readers of the items find the text
            self._items = ItemRows(
                self._items.rows,
                self._items.offsets,
                self._added_rows[: begin + len(rows)],
                self._added_offsets[: used + 2],
            )
            return number

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The built table's arrays, for a file. Raises: ValueError if identifiers were added, since they would be
        lost.
        """
        if self._added_texts:
            raise ValueError(f"{len(self._added_texts)} identifiers were added; only a built table is saved")
        arrays = (self._letters, self._letter_offsets, self._items.rows, self._items.offsets)
        return dict(zip(TABLE_ARRAYS, arrays, strict=True))


def _with_room(array: npt.NDArray[Any], wanted: int) -> npt.NDArray[Any]:
    return array if len(array) >= wanted else np.resize(array, wanted + wanted // 2)
