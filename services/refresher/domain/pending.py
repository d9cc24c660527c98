"""Offsets of interactions with unknown items, to read again once the item is listed.

Beyond the limit, the item with the largest hash of its id is evicted, so that a flood of invented ids cannot choose
what it evicts. If an evicted item is listed later, the partition is rebuilt from its log.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from services.refresher.domain.records import IntArray, hash_text


class Pending:
    """The offsets of at most `most` attributions, by item."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._offsets: dict[str, array[int]] = {}
        self._total = 0
        # The smallest evicted hash.
        self.evicted_from: int | None = None

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[str]:
        return iter(self._offsets)

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._offsets

    @property
    def nbytes(self) -> int:
        return 8 * self._total

    def may_lack(self, item_id: str) -> bool:
        """Return whether interactions of this item may have been evicted."""
        return self.evicted_from is not None and hash_text(item_id) >= self.evicted_from

    def add(self, item_id: str, offset: int) -> None:
        if self.may_lack(item_id):
            return
        self._offsets.setdefault(item_id, array("q")).append(offset)
        self._total += 1
        while self._total > self._most:
            last = max(self._offsets, key=hash_text)
            self.evicted_from = hash_text(last)
            self.take(last)

    def holds(self, item_id: str, offset: int) -> bool:
        return offset in self._offsets.get(item_id, ())

    def remove(self, item_id: str, offset: int) -> None:
        offsets = self._offsets[item_id]
        offsets.remove(offset)
        self._total -= 1
        if not offsets:
            del self._offsets[item_id]

    def offsets(self, item_id: str) -> Sequence[int]:
        return self._offsets.get(item_id, array("q"))

    def take(self, item_id: str) -> None:
        self._total -= len(self._offsets.pop(item_id, ()))

    def to_arrays(self) -> tuple[list[str], dict[str, npt.NDArray[np.generic]]]:
        """Items in order, and arrays of their numbers of offsets, the offsets, and the smallest evicted hash."""
        items = sorted(self._offsets)
        offsets = array("q")
        for item_id in items:
            offsets += self._offsets[item_id]
        evicted = [] if self.evicted_from is None else [self.evicted_from]
        return items, {
            "pending.lengths": np.array([len(self._offsets[item_id]) for item_id in items], np.int64),
            "pending.offsets": np.frombuffer(offsets, np.int64) if offsets else np.zeros(0, np.int64),
            "pending.evicted_from": np.array(evicted, np.uint64),
        }

    @classmethod
    def from_arrays(cls, most: int, items: Sequence[str], arrays: Mapping[str, IntArray]) -> "Pending":
        """The inverse of `to_arrays`."""
        pending = cls(most)
        start = 0
        for item_id, length in zip(items, arrays["pending.lengths"].tolist(), strict=True):
            pending._offsets[item_id] = array("q", arrays["pending.offsets"][start : start + length].tolist())
            start += length
        pending._total = start
        pending.evicted_from = next(iter(arrays["pending.evicted_from"].tolist()), None)
        return pending
