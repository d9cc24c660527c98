"""The generator's topics over Apache Kafka: `search-clicks` from its start, and `items`; missing topics are made.

No group membership: positions are nobody's but this process's. The place up to which unreadable clicks were set aside
is kept at the broker under this process's group, so that a restart (or a second generator) does not repeat it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from services.common.catalogue_topics import KafkaCatalogueTopics
from services.common.dead_letters import dead_letter
from services.common.errors import DependencyUnavailable
from services.common.kafka import BulkProducer, build_consumer
from services.common.stream.record import DeadLetter, SourceRecord
from services.common.topics import SEARCH_CLICKS, ensure_topics

_PARTITION = TopicPartition(SEARCH_CLICKS, 0)
_MAX_RECORDS = 4_096


class KafkaItems(KafkaCatalogueTopics):
    """`items` (and `index-deltas`, unread). What is malformed there the candidates process sets aside."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap, process="generator", sets_aside=False)

    def open(self) -> dict[str, int]:
        ensure_topics(self._bootstrap)
        return super().open()


class KafkaClicks:
    """Implements `ports.ClicksTopic`."""

    def __init__(self, bootstrap: str, *, security: Mapping[str, Any] | None = None) -> None:
        self._bootstrap, self._security = bootstrap, dict(security or {})
        self._consumer: KafkaConsumer | None = None
        self._producer = BulkProducer(bootstrap, client_id="generator-clicks", security=security)
        self._set_aside_to = 0

    def open(self) -> int:
        self.close()
        ensure_topics(self._bootstrap, security=self._security)
        self._consumer = build_consumer(
            self._bootstrap,
            SEARCH_CLICKS,
            group_id="generator-clicks",
            client_id="generator-clicks",
            partitions=[0],
            max_poll_records=_MAX_RECORDS,
            security=self._security,
        )
        with self._errors() as consumer:
            self._set_aside_to = consumer.committed(_PARTITION, timeout_ms=5_000) or 0
            return int(consumer.end_offsets([_PARTITION])[_PARTITION])

    def seek(self, offset: int) -> None:
        with self._errors() as consumer:
            consumer.seek(_PARTITION, offset)

    def poll(self, timeout_s: float) -> Sequence[SourceRecord]:
        with self._errors() as consumer:
            batches = consumer.poll(timeout_ms=round(1000 * timeout_s), max_records=_MAX_RECORDS)
        return [
            SourceRecord(
                tp.topic, tp.partition, record.offset, record.timestamp, record.key, record.value, record.headers
            )
            for tp, batch in batches.items()
            for record in batch
        ]

    def position(self) -> int:
        with self._errors() as consumer:
            return consumer.position(_PARTITION, timeout_ms=5_000) or 0

    def set_aside(self, record: SourceRecord, reason: str) -> None:
        if record.offset < self._set_aside_to:
            return
        self._producer.send_many([dead_letter(DeadLetter(record, reason))])
        self._set_aside_to = record.offset + 1
        with self._errors() as consumer:
            consumer.commit_async({_PARTITION: OffsetAndMetadata(self._set_aside_to, "", -1)})

    def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with contextlib.suppress(Exception):
                consumer.close(autocommit=False, timeout_ms=500)
        self._producer.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[KafkaConsumer]:
        if self._consumer is None:
            raise DependencyUnavailable(f"topic {SEARCH_CLICKS} is not open")
        try:
            yield self._consumer
        except (KafkaError, OSError) as exc:
            self.close()
            raise DependencyUnavailable(f"Kafka does not answer: {type(exc).__name__}: {exc}") from exc
