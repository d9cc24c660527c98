"""Shards of a catalogue: each process serves a hash range of item ids.

Shard i of n has the ids whose 64-bit hash lies in [i, i + 1) * 2^64 / n. All processes of an installation use one n.
"""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import numpy as np
import numpy.typing as npt

from services.algorithms.item_table.strings import Strings

MAX_SHARDS = 256
_HASHED = 65_536  # ids hashed at a time: 10^8 at once would take gigabytes


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of `count`; written "index/count"."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_SHARDS or not 0 <= self.index < self.count:
            raise ValueError(f"shard {self}; allowed: i/n with n in 1-{MAX_SHARDS} and i in 0-n-1")

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Parse "index/count". Raises: ValueError."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"shard {text!r:.40}; allowed: i/n, such as 0/4")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def is_all(self) -> bool:
        return self.count == 1

    def holds(self, item_id: str) -> bool:
        return self.count == 1 or home_shard(item_id, self.count) == self.index

    def rows(self, item_ids: Strings) -> npt.NDArray[np.int64]:
        """Return the rows of this shard's ids. Cost: a microsecond an id, for the hash."""
        encoded = item_ids.encoded()
        found = [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(item_ids), _HASHED):
            digests = b"".join(blake2b(one, digest_size=8).digest() for one in islice(encoded, _HASHED))
            hashes = np.frombuffer(digests, ">u8").astype(np.uint64)
            count, half = np.uint64(self.count), np.uint64(32)
            low = (hashes & np.uint64(2**32 - 1)) * count >> half
            found.append(start + np.flatnonzero(((hashes >> half) * count + low) >> half == self.index))
        return np.concatenate(found)


WHOLE = Shard(0, 1)


def home_shard(item_id: str, count: int) -> int:
    return int.from_bytes(blake2b(item_id.encode(), digest_size=8).digest(), "big") * count >> 64
