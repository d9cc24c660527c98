"""A record as it lies in its topic, and one that cannot be used."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One record. written_ms: the broker's append time or its writer's time of it, as the topic is set, Unix
    milliseconds. headers: Kafka's header values may be null."""

    topic: str
    partition: int
    offset: int
    written_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that will never be used, and why."""

    record: SourceRecord
    reason: str

    @property
    def offset(self) -> int:
        """Where the record lies in its partition."""
        return self.record.offset
