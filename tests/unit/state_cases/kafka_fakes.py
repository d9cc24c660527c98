"""A partition behind the names of kafka-python, as far as reading it goes.

Records may belong to a transaction that was aborted: as with the real client, a consumer sees them unless it asks for
committed ones.
"""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any

from kafka import TopicPartition

FetchedRecord = namedtuple("FetchedRecord", "topic partition offset timestamp key value headers")


class OnePartition:
    """A partition of a topic: keys, values, and whether the record's transaction was aborted."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.log: list[tuple[FetchedRecord, bool]] = []

    def append(self, key: bytes, value: bytes, recorded_ms: int, *, aborted: bool = False) -> None:
        record = FetchedRecord(self.topic, 0, len(self.log), recorded_ms, key, value, [])
        self.log.append((record, aborted))


class PartitionConsumer:
    """What `TopicReader` uses of kafka-python's consumer, over one partition."""

    def __init__(self, partition: OnePartition, **config: Any) -> None:
        self._log, self._place = partition.log, TopicPartition(partition.topic, 0)
        self._sees_aborted = config.get("isolation_level", "read_uncommitted") != "read_committed"
        self._next = 0

    def partitions_for_topic(self, topic: str) -> set[int]:
        return {0}

    def assign(self, places: Sequence[TopicPartition]) -> None: ...

    def assignment(self) -> set[TopicPartition]:
        return {self._place}

    def committed(self, place: TopicPartition, **_: Any) -> int | None:
        return None

    def commit_async(self, offsets: Mapping[TopicPartition, Any]) -> None: ...

    def position(self, place: TopicPartition, **_: Any) -> int:
        return self._next

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._next = offset

    def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[FetchedRecord]]:
        batch = self._log[self._next : self._next + max_records]
        self._next += len(batch)
        records = [record for record, aborted in batch if self._sees_aborted or not aborted]
        return {self._place: records} if records else {}

    def beginning_offsets(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return {self._place: 0}

    def end_offsets(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return {self._place: len(self._log)}

    def highwater(self, place: TopicPartition) -> int:
        return len(self._log)

    def close(self, **_: Any) -> None: ...
