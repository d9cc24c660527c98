"""A record's position: partition and offset, also as one integer.

It has 63 bits, ordered by partition, then offset. The functions on messages take any message with the fields
`partition` and `offset`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from services.platform.errors import InvalidRequest

_OFFSET_BITS = 48
MAX_OFFSET = (1 << _OFFSET_BITS) - 1
MAX_PARTITION = (1 << 15) - 1


class Position(NamedTuple):
    """The position of a record in one topic."""

    partition: int
    offset: int


def pack_position(partition: int, offset: int) -> int:
    """Return one integer; both within their limits."""
    return partition << _OFFSET_BITS | offset


def unpack_position(packed: int) -> Position:
    """The inverse of `pack_position`."""
    return Position(packed >> _OFFSET_BITS, packed & MAX_OFFSET)


def read_position(name: str, message: Any, *, least: int = 0) -> Position:
    """Return a message's position. Raises: InvalidRequest for the field `name`."""
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


def write_up_to(messages: Any, up_to: Mapping[int, int]) -> None:
    """Add each partition's offset to a repeated field."""
    for partition in sorted(up_to):
        messages.add(partition=partition, offset=up_to[partition])
