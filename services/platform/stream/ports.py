"""The ports for reading topics (`services/contracts/topic_reader.py`) and for sharing their partitions between
processes (`services/user_state/leases.py`). Each has an adapter in memory for tests.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.platform.stream.records import SourceRecord

Offsets = Mapping[int, int]


class Reader(Protocol):
    """Reads some topics, from the offsets given to `seek` or `assign`. Not thread-safe.

    topic: "" means the first topic. Every method raises DependencyUnavailable if no broker answers; `poll` may return
    nothing instead.
    """

    def partitions(self, topic: str = "") -> Sequence[int]:
        """Return the assigned partitions."""

    def num_partitions(self, topic: str = "") -> int:
        """Return the number of partitions, assigned or not."""

    def end_offsets(self, topic: str = "") -> Offsets:
        """Return one past the last record of each assigned partition."""

    def known_end_offsets(self, topic: str = "") -> Offsets:
        """Return the ends known from polling; a partition may be absent."""

    def bounds(self, partitions: Collection[int], topic: str = "") -> Mapping[int, tuple[int, int]]:
        """Return the first offset, and one past the last record."""

    def records_at(self, offsets: Offsets, topic: str = "") -> Mapping[int, SourceRecord]:
        """Return the record at each partition's offset, if it exists. Poll positions do not change."""

    def assign(self, offsets: Offsets, topic: str = "") -> None:
        """Poll only these partitions of the topic, from these offsets."""

    def seek(self, offsets: Offsets, topic: str = "") -> None:
        """Continue from these offsets, or after the records that retention deleted."""

    def poll(self, timeout_ms: int, max_records: int | None = None, *, only: str = "") -> Sequence[SourceRecord]:
        """Return the next records, in order per partition. only: poll only this topic.

        A recreated topic that is shorter than the position is read from its start.
        """

    def positions(self, topic: str = "") -> Offsets:
        """Return the next record's offset per partition."""

    def read_to_end(self, topic: str = "") -> list[SourceRecord]:
        """Return all records up to the present end. After an error, the next call reads them again."""

    def committed(self, topic: str = "") -> Offsets:
        """Return the committed offsets; 0 for a partition without one."""

    def commit(self, offsets: Offsets, topic: str = "") -> None:
        """Publish progress, without waiting for the broker."""

    def dead_letter(self, record: SourceRecord, reason: str) -> None:
        """Write a record to the dead letters once, if the reader has a producer."""

    def close(self) -> None:
        """Close; the next call connects again at this reader's positions."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The leased partitions. terms: a number for each partition, which increases with every owner.

    surplus: how many of the partitions should go to other processes.
    """

    terms: Mapping[int, int]
    surplus: int = 0


class Leases(Protocol):
    """Leases on partitions. Thread-safe."""

    def start(self, partitions: Sequence[int]) -> None:
        """Join the group, lease free partitions at once, and renew the leases in the background.

        Raises: DependencyUnavailable, without joining.
        """

    def holding(self) -> Holding:
        """Return the leased partitions."""

    def release(self, partitions: Collection[int]) -> None:
        """Release partitions at once."""

    def close(self) -> None:
        """Release everything and leave the group."""
