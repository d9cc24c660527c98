"""Writing to and reading from Kafka with kafka-python, without ever blocking an event loop.

kafka-python's constructor and `send` wait for the broker (up to a minute with the defaults), so producers are built
lazily in a thread of their own, with short times, and callers get DependencyUnavailable instead of a wait. A send
that timed out may still land: callers reuse their event ids. Keys are placed by Kafka's default partitioner
(murmur2), so this code, bulk imports and outside producers agree on a key's partition. Knows bytes, not events.
"""

import asyncio
import contextlib
import queue
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.client_async import KafkaClient
from kafka.cluster import ClusterMetadata
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NoBrokersAvailable,
    SaslAuthenticationFailedError,
)
from kafka.partitioner.default import murmur2

from services.platform.errors import DependencyUnavailable, InvalidRequest, Overloaded
from services.platform.stream.kafka_headers import accept_any_header_name
from services.platform.stream.position import Position
from services.platform.transport import ENCRYPTED, SASL, KafkaConnection

MAX_RECORD_BYTES = 1_000_000
# Kafka's default for producers: the record with its key, its headers and what surrounds it.
MAX_REQUEST_BYTES = 1 << 20
MAX_QUEUED = 10_000
RETRY_BUILD_SECONDS = 0.5
_GATHERED_BYTES = 65_536
# Records of several callers go to kafka-python together. An event's processor time, in all processes: at 400 a second
# 2.3 -> 2.0 ms, of 32 callers in a closed loop 1.07 -> .60 (1,628 -> 3,184 a second). A group is complete with as many
# records as the last one had, or were in flight when one more came: who waits for each answer waits for no company
# (in a closed loop of 1 and 8 callers 1.4 ms in the place of 4.9, as many records a group; at 400 a second 1.7 in the
# place of 2.1). Tried: kafka-python's own linger, which wakes its thread for each record all the same (half the gain);
# handing over on the event loop, without a thread of ours in between (no gain); at once when nothing is in flight (at
# 400 a second a quarter of the gain).
_HAND_OVER_S = 0.005
REST_MS = 500
# Above what a fetch asks for (kafka-python's fetch_max_bytes, 50 MB).
_MAX_ANSWER_BYTES = 1 << 27
# After the delivery timeout kafka-python takes this long at most to give a batch up.
_SETTLING_S = 2.0

Headers = Sequence[tuple[str, bytes]]
# host:port, separated by commas, of brokers that ask nobody who they are; else with what a client shows.
Brokers = str | KafkaConnection


class _Client(KafkaClient):  # type: ignore[misc]
    """kafka-python's connections to brokers. It says why a broker refuses it; the library's tries for ever."""

    _refusal: BaseException | None = None

    def _init_connect(self, node_id: Any) -> Any:
        begun = super()._init_connect(node_id)
        if (connection := self._conns.get(node_id)) is not None and "close" not in vars(connection):
            close = connection.close

            def noted_close(error: BaseException | None = None) -> None:
                # What follows from it closes it again.
                if error is not None and not connection.disconnected():
                    self._refusal = error
                close(error)

            connection.close = noted_close
        return begun

    def poll(self, *args: Any, **named: Any) -> Any:
        """As there. Raises: SaslAuthenticationFailedError of a connection that it waited for."""
        answers = super().poll(*args, **named)
        if isinstance(self._refusal, SaslAuthenticationFailedError):
            refusal, self._refusal = self._refusal, None
            raise refusal
        return answers

    def check_version(self, *args: Any, **named: Any) -> Any:
        """As there, once a broker has let this client in. Raises: why none did, too."""
        end = time.monotonic() + self.config["api_version_auto_timeout_ms"] / 1000
        try:
            found = super().check_version(*args, **named)
        except NoBrokersAvailable as exc:
            raise self._refusal or exc from exc
        # A broker tells its version to everybody.
        while not any(self.connected(broker.nodeId) for broker in self.cluster.brokers()):
            if time.monotonic() > end:
                raise self._refusal or NoBrokersAvailable()
            self.poll(timeout_ms=100)
        return found


