"""The stream port over Apache Kafka: assigned partitions, no group membership, progress kept elsewhere.

kafka-python hides a lost broker from `poll` (it returns nothing and reconnects), so a stretch of silence is normal
here; calls that need an answer raise DependencyUnavailable after a few seconds.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from services.common.errors import DependencyUnavailable
from services.common.stream.record import SourceRecord
from services.encoder.ports import Offsets

ANSWER_TIMEOUT_MS = 5_000


class KafkaStream:
    """Reads one topic through a consumer that is built when first needed; for one thread."""

    def __init__(self, build: Callable[[], KafkaConsumer], *, window_ms: int = 0) -> None:
        """build: makes a consumer with its partitions assigned (see `services.common.kafka.build_consumer`).
        window_ms: how long records may gather after some were read, so that a busy stream takes few turns; the first
        record after a silence is read at once."""
        self._build, self._window_s = build, window_ms / 1000
        self._busy = False
        self._consumer: KafkaConsumer | None = None
        self._assigned: list[TopicPartition] = []

    def partitions(self) -> Sequence[int]:
        return [assigned.partition for assigned in self._assigned_partitions()]

    def committed(self) -> Offsets:
        with self._errors() as consumer:
            return {
                tp.partition: consumer.committed(tp, timeout_ms=ANSWER_TIMEOUT_MS) or 0
                for tp in self._assigned_partitions()
            }

    def seek(self, offsets: Offsets) -> None:
        with self._errors() as consumer:
            for tp in self._assigned_partitions():
                consumer.seek(tp, offsets[tp.partition])

    def poll(self, timeout_ms: int, max_records: int) -> Sequence[SourceRecord]:
        if self._busy and timeout_ms:
            time.sleep(self._window_s)
        with self._errors() as consumer:
            batches = consumer.poll(timeout_ms=timeout_ms, max_records=max_records)
        records = [
            SourceRecord(
                tp.topic, tp.partition, record.offset, record.timestamp, record.key, record.value, record.headers
            )
            for tp, batch in batches.items()
            for record in batch
        ]
        self._busy = 0 < len(records) < max_records
        return records

    def commit(self, offsets: Offsets) -> None:
        if not offsets:
            return
        with self._errors() as consumer:
            consumer.commit_async(
                {
                    tp: OffsetAndMetadata(offsets[tp.partition], "", -1)
                    for tp in self._assigned_partitions()
                    if tp.partition in offsets
                }
            )

    def end_offsets(self) -> Offsets:
        with self._errors() as consumer:
            return {tp.partition: end for tp, end in consumer.end_offsets(self._assigned_partitions()).items()}

    def positions(self) -> Offsets:
        """The offset of each partition's next record for this reader."""
        with self._errors() as consumer:
            found = {
                tp.partition: consumer.position(tp, timeout_ms=ANSWER_TIMEOUT_MS) for tp in self._assigned_partitions()
            }
        if None in found.values():
            raise DependencyUnavailable("Kafka did not say where its topic begins")
        return found

    def known_end_offsets(self) -> Offsets:
        with self._errors() as consumer:
            known = {tp.partition: consumer.highwater(tp) for tp in self._assigned_partitions()}
        return {partition: end for partition, end in known.items() if end is not None}

    def close(self) -> None:
        consumer, self._consumer, self._assigned = self._consumer, None, []
        if consumer is not None:
            with contextlib.suppress(Exception):
                consumer.close(autocommit=False, timeout_ms=500)

    def _assigned_partitions(self) -> list[TopicPartition]:
        if not self._assigned:
            with self._errors() as consumer:
                self._assigned = sorted(consumer.assignment())
        return self._assigned

    @contextlib.contextmanager
    def _errors(self) -> Iterator[KafkaConsumer]:
        if self._consumer is None:
            self._consumer = self._build()
        try:
            yield self._consumer
        except (KafkaError, OSError) as exc:
            self.close()
            raise DependencyUnavailable(f"Kafka does not answer: {type(exc).__name__}: {exc}") from exc
