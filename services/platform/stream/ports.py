"""Reading topics, as handlers and loops see it: one port for Kafka (`reader.py`) and memory (`in_memory.py`).

Methods that speak of one topic take its name; "" is the reader's first topic. Offsets are maps from partition to
offset. A reader begins where `seek` or `assign` says. Every method raises DependencyUnavailable when the broker does
not answer; a reader that has been connected may find nothing to poll instead.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from services.platform.stream.record import SourceRecord

Offsets = Mapping[int, int]


class Reader(Protocol):
    """Some topics, for one thread."""

    def partitions(self, topic: str = "") -> Sequence[int]:
        """The assigned partitions."""

    def num_partitions(self, topic: str = "") -> int:
        """How many partitions the topic has, assigned or not."""

    def end_offsets(self, topic: str = "") -> Offsets:
        """One past the last record of each assigned partition."""

    def known_end_offsets(self, topic: str = "") -> Offsets:
        """The end offsets that polling has told so far, without asking; a partition may be absent."""

    def bounds(self, partitions: Collection[int], topic: str = "") -> Mapping[int, tuple[int, int]]:
        """First offset still there, and one past the last record."""

    def records_at(self, offsets: Offsets, topic: str = "") -> Mapping[int, SourceRecord]:
        """The record at one offset of each of these partitions, where there is one; polls go on where they are."""

    def assign(self, offsets: Offsets, topic: str = "") -> None:
        """Poll these partitions of the topic alone, each from its offset; other topics go on where they are."""

    def seek(self, offsets: Offsets, topic: str = "") -> None:
        """Read on from these offsets (records that retention took away are skipped)."""

    def poll(self, timeout_ms: int, max_records: int | None = None, *, only: str = "") -> Sequence[SourceRecord]:
        """The next records, in order within each partition; empty when none came in time. only: of this topic.

        Another topic of the same name that is shorter than what was read of the first comes from its start.
        """

    def positions(self, topic: str = "") -> Offsets:
        """The offset of each assigned partition's next record for this reader."""

    def read_to_end(self, topic: str = "") -> list[SourceRecord]:
        """All from this reader's positions to the topic's present end. After an error it is read again."""

    def committed(self, topic: str = "") -> Offsets:
        """The group's committed offset of each assigned partition; 0 where there is none."""

    def commit(self, offsets: Offsets, topic: str = "") -> None:
        """Publish progress for whoever reads next, or watches; not waited for."""

    def dead_letter(self, record: SourceRecord, reason: str) -> None:
        """Write a record to the dead letters, unless that was done before. A reader without a producer does nothing:
        another process does it."""

    def close(self) -> None:
        """Give the connections up; the next call makes new ones and goes on where this reader was."""
