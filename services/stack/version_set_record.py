"""The record of version sets as an operator reads and writes it."""

import getpass
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.contracts.topics import ensure_topics
from services.contracts.topics.version_sets import TOPIC, VERSION_SETS, Counted, Operation, encode_operation
from services.contracts.version_set_follower import version_set_reader
from services.contracts.version_sets import VersionSets
from services.platform.errors import Conflict, DependencyUnavailable
from services.platform.stream.kafka import Brokers, BulkProducer, Record

_CLIENT = "freshet-model"
_KNOWN_WITHIN_S = 20.0


class NotKnown(DependencyUnavailable):
    """Kafka may have the operation's record, and does not say; `freshet model list` will."""


class Control:
    """The record, for one operator."""

    def __init__(self, kafka: Brokers) -> None:
        self._kafka = kafka

    def read(self) -> Counted:
        """Everything that was done so far. Raises: DependencyUnavailable."""
        counted = Counted()
        ensure_topics(self._kafka, topics=(TOPIC,))
        with self._reader() as topic:
            counted.take(topic.read_to_end())
        return counted

    def write(self, after: VersionSets, operation: str) -> VersionSets:
        """Make the next record.

        Raises: Conflict when another operator's came first; DependencyUnavailable when it was not written; NotKnown.
        """
        made = Operation(
            after=after,
            operation=operation,
            operator=f"{getpass.getuser()}@{socket.gethostname()}",
            operation_id=secrets.token_hex(8),
            time_ms=time.time_ns() // 1_000_000,
        )
        producer, failure = BulkProducer(self._kafka, client_id=_CLIENT), None
        try:
            producer.send_many([Record(VERSION_SETS, b"", encode_operation(made), partition=0)])
        except DependencyUnavailable as exc:
            failure = exc  # Kafka may have it all the same
        finally:
            producer.close(timeout_s=1.0)
        done = self._read_after(operation)
        if made.operation_id not in {one.operation_id for one in done}:
            if failure is not None:
                raise failure
            by = next((f"{one.operator}: {one.operation}" for one in done if one.after.revision == after.revision), "")
            raise Conflict(f"{operation}: another operation came first ({by}); this one changed nothing")
        return after

    def _read_after(self, operation: str) -> list[Operation]:
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
        topic = version_set_reader(self._kafka, _CLIENT)
        try:
            topic.seek({0: 0})
            yield topic
        finally:
            topic.close()
