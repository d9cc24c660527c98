"""Produce records to Kafka for one event loop, without blocking it.

kafka-python's producer belongs to one thread, which gets records in groups. A send that timed out may still succeed, so
callers reuse their event ids.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kafka import KafkaProducer
from kafka.client_async import KafkaClient
from kafka.cluster import ClusterMetadata
from kafka.errors import KafkaError

from services.platform.errors import DependencyUnavailable, InvalidRequest, Overloaded
from services.platform.stream.kafka import (
    DELIVERY_TIMEOUT_MS,
    SETTLING_S,
    Brokers,
    Client,
    Headers,
    Record,
    build_producer,
    close_producer,
)
from services.platform.stream.records import Position

MAX_RECORD_BYTES = 1_000_000
MAX_QUEUED = 10_000
RETRY_BUILD_SECONDS = 0.5
# Groups save processor time per event, summed over all processes (2.3 -> 2.0 ms at 400 events a second, 1.07 -> 0.60 ms
# with 32 callers in a closed loop). A group is complete when it has as many records as the last group, or as were
# outstanding when a record arrived. So a single caller does not wait for others (a send takes 1.4 ms instead of 4.9
# with 1 and 8 callers). Three other ways gain less: kafka-python's linger; handing over on the event loop; handing over
# at once if nothing is in flight.
_HAND_OVER_S = 0.005


@dataclass(frozen=True, slots=True)
class _Pending:
    record: Record
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Position]

    def settle(self, outcome: Position | Exception) -> None:
        """Resolve the sender's future unless the sender gave up; thread-safe."""

        def finish() -> None:
            if self.result.done():
                return
            if isinstance(outcome, Exception):
                self.result.set_exception(outcome)
            else:
                self.result.set_result(outcome)

        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self.loop.call_soon_threadsafe(finish)


