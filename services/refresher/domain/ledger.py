"""Who contributed what: for each user, the interactions that count, and up to where nothing counts any more.

It is what makes folding exactly-once (a source position is folded once), forgetting exact (it names the attributions
to read again and subtract), and a later rebuild equal. 16 bytes per interaction: per user two sorted arrays, positions
and the offsets of their attributions. It knows positions and users, not items.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from services.common.stream.position import unpack_position
from services.common.stream.retraction import is_covered
from services.refresher.domain.records import IntArray


class Standing(Enum):
    """What a position is to the ledger."""

    NEW = "new"
    COUNTED = "counted"
    VOID = "void"


@dataclass(slots=True)
class _Account:
    """One user: positions ascending, the attribution's offset beside each; up_to: forgotten so far, per partition."""

    positions: "array[int]" = field(default_factory=lambda: array("q"))
    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    up_to: dict[int, int] = field(default_factory=dict)


class Ledger:
    """The accounts of one partition of `attributions`."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._undone: set[int] = set()
        self._num_positions = 0
        # The sum of a hash of everything in here, so that a digest costs nothing and needs no order.
        self._mix = 0

    def __len__(self) -> int:
        """Interactions that count."""
        return self._num_positions

    @property
    def nbytes(self) -> int:
        """Bytes of the positions and offsets, and of the undone positions, without the users' names and objects."""
        return 16 * self._num_positions + 8 * len(self._undone)

    def standing(self, user: str, position: int) -> Standing:
        """What `position` of `user` is. Cost: O(log n) of the user's interactions."""
        if position in self._undone:
            return Standing.VOID
        account = self._accounts.get(user)
        if account is None:
            return Standing.NEW
        if account.up_to and is_covered(account.up_to, *unpack_position(position)):
            return Standing.VOID
        return Standing.COUNTED if _find(account, position) is not None else Standing.NEW

    def add(self, user: str, position: int, offset: int) -> None:
        """Count a position that stands as NEW; its attribution lies at `offset`."""
        account = self._accounts.get(user)
        if account is None:
            account = self._accounts[user] = _Account()
        positions = account.positions
        if not positions or position > positions[-1]:
            positions.append(position)
            account.offsets.append(offset)
        else:
            at = bisect_left(positions, position)
            positions.insert(at, position)
            account.offsets.insert(at, offset)
        self._num_positions += 1
        self._mix += _hash(user, position, offset)

    def offset_of(self, user: str, position: int) -> int | None:
        """Where the attribution of a counted position lies; None when it does not count."""
        account = self._accounts.get(user)
        at = None if account is None else _find(account, position)
        return None if account is None or at is None else account.offsets[at]

    def undo(self, user: str, position: int) -> None:
        """Void a position, whether it came already or comes later."""
        if position not in self._undone:
            self._undone.add(position)
            self._mix += _hash("", position, 0)
        account = self._accounts.get(user)
        at = None if account is None else _find(account, position)
        if account is not None and at is not None:
            self._mix -= _hash(user, position, account.offsets[at])
            del account.positions[at], account.offsets[at]
            self._num_positions -= 1
            self._drop_if_empty(user, account)

    def covered(self, user: str, up_to: Mapping[int, int]) -> list[tuple[int, int]]:
        """(position, attribution offset) of what counts and lies at or below these offsets of its partition."""
        account = self._accounts.get(user)
        if account is None:
            return []
        return [
            (position, offset)
            for position, offset in zip(account.positions, account.offsets, strict=True)
            if is_covered(up_to, *unpack_position(position))
        ]

    def forget(self, user: str, up_to: Mapping[int, int]) -> None:
        """Void everything of a user at or below these offsets, now and later."""
        account = self._accounts.setdefault(user, _Account())
        for partition, offset in up_to.items():
            before = account.up_to.get(partition)
            if before is None or offset > before:
                account.up_to[partition] = offset
                self._mix += _hash(user, -partition, offset) - (
                    0 if before is None else _hash(user, -partition, before)
                )
        for position, offset in self.covered(user, up_to):
            self._mix -= _hash(user, position, offset)
        kept = [
            (position, offset)
            for position, offset in zip(account.positions, account.offsets, strict=True)
            if not is_covered(up_to, *unpack_position(position))
        ]
        self._num_positions -= len(account.positions) - len(kept)
        account.positions = array("q", [position for position, _ in kept])
        account.offsets = array("q", [offset for _, offset in kept])
        self._drop_if_empty(user, account)

    def forgotten_up_to(self, user: str) -> dict[int, int]:
        """Up to where the user was forgotten, per partition of `interactions`; empty: never."""
        account = self._accounts.get(user)
        return {} if account is None else dict(account.up_to)

    def positions(self, user: str) -> list[int]:
        """The user's positions that count."""
        account = self._accounts.get(user)
        return [] if account is None else account.positions.tolist()

    def counted(self) -> tuple[IntArray, IntArray]:
        """Every position that counts with its attribution's offset, both (n,), in no particular order."""
        positions, offsets = array("q"), array("q")
        for account in self._accounts.values():
            positions += account.positions
            offsets += account.offsets
        return np.frombuffer(positions, np.int64), np.frombuffer(offsets, np.int64)

    def digest(self) -> bytes:
        """16 bytes of the content, whatever the order in which it came."""
        return (self._mix % (1 << 128)).to_bytes(16, "little")

    def to_arrays(self) -> dict[str, IntArray]:
        """The content as arrays, users in the order of `users`: `from_arrays` is the inverse.

        Nothing is sorted: one call over a million names would hold the interpreter, and with it the lease's thread.
        """
        accounts = list(self._accounts.values())
        positions, offsets = array("q"), array("q")
        for account in accounts:
            positions += account.positions
            offsets += account.offsets
        up_to = [(row, p, o) for row, account in enumerate(accounts) for p, o in sorted(account.up_to.items())]
        return {
            "lengths": np.array([len(account.positions) for account in accounts], np.int64),
            "places": np.frombuffer(positions, np.int64),
            "offsets": np.frombuffer(offsets, np.int64),
            "up_to": np.array(up_to, np.int64).reshape(-1, 3),
            "undone": np.array(sorted(self._undone), np.int64),
            "mix": np.frombuffer(self.digest(), np.int64),
        }

    def users(self) -> list[str]:
        """The users' pseudonyms, in the order in which they came."""
        return list(self._accounts)

    @classmethod
    def from_arrays(cls, users: Iterable[str], arrays: Mapping[str, IntArray]) -> "Ledger":
        """Raises: ValueError when the arrays do not fit each other."""
        ledger = cls()
        pieces = _pieces(arrays["lengths"], arrays["places"], arrays["offsets"])
        for user, (positions, offsets) in zip(users, pieces, strict=True):
            ledger._accounts[user] = _Account(positions=array("q", positions), offsets=array("q", offsets))
        accounts = list(ledger._accounts.values())
        for row, partition, offset in arrays["up_to"].tolist():
            accounts[row].up_to[partition] = offset
        ledger._undone = set(arrays["undone"].tolist())
        ledger._num_positions = len(arrays["places"])
        ledger._mix = int.from_bytes(np.asarray(arrays["mix"], np.int64).tobytes(), "little")
        return ledger

    def _drop_if_empty(self, user: str, account: _Account) -> None:
        if not account.positions and not account.up_to:
            del self._accounts[user]


def _pieces(lengths: IntArray, positions: IntArray, offsets: IntArray) -> Iterator[tuple[list[int], list[int]]]:
    ends = np.cumsum(lengths)
    if (
        len(positions) != len(offsets)
        or (len(ends) and ends[-1] != len(positions))
        or (not len(ends) and len(positions))
    ):
        raise ValueError(
            f"ledger holds {len(positions)} positions, {len(offsets)} offsets; lengths sum to {lengths.sum()}"
        )
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=False):
        yield positions[start:end].tolist(), offsets[start:end].tolist()


def _hash(user: str, position: int, offset: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{user}\0{position}\0{offset}".encode(), digest_size=16).digest(), "little")


def _find(account: _Account, position: int) -> int | None:
    at = bisect_left(account.positions, position)
    return at if at < len(account.positions) and account.positions[at] == position else None
