"""The port for reading topics, implemented for Kafka (`services/contracts/topic_reader.py`) and in memory for tests.

Methods of one topic take its name; "" is the reader's first topic. Offsets map partition to offset. A reader begins
where `seek` or `assign` says. Every method raises DependencyUnavailable if the broker does not answer; a connected
reader's `poll` may return nothing instead.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from services.platform.stream.record import SourceRecord

Offsets = Mapping[int, int]


class Reader(Protocol):
    """Reads some topics. Not thread-safe."""

    def partitions(self, topic: str = "") -> Sequence[int]:
        """Return the assigned partitions."""

    def num_partitions(self, topic: str = "") -> int:
        """Return the topic's number of partitions, assigned or not."""

    def end_offsets(self, topic: str = "") -> Offsets:
        """Return one past the last record of each assigned partition."""

    def known_end_offsets(self, topic: str = "") -> Offsets:
        """Return the end offsets known from polling, without asking; a partition may be absent."""

    def bounds(self, partitions: Collection[int], topic: str = "") -> Mapping[int, tuple[int, int]]:
        """Return the first offset, and one past the last record."""

    def records_at(self, offsets: Offsets, topic: str = "") -> Mapping[int, SourceRecord]:
        """Return the record at one offset of each of these partitions, if it exists; poll positions do not change."""

    def assign(self, offsets: Offsets, topic: str = "") -> None:
        """Poll only these partitions of the topic, each from its offset; other topics do not change."""

    def seek(self, offsets: Offsets, topic: str = "") -> None:
        """Continue from these offsets (skipping records that retention deleted)."""

    def poll(self, timeout_ms: int, max_records: int | None = None, *, only: str = "") -> Sequence[SourceRecord]:
        """Return the next records, in order per partition; none after the timeout. only: poll only this topic.

        A recreated topic that is shorter than the position is read from its start.
        """

    def positions(self, topic: str = "") -> Offsets:
        """Return the offset of each assigned partition's next record."""

    def read_to_end(self, topic: str = "") -> list[SourceRecord]:
        """Return all records from this reader's positions to the topic's present end. After an error they are read
        again.
        """

    def committed(self, topic: str = "") -> Offsets:
        """Return the group's committed offset of each assigned partition; 0 without one."""

    def commit(self, offsets: Offsets, topic: str = "") -> None:
        """Publish progress for the next reader and for monitoring, without waiting for the broker."""

    def dead_letter(self, record: SourceRecord, reason: str) -> None:
        """Write a record to the dead letters once. A reader without a producer does nothing: another process writes
        them.
        """

    def close(self) -> None:
        """Close the connections; the next call connects again and continues at this reader's positions."""
