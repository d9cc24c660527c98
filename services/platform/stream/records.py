"""Records of topics: positions, times and parsing, for every reader and writer.

A position can be packed into an integer of 63 bits, ordered by partition, then offset. A mapping from
partition to offset covers all records at or below these offsets; an absent partition or offset -1 covers no record.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from services.platform.errors import InvalidRequest

_OFFSET_BITS = 48
MAX_OFFSET = (1 << _OFFSET_BITS) - 1
MAX_PARTITION = (1 << 15) - 1
# Protobuf's limits: the years 1 to 9999. Other values would fail when written again.
_LEAST_S, _MOST_S = -62_135_596_800, 253_402_300_799
MOST_MS = 1000 * _MOST_S + 999

UpTo = Mapping[int, int]
_M = TypeVar("_M", bound=Message)


class Position(NamedTuple):
    """The position of a record in one topic."""

    partition: int
    offset: int


def pack_position(partition: int, offset: int) -> int:
    """Return the position as one integer. Both numbers have to be within their limits."""
    return partition << _OFFSET_BITS | offset


def unpack_position(packed: int) -> Position:
    """The inverse of `pack_position`."""
    return Position(packed >> _OFFSET_BITS, packed & MAX_OFFSET)


def read_position(name: str, message: Any, *, least: int = 0) -> Position:
    """Return the position in a message with the fields `partition` and `offset`. Raises: InvalidRequest for `name`."""
    if not (0 <= message.partition <= MAX_PARTITION and least <= message.offset <= MAX_OFFSET):
        raise InvalidRequest.of(
            name,
            f"{message.partition}:{message.offset}",
            f"partition 0-{MAX_PARTITION}, offset {least} to {MAX_OFFSET}",
        )
    return Position(message.partition, message.offset)


def read_up_to(name: str, messages: Iterable[Any]) -> dict[int, int]:
    """Return the last offset per partition; -1: none. Raises: InvalidRequest for `name`."""
    up_to: dict[int, int] = {}
    for message in messages:
        partition, offset = read_position(name, message, least=-1)
        up_to[partition] = max(offset, up_to.get(partition, -1))
    if not up_to:
        raise InvalidRequest.of(name, "absent", "at least one position")
    return up_to


def write_up_to(messages: Any, up_to: UpTo) -> None:
    """Add each partition's offset to a repeated field."""
    for partition in sorted(up_to):
        messages.add(partition=partition, offset=up_to[partition])


def is_covered(up_to: UpTo, partition: int, offset: int) -> bool:
    """Return whether the mapping covers the record at this position."""
    return offset <= up_to.get(partition, -1)


def covers(one: UpTo, other: UpTo) -> bool:
    """Return whether `one` covers everything that `other` covers."""
    return all(is_covered(one, partition, offset) for partition, offset in other.items())


def furthest(one: UpTo, other: UpTo) -> dict[int, int]:
    """Return the positions that cover exactly what `one` or `other` covers."""
    return {partition: max(one.get(partition, -1), other.get(partition, -1)) for partition in one.keys() | other.keys()}


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A record as read. Header values may be null.

    written_ms: Unix milliseconds; the topic's setting decides whether it is the broker's or the writer's time.
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
    """A record that its reader cannot use, and the reason."""

    record: SourceRecord
    reason: str

    @property
    def offset(self) -> int:
        return self.record.offset


def set_ms(stamp: Any, unix_ms: int) -> None:
    stamp.seconds, ms = divmod(unix_ms, 1000)
    stamp.nanos = ms * 1_000_000


def read_ms(stamp: Any, name: str) -> int:
    """Return the Timestamp, rounded down to milliseconds.

    Raises: InvalidRequest outside Protobuf's limits.
    """
    if not 0 <= stamp.nanos < 1_000_000_000:
        raise InvalidRequest.of(f"{name}.nanos", stamp.nanos, "0-999999999")
    if not _LEAST_S <= stamp.seconds <= _MOST_S:
        raise InvalidRequest.of(f"{name}.seconds", stamp.seconds, f"{_LEAST_S} to {_MOST_S}: years 1 to 9999")
    return int(stamp.seconds * 1000 + stamp.nanos // 1_000_000)


def parse(kind: type[_M], value: bytes | None) -> _M:
    """Return the record's message, unchecked. Raises: InvalidRequest for absent or malformed bytes."""
    name = kind.DESCRIPTOR.name
    if not value:
        raise InvalidRequest.of("value", "no bytes", f"a whole {name} message")
    try:
        return kind.FromString(value)
    except DecodeError as exc:
        raise InvalidRequest.of("value", f"{len(value)} unreadable bytes", f"a whole {name} message") from exc


def check_key(key: bytes | None, wanted: bytes, name: str) -> None:
    """Raise InvalidRequest unless the key is `wanted`. name: describes the right key in the error."""
    if key != wanted:
        raise InvalidRequest.of("key", "absent" if key is None else f"{len(key)} other bytes", name)
