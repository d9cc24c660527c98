"""A column of item ids that finds an id's row by hash (decision 087). A dictionary of ten million ids would hold the
interpreter lock while it is built. A bundle stores the sorted hashes (xxh3, 64 bits), so that processes share them.

Letters: n ids, m requested ids.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from services.algorithms.item_table.strings import Indices, Strings
from services.algorithms.lazy import lazy_property

Hashes = npt.NDArray[np.int64]
HashRows = npt.NDArray[np.signedinteger[Any]]

MAX_ID_BYTES = 128
_SAMPLE = 1_000
_encoded = methodcaller("encode", "utf-8", "surrogatepass")  # a string that is not UTF-8 counts as an unknown id
_FOUND = 65_536  # ids compared at a time
_HASH = np.dtype(np.int64)


class ItemIds(Mapping[str, int]):
    """n distinct ids and their rows."""

    def __init__(
        self, strings: Strings, hashes: Hashes | None = None, by_hash: tuple[Hashes, HashRows] | None = None
    ) -> None:
        """Take distinct strings. hashes (n,): their `hash_ids`, if known. by_hash: the sorted hashes and each hash's
        row, if known.
        """
        self.strings = strings
        if hashes is not None:
            self.__dict__["hashes"] = hashes
        if by_hash is not None:
            self.__dict__["by_hash"] = by_hash

    @classmethod
    def of(cls, item_ids: Iterable[str]) -> "ItemIds":
        """Make a column. Raises: ValueError for a string that is not UTF-8, and for ids that `check` rejects."""
        found = cls(Strings.of(item_ids))
        found.check("item_ids")
        return found

    def check(self, name: str) -> None:
        """Raise ValueError with the id unless all are distinct and of 1-128 bytes."""
        lengths = self.strings.lengths
        wrong = np.flatnonzero((lengths < 1) | (lengths > MAX_ID_BYTES))
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(f"{name} holds {self.strings[row]!r} of {lengths[row]} bytes; allowed: 1-{MAX_ID_BYTES}")
        hashes, order = self.by_hash
        for at in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
            end = at + 1
            while end < len(hashes) and hashes[end] == hashes[at]:
                if self.strings[order[end]] == self.strings[order[at]]:
                    raise ValueError(f"{name} holds {self.strings[order[at]]!r} more than once")
                end += 1

    def check_hashes(self, name: str) -> None:
        """Raise ValueError if the hashes of `by_hash` do not ascend, a row is out of range, or the hashes do not match
        the ids. It recomputes only a thousand hashes, because the file's checksum protects the others.
        """
        hashes, rows = self.by_hash
        sample = np.linspace(0, len(self) - 1, min(len(self), _SAMPLE)).astype(np.int64)
        if (hashes[1:] < hashes[:-1]).any() or (len(self) and not 0 <= rows.min() <= rows.max() < len(self)):
            raise ValueError(f"{name} has hashes that do not ascend, or of rows that it lacks")
        if (hash_ids(self.strings.take(rows[sample])) != hashes[sample]).any():
            raise ValueError(f"{name} has hashes of other ids")

    def __len__(self) -> int:
        return len(self.strings)

    def __iter__(self) -> Iterator[str]:
        return iter(self.strings)

    def __contains__(self, item_id: object) -> bool:
        return isinstance(item_id, str) and self._row(item_id) >= 0

    def __getitem__(self, item_id: str) -> int:
        row = self._row(item_id)
        if row < 0:
            raise KeyError(item_id)
        return row

    def get(self, item_id: str, default: Any = None) -> Any:
        """The row, or `default`. One call takes 3 us. To look up many ids at once, use `find`; if each event needs
        hundreds of separate lookups, use a dictionary.
        """
        row = self._row(item_id)
        return default if row < 0 else row

    @property
    def nbytes(self) -> int:
        """Bytes of all hashes and rows, without strings."""
        return len(self) * (2 * _HASH.itemsize + _row_type(len(self)).itemsize)

    @lazy_property
    def hashes(self) -> Hashes:
        if "by_hash" not in self.__dict__:
            return hash_ids(self.strings)
        in_order, rows = self.by_hash
        hashes = np.empty_like(in_order)
        hashes[rows] = in_order
        return hashes

    @lazy_property
    def by_hash(self) -> tuple[Hashes, HashRows]:
        """The hashes in ascending order (n,), and the row of each hash (n,)."""
        hashes = self.hashes if "hashes" in self.__dict__ else hash_ids(self.strings)
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order.astype(_row_type(len(self)))

    def hashes_of(self, rows: Indices) -> Hashes:
        """Hashes of m rows (m,). If only `by_hash` is known, this does not store `hashes`."""
        if "hashes" in self.__dict__ or "by_hash" not in self.__dict__:
            return self.hashes[rows]
        in_order, their_rows = self.by_hash
        hashes = np.empty_like(in_order)
        hashes[their_rows] = in_order
        return hashes[rows]

    def prepare(self) -> None:
        """Compute `by_hash` now, not at its first use."""
        self.by_hash  # noqa: B018

    def find(self, item_ids: Sequence[str], hashes: Hashes | None = None) -> Indices:
        """Return rows (m,) of the ids, -1 for unknown ids. hashes (m,): hashes of the ids, if known."""
        if not len(self) or not len(item_ids):
            return np.full(len(item_ids), -1, dtype=np.int64)
        hashes = hash_ids(item_ids) if hashes is None else hashes
        sorted_hashes, order = self.by_hash
        positions = np.minimum(np.searchsorted(sorted_hashes, hashes), len(order) - 1)
        rows = np.where(sorted_hashes[positions] == hashes, order[positions], -1).astype(np.int64)
        here = np.flatnonzero(rows >= 0)
        asked = item_ids if len(here) == len(item_ids) else [item_ids[number] for number in here.tolist()]
        if not self.strings.are(rows[here], asked):
            for number, item_id, found in zip(here.tolist(), asked, self.strings.take(rows[here]), strict=True):
                if found != item_id:  # another id of equal hash is first
                    rows[number] = self._among_equal(item_id, int(positions[number]))
        return rows

    def first(self, count: int) -> "ItemIds":
        """The first `count` ids, not copied."""
        if count == len(self):
            return self
        strings = Strings(self.strings.data[: self.strings.ends[count - 1]], self.strings.ends[:count])
        hashes, rows = self.by_hash
        return ItemIds(strings, by_hash=(hashes[rows < count], rows[rows < count]))

    def rows_of(self, others: "ItemIds") -> Indices:
        """This column's row of each id of `others` (m,), -1 for unknown ones."""
        if self.strings == others.strings:
            return np.arange(len(self))
        if not len(self) or not len(others):
            return np.full(len(others), -1, dtype=np.int64)
        # Both columns are searched in order of hash. In another order, the search for an id would miss the CPU cache 20
        # times.
        (mine, rows), (theirs, their_rows) = self.by_hash, others.by_hash
        at = np.minimum(np.searchsorted(mine, theirs), len(mine) - 1)
        found = np.empty(len(others), dtype=np.int64)
        found[their_rows] = np.where(mine[at] == theirs, rows[at], -1)
        for start in range(0, len(others), _FOUND):
            part = slice(start, min(start + _FOUND, len(others)))
            here = np.flatnonzero(found[part] >= 0)
            if not self.strings.same(found[part][here], others.strings, start + here):
                found[part] = self.find(others.strings[part], others.hashes[part])
        return found

    def _row(self, item_id: str) -> int:
        hashes, _ = self.by_hash
        wanted = hash_ids((item_id,))[0]
        at = int(hashes.searchsorted(wanted))
        return self._among_equal(item_id, at) if at < len(hashes) and hashes[at] == wanted else -1

    def _among_equal(self, item_id: str, at: int) -> int:
        hashes, order = self.by_hash
        wanted = hashes[at]
        while at < len(order) and hashes[at] == wanted:
            if self.strings[order[at]] == item_id:
                return int(order[at])
            at += 1
        return -1


def _row_type(size: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if size < 2**31 else np.int64)


def hash_ids(item_ids: Iterable[str]) -> Hashes:
    """64-bit hashes of ids."""
    encoded = item_ids.encoded() if isinstance(item_ids, Strings) else map(_encoded, item_ids)
    return np.fromiter(map(xxh3_64_intdigest, encoded), np.uint64).view(np.int64)
