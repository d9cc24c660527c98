"""Single records onto Kafka for callers on one event loop, which never waits for the broker itself.

kafka-python's producer belongs to one thread. What callers hand in is gathered for a moment and goes to that thread
together. A send that timed out may still land: callers reuse their event ids.
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
from services.platform.stream.position import Position

MAX_RECORD_BYTES = 1_000_000
MAX_QUEUED = 10_000
RETRY_BUILD_SECONDS = 0.5
# Records of several callers go to kafka-python together. An event's processor time, in all processes: at 400 a second
# 2.3 -> 2.0 ms, of 32 callers in a closed loop 1.07 -> .60 (1,628 -> 3,184 a second). A group is complete with as many
# records as the last one had, or were in flight when one more came: who waits for each answer waits for no company
# (in a closed loop of 1 and 8 callers 1.4 ms in the place of 4.9, as many records a group; at 400 a second 1.7 in the
# place of 2.1). Tried: kafka-python's own linger, which wakes its thread for each record all the same (half the gain);
# handing over on the event loop, without a thread of ours in between (no gain); at once when nothing is in flight (at
# 400 a second a quarter of the gain).
_HAND_OVER_S = 0.005


@dataclass(frozen=True, slots=True)
class _Pending:
    record: Record
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Position]

    def settle(self, outcome: Position | Exception) -> None:
        """Tell the sender, unless it gave up. From any thread."""

        def finish() -> None:
            if self.result.done():
                return
            if isinstance(outcome, Exception):
                self.result.set_exception(outcome)
            else:
                self.result.set_result(outcome)

        with contextlib.suppress(RuntimeError):  # the caller's loop is gone
            self.loop.call_soon_threadsafe(finish)


class _Gathering:
    """What goes to the thread together. For the event loop; `groups` is what the thread takes from, None its end."""

    def __init__(self) -> None:
        self.groups: queue.SimpleQueue[list[_Pending] | None] = queue.SimpleQueue()
        self._gathered: list[_Pending] = []
        # How many may come soon: those that went together last, and those that were in flight since.
        self._expected = 1
        self._next_hand_over = 0.0
        self._hand_over_at: asyncio.TimerHandle | None = None

    def add(self, pending: _Pending, outstanding: int) -> None:
        """One more; outstanding: how many are here, in the thread or in flight."""
        loop = pending.loop
        self._gathered.append(pending)
        if outstanding > len(self._gathered):
            self._expected = max(self._expected, outstanding)
        # At the earliest after what else is due now: a call of many records is handed over whole.
        if len(self._gathered) == self._expected:
            self._put_at(loop, loop.time())
        elif len(self._gathered) == 1:
            self._put_at(loop, self._next_hand_over)

    def put(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand over what there is."""
        self._next_hand_over = loop.time() + _HAND_OVER_S
        self._expected = len(self._gathered)
        self.groups.put(self._gathered)
        self._gathered = []

    def _put_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._hand_over_at is not None:
            self._hand_over_at.cancel()
        self._hand_over_at = loop.call_at(when, self.put, loop)


class _Connection:
    """kafka-python's producer, made again when it is broken. For one thread; `brokers` is for any."""

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
        """The one that works; None while there is none, and `why_away` says why."""
        if self._producer is not None and self._broken is self._producer:
            # kafka-python's idempotent producer does not find its way back once a batch in flight has expired.
            # What it still holds may land while the next one sends: events have ids, and their order is in time.
            settled_s = DELIVERY_TIMEOUT_MS / 1000 + SETTLING_S
            closing = (self._producer, settled_s)
            threading.Thread(target=close_producer, args=closing, name="old-producer", daemon=True).start()
            self._producer = None
        if self._producer is None and time.monotonic() - self._build_failed_at >= RETRY_BUILD_SECONDS:
            self._build()
        return self._producer

    def broke(self, producer: KafkaProducer) -> None:
        """A record that it sent was given up. From any thread."""
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
    """Produces single records for callers on one event loop; one thread owns the kafka-python producer.

    What comes within `_HAND_OVER_S` of the last hand-over waits for the next, or until as many wait as are expected;
    what comes later goes at once.
    At most `max_queued` records wait or are in flight, those whose senders gave up included; more are refused as
    Overloaded. While no broker has answered for a moment, sends fail at once instead of waiting their whole time.
    """

    def __init__(self, bootstrap: Brokers, *, client_id: str = "freshet", max_queued: int = MAX_QUEUED) -> None:
        self._gathering, self._connection = _Gathering(), _Connection(bootstrap, client_id)
        self._max_queued = max_queued
        # Records from `send` until they have left our queue and kafka-python's. Both threads count.
        self._outstanding = 0
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Connect in the background, so that the first send does not wait for it. Idempotent, never blocks."""
        with self._start_lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="event-producer", daemon=True)
                self._thread.start()

    def brokers(self) -> Collection[str]:
        """host:port of each broker that the cluster names, which leaves out those it takes for dead; before it was
        asked, of those it was begun with."""
        return self._connection.brokers()

    async def send(
        self, topic: str, key: bytes, value: bytes | None, headers: Headers = (), timeout_s: float = 2.0
    ) -> Position:
        """Write one record and return (partition, offset) once all in-sync replicas have it.

        Raises: DependencyUnavailable when that did not happen within timeout_s (the record may still land later);
        Overloaded when too many sends wait; InvalidRequest when the record is too large.
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
        """Send what waits, then end the thread; after timeout_s the rest is given up."""
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
            # A retried batch that the broker already had: written, but it no longer says where.
            self._leave(pending, DependencyUnavailable("Kafka has the record but did not say where; send it again"))
            return
        self._leave(pending, Position(metadata.partition, metadata.offset))

    def _refused(self, producer: KafkaProducer, pending: _Pending, error: BaseException) -> None:
        self._connection.broke(producer)
        self._leave(pending, DependencyUnavailable(f"Kafka did not take the record: {error}"))

    def _leave(self, pending: _Pending, outcome: Position | Exception) -> None:
        """The record is out of every queue: its slot is free, and its sender is told."""
        with self._count_lock:
            self._outstanding -= 1
        pending.settle(outcome)
