"""A topic of operations, read and written by an operator."""

import getpass
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from services.contracts.operation_follower import operation_reader
from services.contracts.operations import Counted, Operation, OperationTopic, Revised
from services.contracts.topics import ensure_topics
from services.platform.errors import Conflict, DependencyUnavailable
from services.platform.stream.kafka import Brokers, BulkProducer, Record

_CLIENT = "freshet-operator"
_KNOWN_WITHIN_S = 20.0

S = TypeVar("S", bound=Revised)


class NotKnown(DependencyUnavailable):
    """Kafka did not answer and may have the record; the command's `list` shows it."""


class Control(Generic[S]):
    """One topic of operations, for one operator."""

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