def kafka_options(brokers: Brokers) -> dict[str, Any]:
    """The keyword arguments of every kafka-python client that say where the brokers are, and who asks."""
    options: dict[str, Any] = {"bootstrap_servers": str(brokers).split(","), "kafka_client": _Client}
    if isinstance(brokers, str) or brokers.security == "PLAINTEXT":
        return options
    options["security_protocol"] = brokers.security
    if brokers.security in ENCRYPTED:
        options["ssl_context"] = brokers.tls.client_context() if brokers.tls else ssl.create_default_context()
    if brokers.security in SASL:
        options["sasl_mechanism"] = brokers.mechanism
        options["sasl_plain_username"] = brokers.user
        options["sasl_plain_password"] = brokers.password.get_secret_value()
    return options


def partition_for(key: bytes, num_partitions: int) -> int:
    """The partition that Kafka's default partitioner gives to a key."""
    return int((murmur2(key) & 0x7FFFFFFF) % num_partitions)


@dataclass(frozen=True, slots=True)
class Record:
    """One record to produce. partition: None is where the default partitioner puts the key. timestamp_ms: None is now;
    a topic with the broker's times does not look at it."""

    topic: str
    key: bytes
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None


def build_producer(
    bootstrap: Brokers,
    *,
    client_id: str,
    linger_ms: int = 0,
    batch_bytes: int = 65_536,
    delivery_timeout_ms: int = 5_000,
    max_request_bytes: int = MAX_REQUEST_BYTES,
    connect: Callable[..., KafkaClient] = _Client,
) -> KafkaProducer:
    """An idempotent acks=all producer whose every wait is short. Blocking: call it from a thread of your own.

    connect: makes the connections, which know the cluster.
    Raises: DependencyUnavailable when no broker answers.
    """
    try:
        return KafkaProducer(
            **kafka_options(bootstrap) | {"kafka_client": connect},
            client_id=client_id,
            acks="all",
            enable_idempotence=True,
            linger_ms=linger_ms,
            batch_size=batch_bytes,
            max_block_ms=2_000,
            request_timeout_ms=max(1_000, delivery_timeout_ms - linger_ms - 500),
            delivery_timeout_ms=delivery_timeout_ms,
            api_version_auto_timeout_ms=2_000,
            reconnect_backoff_ms=50,
            reconnect_backoff_max_ms=500,
            max_request_size=max_request_bytes,
            allow_auto_create_topics=False,
            metrics_enabled=False,
        )
    except (KafkaError, OSError, AssertionError) as exc:
        # An assertion of the client's: a broker that is paused answered nothing, which it takes for an old one.
        raise DependencyUnavailable(f"Kafka at {bootstrap} cannot be reached: {exc}") from exc


def _close(producer: KafkaProducer, timeout_s: float) -> bool:
    """Close once every record is acknowledged or given up; False, and still open, when that takes longer."""
    try:
        producer.close(timeout=timeout_s)
    except KafkaTimeoutError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Pending:
    record: Record
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Position]


