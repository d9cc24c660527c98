"""The reading port in memory, for tests and for trying loops without a stack: topics that are written to as lists."""

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from services.platform.errors import DependencyUnavailable
from services.platform.stream.ports import Offsets
from services.platform.stream.records import DeadLetter, SourceRecord


class MemoryTopics:
    """Implements `ports.Reader`. `down` makes every call fail; `per_poll` bounds what a poll brings of a partition."""

    def __init__(self, topics: Mapping[str, int], *, per_poll: int = 1 << 30) -> None:
        """topics: name -> number of partitions; the first one is the default."""
        self.logs: dict[str, list[list[SourceRecord]]] = {
            name: [[] for _ in range(count)] for name, count in topics.items()
        }
        self.topic, self.per_poll, self.down = next(iter(topics)), per_poll, False
        self.assigned: dict[str, Collection[int]] = {name: range(count) for name, count in topics.items()}
        self.committed_to: dict[str, dict[int, int]] = {name: {} for name in topics}
        self.dead_letters: list[DeadLetter] = []
        self._next: dict[tuple[str, int], int] = {}
        self._known_ends: dict[str, Offsets] = {}
        self._first: dict[tuple[str, int], int] = {}
        self._gone: set[tuple[str, int, int]] = set()

    def reader(self, *, partitions: Collection[int] | None = None) -> Self:
        """Another reader of the same records, in the same group, that has read nothing. partitions: of every topic."""
        other = copy.copy(self)
        other.assigned = {
            name: range(len(log)) if partitions is None else partitions for name, log in self.logs.items()
        }
        other._next, other._known_ends = {}, {}
        return other

    @property
    def commits(self) -> dict[int, int]:
        """What was committed of the first topic."""
        return self.committed_to[self.topic]

    def expire(self, topic: str, partition: int, below: int) -> None:
        """Retention takes the records below this offset away."""
        self._first[topic, partition] = below

    def compact(self, topic: str) -> None:
        """Every record goes that has a later one of the same key; offsets stay."""
        for partition, log in enumerate(self.logs[topic]):
            newest = {record.key: record.offset for record in log}
            self._gone |= {(topic, partition, one.offset) for one in log if newest[one.key] != one.offset}

    def write(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        partition: int = 0,
        written_ms: int = 0,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> int:
        """Write one record; return its offset."""
        log = self.logs[topic][partition]
        log.append(SourceRecord(topic, partition, len(log), written_ms, key, value, headers))
        return len(log) - 1

    def partitions(self, topic: str = "") -> Sequence[int]:
        self._log(topic)
        return sorted(self.assigned[topic or self.topic])

    def num_partitions(self, topic: str = "") -> int:
        return len(self._log(topic))

    def end_offsets(self, topic: str = "") -> Offsets:
        return {partition: len(self._log(topic)[partition]) for partition in self.partitions(topic)}

    def known_end_offsets(self, topic: str = "") -> Offsets:
        return self._known_ends.get(topic or self.topic, {})

    def bounds(self, partitions: Collection[int], topic: str = "") -> Mapping[int, tuple[int, int]]:
        name = topic or self.topic
        return {one: (self._first.get((name, one), 0), len(self._log(name)[one])) for one in partitions}

    def records_at(self, offsets: Offsets, topic: str = "") -> Mapping[int, SourceRecord]:
        log = self._log(topic)
        return {
            partition: log[partition][at]
            for partition, at in offsets.items()
            if 0 <= at < len(log[partition]) and (topic or self.topic, partition, at) not in self._gone
        }

    def assign(self, offsets: Offsets, topic: str = "") -> None:
        self.seek(offsets, topic)
        self.assigned[topic or self.topic] = list(offsets)

    def seek(self, offsets: Offsets, topic: str = "") -> None:
        self._log(topic)
        self._next.update({(topic or self.topic, partition): offset for partition, offset in offsets.items()})

    def poll(self, timeout_ms: int, max_records: int | None = None, *, only: str = "") -> Sequence[SourceRecord]:
        found: list[SourceRecord] = []
        for topic in (only,) if only else tuple(self.logs):
            for partition in self.partitions(topic):
                log = self._log(topic)[partition]
                first, start = self._first.get((topic, partition), 0), self._next.get((topic, partition), 0)
                if not first <= start <= len(log):
                    start = first  # as a consumer does that finds its position gone
                room = self.per_poll if max_records is None else min(self.per_poll, max_records - len(found))
                batch = log[start : start + room]
                self._next[topic, partition] = start + len(batch)
                found += [record for record in batch if (topic, partition, record.offset) not in self._gone]
            self._known_ends[topic] = self.end_offsets(topic)
        if not found:
            time.sleep(min(timeout_ms, 1) / 1000)
        return found

    def positions(self, topic: str = "") -> Offsets:
        return {partition: self._next.get((topic or self.topic, partition), 0) for partition in self.partitions(topic)}

    def read_to_end(self, topic: str = "") -> list[SourceRecord]:
        found: list[SourceRecord] = []
        while any(at < self.end_offsets(topic)[partition] for partition, at in self.positions(topic).items()):
            found += self.poll(0, only=topic or self.topic)
        return found

    def committed(self, topic: str = "") -> Offsets:
        committed = self.committed_to[topic or self.topic]
        return {partition: committed.get(partition, 0) for partition in self.partitions(topic)}

    def commit(self, offsets: Offsets, topic: str = "") -> None:
        self.committed_to[topic or self.topic].update(offsets)

    def dead_letter(self, record: SourceRecord, reason: str) -> None:
        if record.offset >= self.committed(record.topic)[record.partition]:
            self.dead_letters.append(DeadLetter(record, reason))
            self.commit({record.partition: record.offset + 1}, record.topic)

    def close(self) -> None:
        """Nothing is held."""

    def _log(self, topic: str) -> list[list[SourceRecord]]:
        if self.down:
            raise DependencyUnavailable("Kafka is away")
        return self.logs[topic or self.topic]
