"""A cluster of three brokers behind kafka-python's names, as far as making topics and reading one of them goes.

Records may belong to a transaction that was aborted: as with the real client, a consumer sees them unless it asks for
committed ones.
"""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kafka import TopicPartition

FetchedRecord = namedtuple("FetchedRecord", "topic partition offset timestamp key value headers")
BROKERS = [{"node_id": number, "host": "broker", "port": 9092 + number} for number in range(3)]


class RecordingAdmin:
    """An admin client of a cluster of three brokers without topics. Keeps what it is asked to make."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def describe_cluster(self) -> Mapping[str, Any]:
        return {"brokers": BROKERS, "cluster_id": "three", "controller_id": 0}

    def list_topics(self) -> list[str]:
        return list(self.made)

    def create_topics(self, topics: Sequence[Any], **_: Any) -> Any:
        self.made |= {topic.name: topic for topic in topics}
        return SimpleNamespace(topic_errors=[(topic.name, 0, "") for topic in topics])

    def close(self) -> None: ...


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
