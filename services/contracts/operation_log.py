"""Follow a topic of operations, and read and write it as an operator."""

import getpass
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import structlog

from services.contracts.operations import Counted, Operation, OperationTopic, Revised
from services.contracts.topic_reader import TopicReader
from services.contracts.topics import ensure_topics
from services.platform.errors import Conflict, DependencyUnavailable
from services.platform.stream.kafka import Brokers, BulkProducer, Record
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord
from services.platform.stream.topic import Replicas
from services.platform.stream.topic_follower import TopicFollower

log = structlog.get_logger()

_POLL_MS = 1_000
_CLIENT = "freshet-operator"
_KNOWN_WITHIN_S = 20.0

S = TypeVar("S", bound=Revised)


def operation_reader(
    bootstrap: Brokers, topic: OperationTopic[Any], client_id: str, *, makes_topics: Replicas | None = None
) -> TopicReader:
    """Return a reader of a topic of operations from its start."""
    return TopicReader(
        bootstrap,
        topic.name,
        group_id=client_id,
        client_id=client_id,
        partitions=[0],
        makes_topics=makes_topics,
        rest_ms=_POLL_MS,
    )


class OperationFollower(TopicFollower, Generic[S]):
    """Calls `changed` in its own thread with the newest state: at the topic's end, and after later valid operations.

    While Kafka is unavailable, the last state stays in force.
    """

    def __init__(
        self,
        of: OperationTopic[S],
        topic: Reader,
        changed: Callable[[S], None],
        *,
        on_ready: Callable[[], None] = lambda: None,
        backoff_s: float = 0.5,
    ) -> None:
        super().__init__(
            f"{of.name}-follower",
            topic,
            (of.name,),
            poll_s=_POLL_MS / 1000,
            on_ready=on_ready,
            backoff_s=backoff_s,
        )
        self._of, self._changed = of, changed
        self._counted = Counted(of.decode)
        self._handed_over: Operation[S] | None = None

    def take(self, records: Sequence[SourceRecord], ends: Mapping[str, int]) -> None:
        """Pass the newest state to `changed` once the topic's end is reached. If that raises, the next call retries."""
        void = self._counted.void
        self._counted.take(records)
        if self._counted.void > void:
            log.warning("operations_void", topic=self._of.name, records=self._counted.void - void)
        if records:
            self._next[self._of.name] = records[-1].offset + 1
        if not self.is_behind:
            self.caught_up()

    def drop(self, topic: str) -> None:
        """Start again; the state in force stays until the first operation."""
        self._counted = Counted(self._of.decode)

    def caught_up(self) -> None:
        made = self._counted.last
        if made is not None and made is not self._handed_over:
            log.info("operation", topic=self._of.name, revision=made.after.revision, operation=made.operation)
            self._changed(made.after)
            self._handed_over = made


class NotKnown(DependencyUnavailable):
    """Kafka did not answer, but may have stored the record; the command's `list` shows whether it did."""


class Control(Generic[S]):
    """Reads and writes one topic of operations for an operator."""

    def __init__(self, kafka: Brokers, of: OperationTopic[S]) -> None:
        self._kafka, self._of = kafka, of

    def read(self) -> Counted[S]:
        counted = Counted(self._of.decode)
        ensure_topics(self._kafka, topics=(self._of.topic,))
        with self._reader() as topic:
            counted.take(topic.read_to_end())
        return counted

    def write(self, after: S, operation: str, operator: str = "") -> S:
        """Write the next record. operator: "" for this process's user.

        Raises: Conflict if another operation came first; DependencyUnavailable if nothing was written; NotKnown.
        """
        made = Operation(
            after=after,
            operation=operation,
            operator=operator or f"{getpass.getuser()}@{socket.gethostname()}",
            operation_id=secrets.token_hex(8),
            time_ms=time.time_ns() // 1_000_000,
        )
        producer, failure = BulkProducer(self._kafka, client_id=_CLIENT), None
        try:
            producer.send_many([Record(self._of.name, b"", self._of.encode(made), partition=0)])
        except DependencyUnavailable as exc:
            failure = exc  # Kafka may have written it nevertheless
        finally:
            producer.close(timeout_s=1.0)
        done = self._read_after(operation)
        if made.operation_id not in {one.operation_id for one in done}:
            if failure is not None:
                raise failure
            by = next((f"{one.operator}: {one.operation}" for one in done if one.after.revision == after.revision), "")
            raise Conflict(f"{operation}: another operation came first ({by}); this one changed nothing")
        return after

    def _read_after(self, operation: str) -> list[Operation[S]]:
        until = time.monotonic() + _KNOWN_WITHIN_S
        while True:
            try:
                return self.read().operations
            except DependencyUnavailable as exc:
                if time.monotonic() > until:
                    raise NotKnown(f"{operation}: it is not known whether this counted: {exc.message}") from exc
                time.sleep(0.5)

    @contextmanager
    def _reader(self) -> Iterator[Any]:
        topic = operation_reader(self._kafka, self._of, _CLIENT)
        try:
            topic.seek({0: 0})
            yield topic
        finally:
            topic.close()
