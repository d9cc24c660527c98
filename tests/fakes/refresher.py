"""The refresher's ports in memory: the same rules as Kafka, Redis and files have, without any of them."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from services.contracts.topics.index_deltas import IndexDelta
from services.platform.errors import Conflict, PreconditionFailed
from services.platform.stream.records import DeadLetter
from services.refresher.checkpoint import from_file, to_file
from services.refresher.domain.partition import Partition
from services.refresher.domain.records import Entry, Interaction, Listing
from services.refresher.domain.rules import Rules
from services.refresher.handlers.checkpoints import restore, snapshot
from services.refresher.ports import Polled, StoredCheckpoint


def to_bytes(state: Partition) -> bytes:
    """A whole checkpoint as one file."""
    whole = snapshot(state, {})
    return to_file(whole.values, {name: data for name, data in whole.parts().items() if data is not None})


def from_bytes(data: bytes, number: int, rules: Rules, listed: Container[str]) -> Partition:
    """The inverse of `to_bytes`."""
    return restore(*from_file(data), number, rules, listed)


class MemoryLog:
    """Both topics: append entries and listings, read them as a consumer would."""

    def __init__(self, num_partitions: int = 1, *, poll_records: int = 512) -> None:
        self.entries: list[list[Entry]] = [[] for _ in range(num_partitions)]
        self.listed: list[Listing] = []
        self._poll_records = poll_records
        self._next: dict[int, int] = {}
        self._next_listing = 0
        self._first: dict[int, int] = {}
        self._known_ends: dict[int, int] = {}

    def append(self, partition: int, entry: Entry) -> int:
        """Write one entry; its own offset is replaced by the one it gets, which is returned."""
        offset = len(self.entries[partition])
        if isinstance(entry, DeadLetter):
            entry = DeadLetter(replace(entry.record, offset=offset), entry.reason)
        else:
            entry = replace(entry, offset=offset)
        self.entries[partition].append(entry)
        return offset

    def put(self, item_id: str, *, withdrawn: bool = False, title: str = "") -> None:
        """Write one listing."""
        self.listed.append(Listing(item_id, withdrawn, title))

    def expire(self, partition: int, below: int) -> None:
        """Retention takes the records below this offset away."""
        self._first[partition] = below

    def partitions(self) -> Sequence[int]:
        return range(len(self.entries))

    def listings(self) -> Sequence[Listing]:
        self._next_listing = len(self.listed)
        return list({listing.item_id: listing for listing in self.listed}.values())

    def assign(self, offsets: Mapping[int, int]) -> None:
        self._next = dict(offsets)

    def poll(self, timeout_ms: int) -> Polled:
        polled = Polled(listings=self.listed[self._next_listing :])
        self._next_listing = len(self.listed)
        for partition, (first, end) in self.bounds(self._next).items():
            start = self._next[partition] if first <= self._next[partition] <= end else first
            batch = self.entries[partition][start : start + self._poll_records]
            if batch:
                polled.entries[partition] = batch
                self._next[partition] = start + len(batch)
            self._known_ends[partition] = end
        return polled

    def bounds(self, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        return {partition: (self._first.get(partition, 0), len(self.entries[partition])) for partition in partitions}

    def known_ends(self) -> Mapping[int, int]:
        return {partition: end for partition, end in self._known_ends.items() if partition in self._next}

    def read_again(self, partition: int, offsets: Sequence[int]) -> Mapping[int, Interaction]:
        found: dict[int, Interaction] = {}
        first, end = self.bounds([partition])[partition]
        for offset in offsets:
            if not first <= offset < end:
                raise PreconditionFailed(f"offset {offset} of partition {partition} is not there any more")
            entry = self.entries[partition][offset]
            if not isinstance(entry, Interaction):
                raise PreconditionFailed(f"offset {offset} of partition {partition} holds no interaction")
            found[offset] = entry
        return found

    def close(self) -> None:
        """Nothing is held."""


class MemoryOutbox:
    """Keeps what was published, repetitions included."""

    def __init__(self) -> None:
        self.deltas: list[IndexDelta] = []
        # In the topic's order: a tombstone is its key.
        self.records: list[IndexDelta | bytes] = []
        self.unreadable: list[DeadLetter] = []

    def publish(
        self, deltas: Sequence[IndexDelta], unreadable: Sequence[DeadLetter], tombstones: Sequence[bytes] = ()
    ) -> None:
        self.deltas += deltas
        self.records += [*tombstones, *deltas]
        self.unreadable += unreadable

    def close(self) -> None:
        """Nothing is held."""


class MemoryCheckpoints:
    """The two newest of each partition, as files. `opened()` is another refresher's, on the same place."""

    def __init__(self) -> None:
        self.saved: dict[int, list[bytes]] = {}
        self._owners: dict[int, object] = {}
        self._opened: set[int] = set()
        self._bases: dict[int, Mapping[str, bytes]] = {}

    def opened(self) -> "MemoryCheckpoints":
        other = type(self)()
        other.saved, other._owners = self.saved, self._owners
        return other

    def save(self, partition: int, values: Mapping[str, Any], parts: Mapping[str, bytes | None]) -> None:
        if partition not in self._opened:
            self._open(partition)
        if self._owners[partition] is not self:
            self._opened.discard(partition)
            raise Conflict(f"another refresher has opened partition {partition}")
        base = self._bases[partition]
        whole = {name: base[name] if data is None else data for name, data in parts.items()}
        self.saved[partition] = [to_file(values, whole), *self.saved.get(partition, [])][:2]
        self._bases[partition] = whole

    def _open(self, partition: int) -> None:
        self._owners[partition], self._bases[partition] = self, {}
        self._opened.add(partition)

    def load(self, partition: int) -> Iterator[StoredCheckpoint]:
        self._open(partition)
        for place, data in enumerate(list(self.saved.get(partition, []))):
            yield StoredCheckpoint(f"checkpoint {place} of partition {partition}", partial(self._read, partition, data))

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, partition: int, data: bytes) -> tuple[Mapping[str, Any], Mapping[str, bytes]]:
        values, parts = from_file(data)
        self._bases[partition] = parts
        return values, parts
