"""The ledger records which interactions count, and which positions users have forgotten.

It makes folding exactly-once, forgetting exact, and a rebuild identical. Rows of 28 bytes are in blocks of arrays, in
order of arrival. A void row is blanked in its place, so a checkpoint copies only changed blocks. A row has 64 bits of
the hash of the user's pseudonym, and the item's number. A sum of row hashes identifies a ledger whatever the order of
rows.

Letters: n rows.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from services.platform.stream.records import MAX_OFFSET, furthest, is_covered, unpack_position
from services.refresher.domain.records import IntArray, hash_text

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
    """Up to `BLOCK_ROWS` rows.

    `positions` are packed, or -1 in a blank row. `items` has NO_ITEM for rows that no sums contain. `changes` counts
    changes of existing rows. `is_shared` tells that a checkpoint reads the arrays.
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
        """A value that differs after every change of the content."""
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


UNDONE_CHUNK = 1 << 16
FORGOTTEN_SHARDS = 64
# Blocks with a sorted index of positions (12 bytes a row), for old duplicates.
_SORTED_BLOCKS = 32


class Standing(Enum):
    """Tells whether a position is new, counted or void."""

    NEW = "new"
    COUNTED = "counted"
    VOID = "void"


class Ledger:
    """The rows of one partition of `attributions`."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.forgotten_versions = [0] * FORGOTTEN_SHARDS
        self._forgotten: list[dict[str, Mapping[int, int]]] = [{} for _ in range(FORGOTTEN_SHARDS)]
        self.undone: array[int] = array("q")
        self._undone: set[int] = set()
        self._num_positions = 0
        # Rows of the last block by position, and for each partition of `interactions` the newest position that ever
        # counted. Most positions to look up are newer and need no search.
        self._tail: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        self._sorted: dict[int, tuple[IntArray, IntArray]] = {}
        self._mix = Mix()
        # How many rows of the last block the mix contains.
        self._mixed = 0

    def __len__(self) -> int:
        return self._num_positions

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and undone positions, without forgotten users."""
        return ROW_BYTES * BLOCK_ROWS * len(self.blocks) + 8 * len(self._undone)

    def standing(self, user: str, position: int) -> Standing:
        """Return the status of a user's position. A new position takes constant time, others O(blocks) and a search."""
        if position in self._undone:
            return Standing.VOID
        up_to = self._forgotten[hash_text(user) % FORGOTTEN_SHARDS].get(user)
        if up_to and is_covered(up_to, *unpack_position(position)):
            return Standing.VOID
        return Standing.NEW if self._find(position) is None else Standing.COUNTED

    def add(self, user: str, position: int, offset: int, item: int = NO_ITEM) -> None:
        """Count a NEW position with its attribution's offset. `item` is NO_ITEM if no sums contain the interaction."""
        if not self.blocks or self.blocks[-1].count == BLOCK_ROWS:
            self._mix_tail()
            self.blocks.append(Block.empty())
            self._tail, self._mixed = {}, 0
        block = self.blocks[-1]
        row = block.count
        block.users[row], block.positions[row], block.offsets[row] = hash_text(user), position, offset
        block.items[row] = item
        block.count = row + 1
        self._num_positions += 1
        source, at = unpack_position(position)
        block.low, block.high = min(block.low, at), max(block.high, at)
        self._tail[position] = row
        if position > self.newest.get(source, -1):
            self.newest[source] = position

    def settle(self, position: int, item: int) -> None:
        """Set the item whose sums contain a counted position, or NO_ITEM."""
        block, row = self._at(position)
        block.write(row, item=item)

    def offset_of(self, position: int) -> int | None:
        found = self._find(position)
        return None if found is None else int(self.blocks[found[0]].offsets[found[1]])

    def undo(self, position: int) -> None:
        """Void a position, even if its interaction arrives later. The caller first strikes a counted position."""
        if position not in self._undone:
            self._undone.add(position)
            self.undone.append(position)
            self._mix.add_one(0, position, 0)

    def user_of(self, position: int) -> int:
        block, row = self._at(position)
        return int(block.users[row])

    def release(self, item: int, first: int) -> tuple[int, list[int]]:
        """Remove an item's rows from its sums, and strike rows whose attributions the log lost.

        `first` is the log's first offset. Return the number of struck rows, and the attribution offsets of the other
        rows, which still count.
        """
        rows, left = self.of_item(item), list[int]()
        for position, offset in zip(rows["positions"].tolist(), rows["offsets"].tolist(), strict=True):
            if offset < first:
                self.strike(position)
            else:
                self.settle(position, NO_ITEM)
                left.append(offset)
        return len(rows["positions"]) - len(left), left

    def covered(self, user: str, up_to: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return (position, attribution offset) of the user's counted positions at or below these offsets."""
        return [
            (position, offset)
            for position, offset, _ in self._rows_of(user)
            if position >= 0 and is_covered(up_to, *unpack_position(position))
        ]

    def give(self, position: int, user: str) -> int:
        """Assign a counted position to another pseudonym. Return the previous pseudonym's hash."""
        number, row = self._find_or_raise(position)
        block, after = self.blocks[number], hash_text(user)
        before = int(block.users[row])
        if before != after:
            if number < len(self.blocks) - 1 or row < self._mixed:
                self._mix.add_one(before, position, int(block.offsets[row]), -1)
                self._mix.add_one(after, position, int(block.offsets[row]))
            block.write(row, user=after, item=int(block.items[row]))
        return before

    def strike(self, position: int) -> tuple[int, int]:
        """Blank a counted position's row. Return the row's user hash and item."""
        number, row = self._find_or_raise(position)
        block = self.blocks[number]
        user, item = int(block.users[row]), int(block.items[row])
        if number < len(self.blocks) - 1 or row < self._mixed:
            self._mix.add_one(user, position, int(block.offsets[row]), -1)
        block.write(row, is_blank=True)
        self._tail.pop(position, None)
        self._num_positions -= 1
        return user, item

    def forget(self, user: str, up_to: Mapping[int, int]) -> None:
        """Void the user's positions up to these offsets that arrive later. The caller strikes counted positions."""
        shard = hash_text(user) % FORGOTTEN_SHARDS
        before = self._forgotten[shard].get(user, {})
        after = furthest(before, up_to)
        for sign, places in ((-1, before), (1, after)):
            for partition, offset in places.items():
                self._mix.add_one(hash_text(user), -partition - 2, offset, sign)
        self._forgotten[shard][user] = after
        self.forgotten_versions[shard] += 1

    def forgotten_up_to(self, user: str) -> dict[int, int]:
        """Return the user's forgotten offsets by partition of `interactions`."""
        return dict(self._forgotten[hash_text(user) % FORGOTTEN_SHARDS].get(user, {}))

    def of_user(self, user: str) -> tuple[list[int], set[int]]:
        """The user's counted positions, ascending, and the items whose sums contain the user."""
        rows = list(self._rows_of(user))
        return sorted(position for position, _, _ in rows if position >= 0), {item for _, _, item in rows} - {NO_ITEM}

    def of_item(self, item: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return the rows in an item's sums, in order of arrival, in O(n)."""
        parts = [
            {name: values[rows] for name, values in block.rows().items()}
            for block in self.blocks
            if len(rows := np.flatnonzero(block.items[: block.count] == item))
        ]
        return {
            name: np.concatenate([np.empty(0, dtype), *(part[name] for part in parts)])
            for name, dtype in DTYPES.items()
        }

    def counted(self) -> tuple[IntArray, IntArray]:
        """Every counted position and its attribution's offset, both (n,), by arrival."""
        positions = np.concatenate([np.empty(0, np.int64), *(block.positions[: block.count] for block in self.blocks)])
        offsets = np.concatenate([np.empty(0, np.int64), *(block.offsets[: block.count] for block in self.blocks)])
        return positions[positions >= 0], offsets[positions >= 0]

    def digest(self) -> bytes:
        """A 16-byte hash of the content, independent of the order of arrival."""
        return b"".join(word.to_bytes(8, "little") for word in self.mix())

    def forgotten(self, shard: int) -> dict[str, Mapping[int, int]]:
        """Return a copy of one shard, which maps users to their forgotten offsets."""
        return dict(self._forgotten[shard])

    def share(self, number: int) -> dict[str, npt.NDArray[np.generic]]:
        """Views of a block's rows; later changes copy the block first."""
        self.blocks[number].is_shared = True
        return self.blocks[number].rows()

    def mix(self) -> list[int]:
        self._mix_tail()
        return list(self._mix.words)

    @classmethod
    def restored(
        cls,
        blocks: Sequence[Rows],
        undone: IntArray,
        forgotten: Sequence[Mapping[str, Mapping[int, int]]],
        mix: Sequence[int],
        newest: Mapping[int, int],
    ) -> "Ledger":
        """The ledger with these parts. Raises: ValueError if they do not fit each other."""
        ledger = cls()
        for number, rows in enumerate(blocks):
            count = len(rows["positions"])
            if not 0 < count <= BLOCK_ROWS or (count < BLOCK_ROWS and number < len(blocks) - 1):
                raise ValueError(f"block {number} of {len(blocks)} has {count} rows")
            if count == BLOCK_ROWS:
                block = Block.of(rows)
            else:
                block = Block.empty()
                for name in DTYPES:
                    getattr(block, name)[:count] = rows[name]
            alive = block.positions[:count] >= 0
            ledger._num_positions += int(alive.sum())
            at = block.positions[:count][alive] & MAX_OFFSET
            block.count, block.low, block.high = count, int(at.min(initial=MAX_OFFSET)), int(at.max(initial=-1))
            ledger.blocks.append(block)
        if ledger.blocks:
            tail = ledger.blocks[-1]
            ledger._mixed = tail.count
            rows_by = enumerate(tail.positions[: tail.count].tolist())
            ledger._tail = {position: row for row, position in rows_by if position >= 0}
        ledger.undone, ledger._undone = array("q", undone.tolist()), set(undone.tolist())
        for shard, users in enumerate(forgotten):
            ledger._forgotten[shard], ledger.forgotten_versions[shard] = dict(users), int(bool(users))
        ledger._mix.words, ledger.newest = list(mix), dict(newest)
        return ledger

    def _mix_tail(self) -> None:
        if self.blocks:
            block = self.blocks[-1]
            new = slice(self._mixed, block.count)
            alive = block.positions[new] >= 0
            self._mix.add(block.users[new][alive], block.positions[new][alive], block.offsets[new][alive])
            self._mixed = block.count

    def _rows_of(self, user: str) -> Iterator[tuple[int, int, int]]:
        mark = np.uint64(hash_text(user))
        for block in self.blocks:
            rows = np.flatnonzero(block.users[: block.count] == mark)
            if len(rows):
                yield from zip(
                    block.positions[rows].tolist(),
                    block.offsets[rows].tolist(),
                    block.items[rows].tolist(),
                    strict=True,
                )

    def _at(self, position: int) -> tuple[Block, int]:
        number, row = self._find_or_raise(position)
        return self.blocks[number], row

    def _find_or_raise(self, position: int) -> tuple[int, int]:
        found = self._find(position)
        if found is None:
            raise ValueError(f"position {unpack_position(position)} does not count")
        return found

    def _find(self, position: int) -> tuple[int, int] | None:
        source, at = unpack_position(position)
        if position > self.newest.get(source, -1):
            return None
        row = self._tail.get(position)
        if row is not None:
            return len(self.blocks) - 1, row
        for number, block in enumerate(self.blocks[:-1]):
            if block.low <= at <= block.high:
                order, positions = self._sorted_block(number)
                first, end = np.searchsorted(positions, position), np.searchsorted(positions, position, "right")
                for row in order[first:end].tolist():
                    if block.positions[row] == position:
                        return number, row
        return None

    def _sorted_block(self, number: int) -> tuple[IntArray, IntArray]:
        found = self._sorted.get(number)
        if found is None:
            if len(self._sorted) >= _SORTED_BLOCKS:
                del self._sorted[next(iter(self._sorted))]
            positions = self.blocks[number].positions
            order = np.argsort(positions, kind="stable")
            found = self._sorted[number] = (order, positions[order])
        return found
