"""Where each user's newest record of `histories` lies: 64 bits of hash and 64 bits of position a user, in memory.

Two users of one hash are told apart by the record's key: the one whose record is not found is read from the log.
"""

import numpy as np

from services.platform.stream.position import Position, pack_position, unpack_position

# Entries that came since the arrays were made: a dictionary is some hundred bytes an entry, so there are few.
_FEW = 65_536


class HistoryIndex:
    """A user has one partition, and a later offset holds."""

    def __init__(self) -> None:
        self._hashes = np.zeros(0, dtype=np.int64)
        self._places = np.zeros(0, dtype=np.int64)
        self._new: dict[int, int] = {}

    def put(self, key: bytes, partition: int, offset: int) -> None:
        """There is a record of this key; in any order."""
        name, place = hash(key), pack_position(partition, offset)
        self._new[name] = max(place, self._new.get(name, -1))
        if len(self._new) > _FEW + len(self._hashes) // 4:
            self._merge()

    def get(self, key: bytes) -> Position | None:
        """The newest record of this key, or of another one with the same hash."""
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
