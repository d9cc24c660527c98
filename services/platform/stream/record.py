"""A record of a topic, and one that cannot be used."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One record. written_ms: the broker's or the writer's time, by the topic's setting, Unix milliseconds. headers:
    values may be null.
    """

    topic: str
    partition: int
    offset: int
    written_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An unusable record, and the reason."""

    record: SourceRecord
    reason: str

    @property
    def offset(self) -> int:
        """The record's offset."""
        return self.record.offset
