"""The outbox port over Kafka: index deltas in order, and dead letters."""

from collections.abc import Sequence

from services.contracts.topics import index_deltas
from services.contracts.topics.dead_letters import dead_letter
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.records import DeadLetter
from services.platform.tracing import OFF, Tracing


class KafkaOutbox:
    """Publishes records and waits for all acknowledgements."""

    def __init__(
        self,
        producer: BulkProducer,
        *,
        timeout_s: float = 15.0,
        tracing: Tracing = OFF,
    ) -> None:
        self._producer, self._tracing = producer, tracing
        self._timeout_s = timeout_s

    def publish(
        self,
        deltas: Sequence[index_deltas.IndexDelta],
        unreadable: Sequence[DeadLetter],
        tombstones: Sequence[bytes] = (),
    ) -> None:
        records = [Record(INDEX_DELTAS, key, None, partition=0) for key in tombstones]
        headers = self._tracing.headers()
        records += [Record(INDEX_DELTAS, d.key, index_deltas.encode(d), headers, partition=0) for d in deltas]
        records += [dead_letter(entry) for entry in unreadable]
        self._producer.send_many(records, self._timeout_s)

    def close(self) -> None:
        self._producer.close()
