"""The outbox port over Apache Kafka: index deltas in order, and dead letters of both topics."""

from collections.abc import Sequence

from services.common import index_deltas
from services.common.dead_letters import dead_letter
from services.common.kafka import BulkProducer, Record
from services.common.topics import INDEX_DELTAS
from services.refresher.domain.records import Unreadable

MAX_REASON_BYTES = 512


class KafkaOutbox:
    """Publishes and waits for the acknowledgement of everything."""

    def __init__(self, producer: BulkProducer, *, deltas: str = INDEX_DELTAS, timeout_s: float = 15.0) -> None:
        self._producer = producer
        self._topic = deltas
        self._timeout_s = timeout_s

    def publish(self, deltas: Sequence[index_deltas.IndexDelta], unreadable: Sequence[Unreadable]) -> None:
        records = [Record(self._topic, delta.key, index_deltas.encode(delta), partition=0) for delta in deltas]
        records += [_letter(entry) for entry in unreadable]
        self._producer.send_many(records, self._timeout_s)

    def close(self) -> None:
        self._producer.close()


def _letter(entry: Unreadable) -> Record:
    record = entry.record
    reason = entry.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    headers = [(name, text or b"") for name, text in record.headers]
    return dead_letter(record.topic, record.partition, record.offset, record.key, record.value, headers, reason=reason)
