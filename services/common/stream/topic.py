"""A topic as it is made, and what reading the Protobuf of any topic's record has in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from services.common.errors import InvalidRequest

NUM_PARTITIONS = 8
FOREVER = {"retention.ms": "-1"}
COMPACTED = {"cleanup.policy": "compact"}

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """One topic and how it is made when it is missing; an existing topic is left as it is.

    has_dead_letters: what of it nobody can read goes to a topic of its own.
    """

    name: str
    num_partitions: int = NUM_PARTITIONS
    settings: Mapping[str, str] = field(default_factory=dict)
    has_dead_letters: bool = False


def parse(kind: type[_M], value: bytes | None) -> _M:
    """The message of a record, unchecked. Raises: InvalidRequest when there are no bytes or they are not one."""
    name = kind.DESCRIPTOR.name
    if not value:
        raise InvalidRequest.of("value", "no bytes", f"a whole {name} message")
    try:
        return kind.FromString(value)
    except DecodeError as exc:
        raise InvalidRequest.of("value", f"{len(value)} unreadable bytes", f"a whole {name} message") from exc


def check_key(key: bytes | None, wanted: bytes, name: str) -> None:
    """Raises: InvalidRequest unless a record's key is what its value says. name: what the key is to be."""
    if key != wanted:
        raise InvalidRequest.of("key", "absent" if key is None else f"{len(key)} other bytes", name)
