"""Topics of operations: each record has the whole state after an operation.

A record is valid if its revision follows the last valid record's revision, so every reader accepts the first of two
simultaneous operations. The topic is never compacted, because it gets only a few records a week.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from services.platform.errors import FreshetError
from services.platform.stream.records import SourceRecord, read_ms, set_ms
from services.platform.stream.topic import FOREVER, Topic


@dataclass(frozen=True, kw_only=True, slots=True)
class Revised:
    """A whole state after `revision` operations."""

    revision: int = 0


S = TypeVar("S", bound=Revised)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation(Generic[S]):
    """An operation and the state after it. time_ms: Unix milliseconds."""

    after: S
    operation: str
    operator: str
    operation_id: str
    time_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationTopic(Generic[S]):
    """A topic of operations with its encoding. decode raises InvalidRequest with the field."""

    name: str
    encode: Callable[[Operation[S]], bytes]
    decode: Callable[[bytes | None], Operation[S]]

    @property
    def topic(self) -> Topic:
        return Topic(name=self.name, num_partitions=1, settings=FOREVER)


@dataclass(slots=True)
class Counted(Generic[S]):
    """The valid operations in order, and the number of other records."""

    decode: Callable[[bytes | None], Operation[S]]
    operations: list[Operation[S]] = field(default_factory=list)
    void: int = 0

    @property
    def last(self) -> Operation[S] | None:
        return self.operations[-1] if self.operations else None

    def take(self, records: Iterable[SourceRecord]) -> bool:
        """Apply records; return True if the state changed."""
        before = self.last
        for record in records:
            try:
                made = self.decode(record.value)
            except FreshetError:
                self.void += 1
                continue
            if made.after.revision == (0 if self.last is None else self.last.after.revision) + 1:
                self.operations.append(made)
            else:
                self.void += 1
        return self.last is not before


def set_operation(message: Any, made: Operation[Any]) -> None:
    """Write the operation, without its state, into a message."""
    message.revision = made.after.revision
    message.operation, message.operator, message.operation_id = made.operation, made.operator, made.operation_id
    set_ms(message.time, made.time_ms)


def operation_of(message: Any, after: S) -> Operation[S]:
    """The inverse of `set_operation`. Raises: InvalidRequest for an invalid time."""
    return Operation(
        after=after,
        operation=message.operation,
        operator=message.operator,
        operation_id=message.operation_id,
        time_ms=read_ms(message.time, "time"),
    )