class _Gathering:
    """Gathers records into groups. groups: read by the thread; None ends it."""

    def __init__(self) -> None:
        self.groups: queue.SimpleQueue[list[_Pending] | None] = queue.SimpleQueue()
        self._gathered: list[_Pending] = []
        # Size of a complete group: the last group's size, or the most records outstanding since then.
        self._expected = 1
        self._next_hand_over = 0.0
        self._hand_over_at: asyncio.TimerHandle | None = None

    def add(self, pending: _Pending, outstanding: int) -> None:
        """Add a record. outstanding: records here, in the thread or in flight."""
        loop = pending.loop
        self._gathered.append(pending)
        if outstanding > len(self._gathered):
            self._expected = max(self._expected, outstanding)
        # `put` runs after the callbacks that are due now, so that the records of one call stay together.
        if len(self._gathered) == self._expected:
            self._put_at(loop, loop.time())
        elif len(self._gathered) == 1:
            self._put_at(loop, self._next_hand_over)

    def put(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next_hand_over = loop.time() + _HAND_OVER_S
        self._expected = len(self._gathered)
        self.groups.put(self._gathered)
        self._gathered = []

    def _put_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._hand_over_at is not None:
            self._hand_over_at.cancel()
        self._hand_over_at = loop.call_at(when, self.put, loop)


class _Connection:
    """Owns kafka-python's producer and rebuilds a broken one. Only `brokers` is thread-safe."""

    def __init__(self, bootstrap: Brokers, client_id: str) -> None:
        self._bootstrap, self._client_id = bootstrap, client_id
        self._producer: KafkaProducer | None = None
        self._broken: KafkaProducer | None = None
        self._build_failed_at = -RETRY_BUILD_SECONDS
        self.why_away = f"Kafka at {bootstrap} cannot be reached"
        self._cluster: ClusterMetadata | None = None

    def brokers(self) -> Collection[str]:
        if self._cluster is None:
            return [broker.strip() for broker in str(self._bootstrap).split(",")]
        return {f"{broker.host}:{broker.port}" for broker in self._cluster.brokers()}

    def producer(self) -> KafkaProducer | None:
        """Return a working producer, or None and set `why_away` to the reason."""
        if self._producer is not None and self._broken is self._producer:
            # kafka-python's idempotent producer does not recover after a batch expired in flight. If its records are
            # still written, their event ids make that harmless.
            settled_s = DELIVERY_TIMEOUT_MS / 1000 + SETTLING_S
            closing = (self._producer, settled_s)
            threading.Thread(target=close_producer, args=closing, name="old-producer", daemon=True).start()
            self._producer = None
        if self._producer is None and time.monotonic() - self._build_failed_at >= RETRY_BUILD_SECONDS:
            self._build()
        return self._producer

    def broke(self, producer: KafkaProducer) -> None:
        self._broken = producer

    def close(self) -> None:
        if self._producer is not None:
            close_producer(self._producer, timeout_s=1.0)

    def _build(self) -> None:
        try:
            self._producer = build_producer(self._bootstrap, client_id=self._client_id, connect=self._connect)
        except DependencyUnavailable as exc:
            self.why_away, self._build_failed_at = str(exc), time.monotonic()

    def _connect(self, **options: Any) -> KafkaClient:
        client = Client(**options)
        self._cluster = client.cluster
        return client


class EventProducer:
    """Produces records for callers on one event loop; one thread owns kafka-python's producer.

    Records wait until their group is complete, at most until `_HAND_OVER_S` after the last group. At most `max_queued`
    records wait or are in flight. While no broker answers, sends fail at once.
    """

    def __init__(self, bootstrap: Brokers, *, client_id: str = "freshet", max_queued: int = MAX_QUEUED) -> None:
        self._gathering, self._connection = _Gathering(), _Connection(bootstrap, client_id)
        self._max_queued = max_queued
        # Records here and in kafka-python's queue; both threads count.
        self._outstanding = 0
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Connect in the background. Idempotent, never blocks."""
        with self._start_lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="event-producer", daemon=True)
                self._thread.start()

    def brokers(self) -> Collection[str]:
        """Return host:port of each live broker; before the first connection, of each bootstrap broker."""
        return self._connection.brokers()

    async def send(
        self, topic: str, key: bytes, value: bytes | None, headers: Headers = (), timeout_s: float = 2.0
    ) -> Position:
        """Write one record; return (partition, offset) once all in-sync replicas have it.

        Raises: DependencyUnavailable after timeout_s, although the record may still be written; Overloaded;
        InvalidRequest for a record that is too large.
        """
        if value is not None and len(value) + len(key) > MAX_RECORD_BYTES:
            raise InvalidRequest.of("value", f"{len(value)} bytes", f"at most {MAX_RECORD_BYTES} bytes with its key")
        if self._closed:
            raise DependencyUnavailable("the producer is closed")
        if self._outstanding >= self._max_queued:
            raise Overloaded(f"{self._outstanding} records already wait for Kafka; the limit is {self._max_queued}")
        self.start()
        loop = asyncio.get_running_loop()
        pending = _Pending(Record(topic, key, value, headers), loop, loop.create_future())
        with self._count_lock:
            self._outstanding += 1
        self._gathering.add(pending, self._outstanding)
        try:
            async with asyncio.timeout(timeout_s):
                return await pending.result
        except TimeoutError as exc:
            raise DependencyUnavailable(f"Kafka did not acknowledge within {timeout_s:.1f} s") from exc

    async def close(self, timeout_s: float = 2.0) -> None:
        """Send queued records; drop the rest after timeout_s."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            self._gathering.put(asyncio.get_running_loop())
            self._gathering.groups.put(None)
            await asyncio.to_thread(thread.join, timeout_s)

    def _run(self) -> None:
        self._connection.producer()
        for pending in chain.from_iterable(iter(self._gathering.groups.get, None)):
            if pending.result.done():
                self._leave(pending, DependencyUnavailable("the sender gave up while the record waited here"))
            elif (producer := self._connection.producer()) is None:
                self._leave(pending, DependencyUnavailable(self._connection.why_away))
            else:
                self._hand_over(producer, pending)
        self._connection.close()

    def _hand_over(self, producer: KafkaProducer, pending: _Pending) -> None:
        record = pending.record
        try:
            future = producer.send(record.topic, record.value, record.key, list(record.headers))
        except (KafkaError, OSError, AssertionError, ValueError) as exc:
            self._leave(pending, DependencyUnavailable(f"Kafka refused the record: {exc}"))
            return
        future.add_callback(self._acknowledged, pending)
        future.add_errback(self._refused, producer, pending)

    def _acknowledged(self, pending: _Pending, metadata: Any) -> None:
        if metadata.offset < 0:
            # The broker already had a retried batch, at an unknown offset.
            self._leave(pending, DependencyUnavailable("Kafka has the record but did not say where; send it again"))
            return
        self._leave(pending, Position(metadata.partition, metadata.offset))

    def _refused(self, producer: KafkaProducer, pending: _Pending, error: BaseException) -> None:
        self._connection.broke(producer)
        self._leave(pending, DependencyUnavailable(f"Kafka did not take the record: {error}"))

    def _leave(self, pending: _Pending, outcome: Position | Exception) -> None:
        with self._count_lock:
            self._outstanding -= 1
        pending.settle(outcome)
