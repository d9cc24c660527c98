"""The position of each user's newest record in `histories`: 64 bits of hash and 64 bits of position, in memory.

Of two users with one hash, it has one's position: the reader compares the record's key, and reads the log for the
other.
"""

import numpy as np

from services.platform.stream.position import Position, pack_position, unpack_position

# Entries since the last merge: a dictionary needs some hundred bytes each.
_FEW = 65_536


class HistoryIndex:
    """Maps a key's hash to its highest offset, in one partition."""

    def __init__(self) -> None:
        self._hashes = np.zeros(0, dtype=np.int64)
        self._places = np.zeros(0, dtype=np.int64)
        self._new: dict[int, int] = {}

    def put(self, key: bytes, partition: int, offset: int) -> None:
        """Add a record of this key, in any order."""
        name, place = hash(key), pack_position(partition, offset)
        self._new[name] = max(place, self._new.get(name, -1))
        if len(self._new) > _FEW + len(self._hashes) // 4:
            self._merge()

    def get(self, key: bytes) -> Position | None:
        """The position of the newest record with this key, or another key of its hash."""
        name = hash(key)
        place = self._new.get(name, -1)
        at = int(np.searchsorted(self._hashes, name))
        if at < len(self._hashes) and self._hashes[at] == name:
            place = max(place, int(self._places[at]))
        return None if place < 0 else unpack_position(place)

    def _merge(self) -> None:
        hashes = np.concatenate((self._hashes, np.fromiter(self._new, dtype=np.int64, count=len(self._new))))
        places = np.concatenate((self._places, np.fromiter(self._new.values(), dtype=np.int64, count=len(self._new))))
        order = np.lexsort((places, hashes))
        hashes, places = hashes[order], places[order]
        last = np.append(hashes[1:] != hashes[:-1], True)
        self._hashes, self._places, self._new = hashes[last], places[last], {}