class EventProducer:
    """Produces single records for callers on one event loop; one thread owns the kafka-python producer.

    What comes within `_HAND_OVER_S` of the last hand-over waits for the next, or until as many wait as are expected;
    what comes later goes at once.
    At most `max_queued` records wait or are in flight, those whose senders gave up included; more are refused as
    Overloaded. While no broker has answered for a moment, sends fail at once instead of waiting their whole time.
    """

    def __init__(
        self,
        bootstrap: Brokers,
        *,
        client_id: str = "freshet",
        delivery_timeout_ms: int = 5_000,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._delivery_timeout_ms = delivery_timeout_ms
        self._settled_s = delivery_timeout_ms / 1000 + _SETTLING_S
        self._max_queued = max_queued
        # Records from `send` until they have left this queue and kafka-python's. Both threads count.
        self._outstanding = 0
        self._count_lock = threading.Lock()
        self._queue: queue.SimpleQueue[list[_Pending] | None] = queue.SimpleQueue()
        self._gathered: list[_Pending] = []
        # How many may come soon: those that went together last, and those that were in flight since.
        self._expected = 1
        self._next_hand_over = 0.0
        self._hand_over_at: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._closed = False
        self._build_failed_at = -RETRY_BUILD_SECONDS
        self._why_away = f"Kafka at {bootstrap} cannot be reached"
        self._broken: KafkaProducer | None = None
        self._cluster: ClusterMetadata | None = None
        self.reachable: bool | None = None

    def start(self) -> None:
        """Connect in the background, so that the first send does not wait for it. Idempotent, never blocks."""
        with self._start_lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="event-producer", daemon=True)
                self._thread.start()

    def brokers(self) -> Collection[str]:
        """host:port of each broker that the cluster names, which leaves out those it takes for dead; before it was
        asked, of those it was begun with."""
        if self._cluster is None:
            return [broker.strip() for broker in str(self._bootstrap).split(",")]
        return {f"{broker.host}:{broker.port}" for broker in self._cluster.brokers()}

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
        self._gathered.append(pending)
        if self._outstanding > len(self._gathered):
            self._expected = max(self._expected, self._outstanding)
        # At the earliest after what else is due now: a call of many records is handed over whole.
        if len(self._gathered) == self._expected:
            self._hand_over_next(loop, loop.time())
        elif len(self._gathered) == 1:
            self._hand_over_next(loop, self._next_hand_over)
        try:
            async with asyncio.timeout(timeout_s):
                return await pending.result
        except TimeoutError as exc:
            self.reachable = False
            raise DependencyUnavailable(f"Kafka did not acknowledge within {timeout_s:.1f} s") from exc

    async def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, then end the thread; after timeout_s the rest is given up."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            self._put_gathered(asyncio.get_running_loop())
            self._queue.put(None)
            await asyncio.to_thread(thread.join, timeout_s)

    def _hand_over_next(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._hand_over_at is not None:
            self._hand_over_at.cancel()
        self._hand_over_at = loop.call_at(when, self._put_gathered, loop)

    def _put_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next_hand_over = loop.time() + _HAND_OVER_S
        self._expected = len(self._gathered)
        self._queue.put(self._gathered)
        self._gathered = []

    def _leave(self, pending: _Pending, outcome: Position | Exception) -> None:
        """The record is out of every queue: its slot is free, and its sender is told unless it gave up."""
        with self._count_lock:
            self._outstanding -= 1
        _settle(pending, outcome)

    def _run(self) -> None:
        producer: KafkaProducer | None = self._build()
        for pending in chain.from_iterable(iter(self._queue.get, None)):
            if pending.result.done():
                self._leave(pending, DependencyUnavailable("the sender gave up while the record waited here"))
                continue
            if producer is not None and self._broken is producer:
                # kafka-python's idempotent producer does not find its way back once a batch in flight has expired.
                # What it still holds may land while the next one sends: events have ids, and their order is in time.
                threading.Thread(
                    target=_close, args=(producer, self._settled_s), name="old-producer", daemon=True
                ).start()
                producer = None
            if producer is None and time.monotonic() - self._build_failed_at >= RETRY_BUILD_SECONDS:
                producer = self._build()
            if producer is None:
                self._leave(pending, DependencyUnavailable(self._why_away))
                continue
            self._hand_over(producer, pending)
        if producer is not None:
            _close(producer, timeout_s=1.0)

    def _build(self) -> KafkaProducer | None:
        try:
            producer = build_producer(
                self._bootstrap,
                client_id=self._client_id,
                delivery_timeout_ms=self._delivery_timeout_ms,
                connect=self._connect,
            )
        except DependencyUnavailable as exc:
            self.reachable, self._why_away = False, str(exc)
            self._build_failed_at = time.monotonic()
            return None
        self.reachable = True
        return producer

    def _connect(self, **options: Any) -> KafkaClient:
        client = _Client(**options)
        self._cluster = client.cluster
        return client

    def _hand_over(self, producer: KafkaProducer, pending: _Pending) -> None:
        record = pending.record
        try:
            future = producer.send(record.topic, record.value, record.key, list(record.headers))
        except MessageSizeTooLargeError as exc:
            self._leave(pending, InvalidRequest(str(exc)))
            return
        except (KafkaError, OSError, AssertionError, ValueError) as exc:
            self.reachable = False
            self._leave(pending, DependencyUnavailable(f"Kafka refused the record: {exc}"))
            return
        future.add_callback(self._acknowledged, pending)
        future.add_errback(self._refused, producer, pending)

    def _acknowledged(self, pending: _Pending, metadata: Any) -> None:
        if metadata.offset < 0:
            # A retried batch that the broker already had: written, but it no longer says where.
            self._leave(pending, DependencyUnavailable("Kafka has the record but did not say where; send it again"))
            return
        self.reachable = True
        self._leave(pending, Position(metadata.partition, metadata.offset))

    def _refused(self, producer: KafkaProducer, pending: _Pending, error: BaseException) -> None:
        self.reachable = False
        self._broken = producer
        self._leave(pending, DependencyUnavailable(f"Kafka did not take the record: {error}"))


def _settle(pending: _Pending, outcome: Position | Exception) -> None:
    def finish() -> None:
        if pending.result.done():
            return
        if isinstance(outcome, Exception):
            pending.result.set_exception(outcome)
        else:
            pending.result.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the caller's loop is gone
        pending.loop.call_soon_threadsafe(finish)


class BulkProducer:
    """Produces many records at once from one thread, and returns when every one is acknowledged."""

    def __init__(
        self,
        bootstrap: Brokers,
        *,
        client_id: str = "freshet-bulk",
        linger_ms: int = 0,
        delivery_timeout_ms: int = 10_000,
        # Each topic has its own limit at the broker; this one only has to be above them.
        max_request_bytes: int = 2 * MAX_REQUEST_BYTES,
    ) -> None:
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._linger_ms = linger_ms
        self._delivery_timeout_ms = delivery_timeout_ms
        self._max_request_bytes = max_request_bytes
        self._producer: KafkaProducer | None = None

    def send_many(self, records: Iterable[Record], timeout_s: float = 15.0) -> list[Position]:
        """Write the records, in order per partition; return their positions in the same order.

        A position has offset -1 when Kafka has the record but no longer says where (a retried batch).
        Raises: DependencyUnavailable if any was not acknowledged in time; some may have been written all the same, but
        none is sent any more once this has returned (it waits out the delivery timeout for that).
        """
        deadline = time.monotonic() + timeout_s
        producer = self._connected()
        try:
            futures = [
                producer.send(
                    r.topic, r.value, r.key, list(r.headers), partition=r.partition, timestamp_ms=r.timestamp_ms
                )
                for r in records
            ]
            if self._linger_ms and futures:
                producer.flush(timeout=max(0.0, deadline - time.monotonic()))
            positions = []
            for future in futures:
                metadata = future.get(timeout=max(0.0, deadline - time.monotonic()))
                positions.append(Position(metadata.partition, metadata.offset))
            return positions
        except (KafkaError, OSError, AssertionError) as exc:
            # A producer that failed half-way is not asked to remember its sequence; the next one must not overtake it.
            self.close(self._delivery_timeout_ms / 1000 + _SETTLING_S)
            raise DependencyUnavailable(f"Kafka did not take the records: {exc}") from exc

    def num_partitions(self, topic: str) -> int:
        """How many partitions a topic has, for records that go into every one. Raises: DependencyUnavailable."""
        producer = self._connected()
        try:
            found = producer.partitions_for(topic)
        except (KafkaError, OSError) as exc:
            self.close()
            raise DependencyUnavailable(f"Kafka did not describe {topic!r}: {exc}") from exc
        if not found:
            raise DependencyUnavailable(f"Kafka has no topic {topic!r} yet")
        return len(found)

    def close(self, timeout_s: float = 0.0) -> None:
        """Give the connection up; the next send_many makes a new one."""
        producer, self._producer = self._producer, None
        if producer is not None:
            _close(producer, timeout_s)

    def _connected(self) -> KafkaProducer:
        if self._producer is None:
            self._producer = build_producer(
                self._bootstrap,
                client_id=self._client_id,
                linger_ms=self._linger_ms,
                batch_bytes=262_144,
                delivery_timeout_ms=self._delivery_timeout_ms,
                max_request_bytes=self._max_request_bytes,
            )
        return self._producer


def build_consumer(
    bootstrap: Brokers,
    *topics: str,
    group_id: str,
    client_id: str = "freshet",
    partitions: Sequence[int] | None = None,
    window_ms: int = 0,
    rest_ms: int = REST_MS,
    max_poll_records: int = 512,
    max_partition_bytes: int = 1 << 20,
) -> KafkaConsumer:
    """A consumer with assigned partitions (None: all of each topic's), no automatic commits, and short waits.

    With `window_ms` the broker gathers for so long, or 64 KB; without, it gives a record as soon as there is one, and
    is asked every `rest_ms` while there is none: a stream at rest costs next to nothing. No group membership, so no
    rebalance: takeover takes as long as starting the process. Only committed records are read, and a topic ends before
    the first transaction that is still open.
    Raises: DependencyUnavailable when the broker or a topic cannot be reached.
    """
    accept_any_header_name()
    try:
        consumer = KafkaConsumer(
            **kafka_options(bootstrap),
            group_id=group_id,
            client_id=client_id,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            # Outside producers may abort transactions: what they took back is not read.
            isolation_level="read_committed",
            fetch_max_wait_ms=window_ms or rest_ms,
            fetch_min_bytes=_GATHERED_BYTES if window_ms else 1,
            max_poll_records=max_poll_records,
            max_partition_fetch_bytes=max_partition_bytes,
            receive_message_max_bytes=_MAX_ANSWER_BYTES,
            request_timeout_ms=5_000,
            session_timeout_ms=4_000,
            heartbeat_interval_ms=1_000,
            api_version_auto_timeout_ms=2_000,
            reconnect_backoff_ms=50,
            reconnect_backoff_max_ms=500,
            allow_auto_create_topics=False,
            metrics_enabled=False,
        )
    except (KafkaError, OSError) as exc:
        raise DependencyUnavailable(f"Kafka at {bootstrap} cannot be reached: {exc}") from exc
    try:
        consumer.assign([partition for topic in topics for partition in _partitions(consumer, topic, partitions)])
    except (KafkaError, OSError, DependencyUnavailable) as exc:
        with contextlib.suppress(Exception):
            consumer.close(autocommit=False)
        raise DependencyUnavailable(f"Kafka at {bootstrap} does not give {', '.join(topics)}: {exc}") from exc
    return consumer


def _partitions(consumer: KafkaConsumer, topic: str, partitions: Sequence[int] | None) -> list[TopicPartition]:
    found = consumer.partitions_for_topic(topic)
    if not found:
        raise DependencyUnavailable(f"there is no topic {topic!r} yet")
    wanted = sorted(found) if partitions is None else sorted(partitions)
    if absent := sorted(set(wanted) - set(found)):
        raise DependencyUnavailable(f"topic {topic!r} has partitions {sorted(found)}, not {absent}")
    return [TopicPartition(topic, partition) for partition in wanted]
