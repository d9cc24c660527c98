"""The port for reading topics (`services/contracts/topic_reader.py`; in memory for tests).

Methods take a topic's name; "" is the first one. Offsets map partition to offset. `seek` or `assign` says where a
reader begins. Every method raises DependencyUnavailable without the broker; `poll` may return nothing instead.
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
        """Return the number of partitions, assigned or not."""

    def end_offsets(self, topic: str = "") -> Offsets:
        """Return one past the last record of each assigned partition."""

    def known_end_offsets(self, topic: str = "") -> Offsets:
        """Return the ends known from polling; a partition may be absent."""

    def bounds(self, partitions: Collection[int], topic: str = "") -> Mapping[int, tuple[int, int]]:
        """Return the first offset, and one past the last record."""

    def records_at(self, offsets: Offsets, topic: str = "") -> Mapping[int, SourceRecord]:
        """Return the record at one offset of each partition, if it exists; poll positions do not change."""

    def assign(self, offsets: Offsets, topic: str = "") -> None:
        """Poll only these partitions of the topic, from these offsets."""

    def seek(self, offsets: Offsets, topic: str = "") -> None:
        """Continue from these offsets (skipping records that retention deleted)."""

    def poll(self, timeout_ms: int, max_records: int | None = None, *, only: str = "") -> Sequence[SourceRecord]:
        """Return the next records, in order per partition. only: poll this topic.

        A recreated topic shorter than the position is read from its start.
        """

    def positions(self, topic: str = "") -> Offsets:
        """Return the next record's offset per partition."""

    def read_to_end(self, topic: str = "") -> list[SourceRecord]:
        """Return all records up to the present end; after an error they are read again."""

    def committed(self, topic: str = "") -> Offsets:
        """Return the committed offsets; 0 without one."""

    def commit(self, offsets: Offsets, topic: str = "") -> None:
        """Publish progress, without waiting for the broker."""

    def dead_letter(self, record: SourceRecord, reason: str) -> None:
        """Write a record to the dead letters once, if the reader has a producer."""

    def close(self) -> None:
        """Close; the next call connects again at this reader's positions."""
