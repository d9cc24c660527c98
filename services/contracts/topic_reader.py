"""Read Kafka with assigned partitions, without group membership.

kafka-python's `poll` hides a lost broker, so an empty poll is no error. Other calls raise DependencyUnavailable after a
few seconds.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from services.contracts.topics import ensure_topics
from services.contracts.topics.dead_letters import dead_letter
from services.platform.errors import DependencyUnavailable
from services.platform.stream.kafka import REST_MS, Brokers, BulkProducer, build_consumer
from services.platform.stream.ports import Offsets
from services.platform.stream.reading import SILENCE_S
from services.platform.stream.records import DeadLetter, SourceRecord
from services.platform.stream.topic import Replicas

_ANSWER_MS = 5_000
_ASIDE_MS = 500
# Fetch limit per partition for reading single records. Kafka returns a larger record all the same.
_ASIDE_BYTES = 4_096
# At a topic's end, the prefetch delays the next request by at most this.
_ASIDE_REST_MS = 10


class TopicReader:
    """Implements `ports.Reader`; connects on first use."""

    def __init__(
        self,
        bootstrap: Brokers,
        *topics: str,
        group_id: str,
        client_id: str = "freshet",
        partitions: Sequence[int] | None = None,
        makes_topics: Replicas | None = None,
        window_ms: int = 0,
        rest_ms: int = REST_MS,
        pause_ms: int = 0,
        max_poll_records: int = 512,
        max_partition_bytes: int = 1 << 20,
        dead_letters: BulkProducer | None = None,
        connect: Callable[..., KafkaConsumer] = build_consumer,
    ) -> None:
        """partitions: the partitions to read of every topic; None means all.
        makes_topics: create missing topics with these replicas; None means to wait until they exist.
        window_ms: how long the broker gathers records before it answers.
        rest_ms: how long the broker waits for the first record; the next request waits for that answer.
        pause_ms: pause before the next read of a busy stream, so that records gather.
        dead_letters: the producer of dead letters; `close` also closes it.
        """
        self._bootstrap, self._topics = bootstrap, topics
        self._makes_topics, self._connect = makes_topics, connect
        self._options = {
            "group_id": group_id,
            "client_id": client_id,
            "partitions": partitions,
            "window_ms": window_ms,
            "rest_ms": rest_ms,
            "max_poll_records": max_poll_records,
            "max_partition_bytes": max_partition_bytes,
        }
        self._pause_s, self._max_records, self._producer = pause_ms / 1000, max_poll_records, dead_letters
        self._consumer: KafkaConsumer | None = None
        # Reads single records, so that `_consumer` keeps its prefetched records.
        self._aside: KafkaConsumer | None = None
        self._busy = False
        # A new consumer gets this assignment and these positions; `poll` pauses topics again.
        self._assigned: list[TopicPartition] | None = None
        self._next: dict[TopicPartition, int] = {}
        self._only = ""
        self._dead_lettered_to: dict[TopicPartition, int] = {}

    def partitions(self, topic: str = "") -> Sequence[int]:
        with self._errors() as consumer:
            return [tp.partition for tp in self._of(consumer, topic)]

    def num_partitions(self, topic: str = "") -> int:
        with self._errors() as consumer:
            return len(consumer.partitions_for_topic(topic or self._topics[0]) or ())

    def end_offsets(self, topic: str = "") -> Offsets:
        with self._errors() as consumer:
            return {tp.partition: end for tp, end in consumer.end_offsets(self._of(consumer, topic)).items()}

    def known_end_offsets(self, topic: str = "") -> Offsets:
        with self._errors() as consumer:
            known = {tp.partition: consumer.highwater(tp) for tp in self._of(consumer, topic)}
        return {partition: end for partition, end in known.items() if end is not None}

    def bounds(self, partitions: Collection[int], topic: str = "") -> Mapping[int, tuple[int, int]]:
        wanted = [TopicPartition(topic or self._topics[0], partition) for partition in partitions]
        with self._errors() as consumer:
            firsts, ends = consumer.beginning_offsets(wanted), consumer.end_offsets(wanted)
        return {tp.partition: (firsts[tp], ends[tp]) for tp in wanted}

    def offset_at(self, partition: int, time_ms: int) -> int | None:
        """Return the first topic's first offset at this time or later; None if there is none."""
        place = TopicPartition(self._topics[0], partition)
        with self._errors() as consumer:
            found = consumer.offsets_for_times({place: time_ms})[place]
        return None if found is None else int(found.offset)

    def records_at(self, offsets: Offsets, topic: str = "") -> Mapping[int, SourceRecord]:
        if not offsets:
            return {}
        wanted = {TopicPartition(topic or self._topics[0], partition): at for partition, at in offsets.items()}
        found: dict[int, SourceRecord] = {}
        deadline, asks = time.monotonic() + SILENCE_S, True
        with self._errors():
            consumer = self._connected_aside()
            consumer.assign(list(wanted))
            consumer.resume(*consumer.paused())
            for tp, offset in wanted.items():
                consumer.seek(tp, offset)
            while wanted:
                batches = consumer.poll(timeout_ms=_ASIDE_MS, max_records=1)
                for tp, batch in batches.items():
                    offset = wanted.pop(tp, -1)
                    # For a missing record Kafka returns the next one; for an offset beyond the end, the first one.
                    if offset >= 0 and batch[0].offset == offset:
                        found[tp.partition] = _record(tp, batch[0])
                    consumer.pause(tp)
                if not batches and asks:
                    # An empty poll may mean the topic's end or a slow broker.
                    ends, asks = consumer.end_offsets(list(wanted)), False
                    wanted = {tp: offset for tp, offset in wanted.items() if offset < ends[tp]}
                if wanted and time.monotonic() > deadline:
                    raise DependencyUnavailable(f"Kafka does not give {wanted}")
        return found

    def assign(self, offsets: Offsets, topic: str = "") -> None:
        topic = topic or self._topics[0]
        with self._errors() as consumer:
            others = [tp for tp in consumer.assignment() if tp.topic != topic]
            self._assigned = [*others, *(TopicPartition(topic, partition) for partition in offsets)]
            consumer.assign(self._assigned)
        self.seek(offsets, topic)

    def seek(self, offsets: Offsets, topic: str = "") -> None:
        with self._errors() as consumer:
            for partition, offset in offsets.items():
                tp = TopicPartition(topic or self._topics[0], partition)
                consumer.seek(tp, offset)
                self._next[tp] = offset

    def poll(self, timeout_ms: int, max_records: int | None = None, *, only: str = "") -> Sequence[SourceRecord]:
        if self._busy and timeout_ms:
            time.sleep(self._pause_s)
        wanted = max_records or self._max_records
        with self._errors() as consumer:
            if only != self._only:
                consumer.resume(*consumer.paused())
                consumer.pause(*(tp for tp in consumer.assignment() if only and tp.topic != only))
                self._only = only
            batches = consumer.poll(timeout_ms=timeout_ms, max_records=wanted)
        records = [_record(tp, one) for tp, batch in batches.items() for one in batch]
        self._next.update({tp: batch[-1].offset + 1 for tp, batch in batches.items() if batch})
        self._busy = 0 < len(records) < wanted
        return records

    def positions(self, topic: str = "") -> Offsets:
        with self._errors() as consumer:
            found = {tp.partition: consumer.position(tp, timeout_ms=_ANSWER_MS) for tp in self._of(consumer, topic)}
        if None in found.values():
            raise DependencyUnavailable("Kafka did not say where its topic begins")
        return found

    def read_to_end(self, topic: str = "") -> list[SourceRecord]:
        topic = topic or self._topics[0]
        start, ends = dict(self._next), self.end_offsets(topic)
        found: list[SourceRecord] = []
        deadline = time.monotonic() + SILENCE_S
        try:
            # Compaction deletes records: positions, not counts, show the end.
            while any(at < ends.get(partition, 0) for partition, at in self.positions(topic).items()):
                records = self.poll(200, only=topic)
                found += records
                if records:
                    deadline = time.monotonic() + SILENCE_S
                elif time.monotonic() > deadline:
                    raise DependencyUnavailable(f"Kafka gave {topic!r} up to {self.positions(topic)} of {ends} only")
        except DependencyUnavailable:
            self.close()
            self._next = start
            raise
        return found

    def committed(self, topic: str = "") -> Offsets:
        with self._errors() as consumer:
            assigned = self._of(consumer, topic)
            return {tp.partition: consumer.committed(tp, timeout_ms=_ANSWER_MS) or 0 for tp in assigned}

    def commit(self, offsets: Offsets, topic: str = "") -> None:
        if offsets:
            with self._errors() as consumer:
                consumer.commit_async(
                    {
                        tp: OffsetAndMetadata(offsets[tp.partition], "", -1)
                        for tp in self._of(consumer, topic)
                        if tp.partition in offsets
                    }
                )

    def dead_letter(self, record: SourceRecord, reason: str) -> None:
        if self._producer is None:
            return
        tp = TopicPartition(record.topic, record.partition)
        if tp not in self._dead_lettered_to:
            self._dead_lettered_to[tp] = self.committed(record.topic)[record.partition]
        if record.offset >= self._dead_lettered_to[tp]:
            self._producer.send_many([dead_letter(DeadLetter(record, reason))])
            self._dead_lettered_to[tp] = record.offset + 1
            self.commit({record.partition: record.offset + 1}, record.topic)

    def close(self) -> None:
        consumers, self._consumer, self._aside = (self._consumer, self._aside), None, None
        self._only, self._dead_lettered_to = "", {}
        for consumer in consumers:
            if consumer is not None:
                with contextlib.suppress(Exception):
                    consumer.close(autocommit=False, timeout_ms=500)
        if self._producer is not None:
            self._producer.close()

    def _of(self, consumer: KafkaConsumer, topic: str) -> list[TopicPartition]:
        return sorted(tp for tp in consumer.assignment() if tp.topic == (topic or self._topics[0]))

    def _connected(self) -> KafkaConsumer:
        if self._consumer is None:
            if self._makes_topics is not None:
                ensure_topics(self._bootstrap, replicas=self._makes_topics)
            consumer = self._connect(self._bootstrap, *self._topics, **self._options)
            if self._assigned is not None:
                consumer.assign(self._assigned)
            for tp, offset in self._next.items():
                if tp in consumer.assignment():
                    consumer.seek(tp, offset)
            self._consumer = consumer
        return self._consumer

    def _connected_aside(self) -> KafkaConsumer:
        if self._aside is None:
            options = self._options | {
                "window_ms": 0,
                "rest_ms": _ASIDE_REST_MS,
                "max_partition_bytes": _ASIDE_BYTES,
            }
            self._aside = self._connect(self._bootstrap, *self._topics, **options)
        return self._aside

    @contextlib.contextmanager
    def _errors(self) -> Iterator[KafkaConsumer]:
        try:
            yield self._connected()
        except (KafkaError, OSError) as exc:
            self.close()
            raise DependencyUnavailable(f"Kafka does not answer: {type(exc).__name__}: {exc}") from exc


def _record(tp: TopicPartition, one: Any) -> SourceRecord:
    return SourceRecord(tp.topic, tp.partition, one.offset, one.timestamp, one.key, one.value, one.headers)
