"""kafka-python's clients with short timeouts; they raise FreshetErrors.

They block for some seconds (kafka-python alone: up to a minute), so call them in a thread. Kafka's default partitioner
(murmur2) chooses the partition of a key, so producers outside Freshet choose the same partition.
"""

import contextlib
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.client_async import KafkaClient
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    NoBrokersAvailable,
    SaslAuthenticationFailedError,
)
from kafka.partitioner.default import murmur2
from kafka.record.default_records import DefaultRecordBatch

from services.platform.errors import DependencyUnavailable
from services.platform.stream.records import Position
from services.platform.transport import ENCRYPTED, SASL, KafkaConnection

# Twice Kafka's default, because it has to exceed the limits of all topics.
_MAX_REQUEST_BYTES = 2 << 20
DELIVERY_TIMEOUT_MS = 5_000
_GATHERED_BYTES = 65_536
REST_MS = 500
# Above a fetch's limit (kafka-python's fetch_max_bytes, 50 MB).
_MAX_ANSWER_BYTES = 1 << 27
# kafka-python fails a batch at the latest this many seconds after the delivery timeout.
SETTLING_S = 2.0

Headers = Sequence[tuple[str, bytes]]
# host:port, separated by commas, or a connection with credentials.
Brokers = str | KafkaConnection


class Client(KafkaClient):  # type: ignore[misc]
    """Raises if a broker refuses it; kafka-python's client retries forever."""

    _refusal: BaseException | None = None

    def _init_connect(self, node_id: Any) -> Any:
        begun = super()._init_connect(node_id)
        if (connection := self._conns.get(node_id)) is not None and "close" not in vars(connection):
            close = connection.close

            def noted_close(error: BaseException | None = None) -> None:
                # Only the first error is the cause.
                if error is not None and not connection.disconnected():
                    self._refusal = error
                close(error)

            connection.close = noted_close
        return begun

    def poll(self, *args: Any, **named: Any) -> Any:
        """Also raises SaslAuthenticationFailedError if a broker refused this client."""
        answers = super().poll(*args, **named)
        if isinstance(self._refusal, SaslAuthenticationFailedError):
            refusal, self._refusal = self._refusal, None
            raise refusal
        return answers

    def check_version(self, *args: Any, **named: Any) -> Any:
        """Return the result once a broker accepted this client. Raises: the reason if none did."""
        end = time.monotonic() + self.config["api_version_auto_timeout_ms"] / 1000
        try:
            found = super().check_version(*args, **named)
        except NoBrokersAvailable as exc:
            raise self._refusal or exc from exc
        # A broker answers the version request before authentication.
        while not any(self.connected(broker.nodeId) for broker in self.cluster.brokers()):
            if time.monotonic() > end:
                raise self._refusal or NoBrokersAvailable()
            self.poll(timeout_ms=100)
        return found


def kafka_options(brokers: Brokers) -> dict[str, Any]:
    options: dict[str, Any] = {"bootstrap_servers": str(brokers).split(","), "kafka_client": Client}
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
    """Return the key's partition by Kafka's default partitioner."""
    return int((murmur2(key) & 0x7FFFFFFF) % num_partitions)


@dataclass(frozen=True, slots=True)
class Record:
    """A record to write. partition: None lets the default partitioner choose. timestamp_ms: None means now; a topic
    with append times ignores it.
    """

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
    delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS,
    connect: Callable[..., KafkaClient] = Client,
) -> KafkaProducer:
    """Return an idempotent acks=all producer with short timeouts. Raises: DependencyUnavailable if no broker
    answers.
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
            max_request_size=_MAX_REQUEST_BYTES,
            allow_auto_create_topics=False,
            metrics_enabled=False,
        )
    except (KafkaError, OSError, AssertionError) as exc:
        # The client raises AssertionError for a paused broker, because it believes that the broker has an old version.
        raise DependencyUnavailable(f"Kafka at {bootstrap} cannot be reached: {exc}") from exc


def close_producer(producer: KafkaProducer, timeout_s: float) -> bool:
    """Close after all acknowledgements. After the timeout, return False and leave the producer open."""
    try:
        producer.close(timeout=timeout_s)
    except KafkaTimeoutError:
        return False
    return True


class BulkProducer:
    """Produces many records from one thread; waits for all acknowledgements."""

    def __init__(
        self,
        bootstrap: Brokers,
        *,
        client_id: str = "freshet-bulk",
        linger_ms: int = 0,
        delivery_timeout_ms: int = 10_000,
    ) -> None:
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._linger_ms = linger_ms
        self._delivery_timeout_ms = delivery_timeout_ms
        self._producer: KafkaProducer | None = None

    def send_many(self, records: Iterable[Record], timeout_s: float = 15.0) -> list[Position]:
        """Write records, in order per partition; return their positions. Offset -1: unknown (a retried batch).

        Raises: DependencyUnavailable if any was not acknowledged in time. Some may be written, but none after the
        return.
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
            # A failed producer cannot always continue its sequence. The next producer must not overtake its records.
            self.close(self._delivery_timeout_ms / 1000 + SETTLING_S)
            raise DependencyUnavailable(f"Kafka did not take the records: {exc}") from exc

    def num_partitions(self, topic: str) -> int:
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
        producer, self._producer = self._producer, None
        if producer is not None:
            close_producer(producer, timeout_s)

    def _connected(self) -> KafkaProducer:
        if self._producer is None:
            self._producer = build_producer(
                self._bootstrap,
                client_id=self._client_id,
                linger_ms=self._linger_ms,
                batch_bytes=262_144,
                delivery_timeout_ms=self._delivery_timeout_ms,
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
    """Return a consumer with assigned partitions (default all), no automatic commits, and short timeouts.

    With `window_ms` the broker answers after this time or when it has 64 KB. Otherwise it returns records at once, and
    an idle consumer asks again every `rest_ms`. There is no group membership, so no rebalance. Only committed records
    are read.
    Raises: DependencyUnavailable.
    """
    accept_any_header_name()
    try:
        consumer = KafkaConsumer(
            **kafka_options(bootstrap),
            group_id=group_id,
            client_id=client_id,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            # Aborted records of outside producers are not read.
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


# Kafka does not check the encoding of header names. kafka-python fails forever at one that is not UTF-8, so a producer
# could stop a stream. Below, invalid bytes become U+FFFD.


class _Name(bytes):
    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, errors)


class _Buffer(bytearray):
    """A buffer whose slices decode without failing."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return _Name(found) if isinstance(key, slice) else found


def _tolerant(read: Any) -> Any:
    def read_any(batch: Any) -> Any:
        try:
            return read(batch)
        except UnicodeDecodeError:
            plain, batch._buffer = batch._buffer, _Buffer(batch._buffer)
            try:
                return read(batch)
            finally:
                batch._buffer = plain

    read_any.tolerant = True  # type: ignore[attr-defined]
    return read_any


def accept_any_header_name() -> None:
    """Make this process's consumers read records whose header names are not UTF-8. Idempotent."""
    read = DefaultRecordBatch._read_msg
    if not hasattr(read, "tolerant"):
        DefaultRecordBatch._read_msg = _tolerant(read)
