"""Writes interactions directly to the topic, like a user's own service with kafka-python.

Values are Protobuf, keyed by the user id; the producer is idempotent, with acks=all.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError

from services.platform.stream.kafka import Brokers, kafka_options

OnAcknowledged = Callable[[str, int, int, float], None]


class OutsideProducer:
    """Sends records and stores their acknowledged positions. `on_acknowledged` runs in the client's sender thread.

    last_offsets: the newest acknowledged offset per partition; repeated and broken records count.
    """

    def __init__(self, *, bootstrap: Brokers, topic: str, on_acknowledged: OnAcknowledged) -> None:
        self._topic = topic
        self._on_acknowledged = on_acknowledged
        # A record that is done before its callbacks are added calls them in the caller's thread.
        self._lock = threading.Lock()
        self.positions: dict[str, tuple[int, int]] = {}
        self.last_offsets: dict[int, int] = {}
        self.acknowledge_ms: list[float] = []
        self.errors: Counter[str] = Counter()
        self._producer = KafkaProducer(
            **kafka_options(bootstrap),
            acks="all",
            enable_idempotence=True,
            linger_ms=5,
            request_timeout_ms=5000,
            delivery_timeout_ms=15_000,
            max_block_ms=10_000,
        )
        self._producer.partitions_for(topic)

    def send(self, event_id: str, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]] = ()) -> None:
        """Pass one record to the client without waiting."""
        sent = time.monotonic()
        try:
            future: Any = self._producer.send(self._topic, key=key, value=value, headers=list(headers))
        except KafkaError as error:
            self._failed(error)
            return
        future.add_callback(self._acknowledged, event_id, sent)
        future.add_errback(self._failed)

    def wait(self, timeout_s: float) -> None:
        """Wait until every record is acknowledged or has failed."""
        with suppress(KafkaTimeoutError):
            self._producer.flush(timeout_s)

    def close(self) -> None:
        self._producer.close(timeout=5)

    def _acknowledged(self, event_id: str, sent: float, metadata: Any) -> None:
        now = time.monotonic()
        with self._lock:
            newest = max(self.last_offsets.get(metadata.partition, -1), metadata.offset)
            self.last_offsets[metadata.partition] = newest
            first = event_id not in self.positions
            if first:
                self.positions[event_id] = (metadata.partition, metadata.offset)
                self.acknowledge_ms.append((now - sent) * 1000)
        if first:
            self._on_acknowledged(event_id, metadata.partition, metadata.offset, now)

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            self.errors[type(error).__name__] += 1
