"""`index-deltas` and `items` over Apache Kafka, for `catalogue_follower.py`: one consumer, no group membership.

Positions are nobody's but this process's: both topics are compacted and read from their start. Only the place up to
which malformed item records were set aside is kept at the broker, so that a restart does not set them aside again.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from services.common.dead_letters import dead_letter
from services.common.errors import DependencyUnavailable
from services.common.kafka import BulkProducer, build_consumer
from services.common.stream.record import DeadLetter, SourceRecord
from services.common.topics import INDEX_DELTAS, ITEMS

_DELTAS, _ITEMS = TopicPartition(INDEX_DELTAS, 0), TopicPartition(ITEMS, 0)
_MAX_RECORDS = 4_096


class KafkaCatalogueTopics:
    """Reads both topics. Without `sets_aside`, malformed item records are only skipped: another process does it."""

    def __init__(
        self, bootstrap: str, *, process: str, sets_aside: bool, security: Mapping[str, Any] | None = None
    ) -> None:
        self._bootstrap, self._process, self._security = bootstrap, process, dict(security or {})
        self._consumer: KafkaConsumer | None = None
        self._producer = (
            BulkProducer(bootstrap, client_id=f"{process}-items", security=security) if sets_aside else None
        )
        self._set_aside_to = 0

    def open(self) -> dict[str, int]:
        self.close()
        self._consumer = build_consumer(
            self._bootstrap,
            INDEX_DELTAS,
            group_id=f"{self._process}-catalogue",
            client_id=f"{self._process}-catalogue",
            max_poll_records=_MAX_RECORDS,
            security=self._security,
        )
        with self._errors() as consumer:
            if not consumer.partitions_for_topic(ITEMS):
                raise DependencyUnavailable(f"Kafka at {self._bootstrap} has no topic {ITEMS!r} yet")
            consumer.assign([_DELTAS, _ITEMS])
            if self._producer is not None:
                self._set_aside_to = consumer.committed(_ITEMS, timeout_ms=5_000) or 0
            return {tp.topic: end for tp, end in consumer.end_offsets([_DELTAS, _ITEMS]).items()}

    def seek(self, positions: Mapping[str, int]) -> None:
        with self._errors() as consumer:
            for tp in (_DELTAS, _ITEMS):
                consumer.seek(tp, positions[tp.topic])

    def poll(self, timeout_s: float, *, deltas: bool) -> Sequence[SourceRecord]:
        with self._errors() as consumer:
            if deltas == (_DELTAS in consumer.paused()):
                (consumer.resume if deltas else consumer.pause)(_DELTAS)
            batches = consumer.poll(timeout_ms=round(1000 * timeout_s), max_records=_MAX_RECORDS)
        return [
            SourceRecord(
                tp.topic, tp.partition, record.offset, record.timestamp, record.key, record.value, record.headers
            )
            for tp, batch in batches.items()
            for record in batch
        ]

    def positions(self) -> dict[str, int]:
        with self._errors() as consumer:
            return {tp.topic: consumer.position(tp, timeout_ms=5_000) or 0 for tp in (_DELTAS, _ITEMS)}

    def set_aside(self, record: SourceRecord, reason: str) -> None:
        if self._producer is None or record.offset < self._set_aside_to:
            return
        self._producer.send_many([dead_letter(DeadLetter(record, reason))])
        self._set_aside_to = record.offset + 1
        with self._errors() as consumer:
            consumer.commit_async({_ITEMS: OffsetAndMetadata(self._set_aside_to, "", -1)})

    def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with contextlib.suppress(Exception):
                consumer.close(autocommit=False, timeout_ms=500)
        if self._producer is not None:
            self._producer.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[KafkaConsumer]:
        if self._consumer is None:
            raise DependencyUnavailable("the catalogue's topics are not open")
        try:
            yield self._consumer
        except (KafkaError, OSError) as exc:
            self.close()
            raise DependencyUnavailable(f"Kafka does not answer: {type(exc).__name__}: {exc}") from exc
