"""The topic `forgets`: who is to be forgotten, up to where; its limits, and how a record is written and read.

The gateway writes it, each encoder process reads it whole. Whatever is wrong is an InvalidRequest naming the field and
what is allowed; the user's id is not repeated, since messages end up in logs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from freshet.v1 import events_pb2

from services.platform.stream.position import read_up_to, write_up_to
from services.platform.stream.times import read_ms, set_ms
from services.platform.stream.topic import COMPACTED, Topic, check_key, parse
from services.platform.validation import validate_id

FORGETS = "forgets"
TOPIC = Topic(name=FORGETS, num_partitions=1, settings=COMPACTED, has_dead_letters=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Everything of a user at or below these positions of `interactions` (partition -> offset; -1: nothing of it) is to
    count for nothing; what comes after counts again. requested_ms: Unix milliseconds."""

    forget_id: str
    user_id: str
    up_to: Mapping[int, int]
    requested_ms: int


def encode_forget(forget: Forget) -> bytes:
    """The value of a record; its key is the user id."""
    message = events_pb2.Forget(forget_id=forget.forget_id, user_id=forget.user_id)
    write_up_to(message.up_to, forget.up_to)
    set_ms(message.requested_time, forget.requested_ms)
    value: bytes = message.SerializeToString()
    return value


def decode_forget(key: bytes | None, value: bytes | None) -> Forget:
    """Read and check a record; a tombstone is none. Raises: InvalidRequest naming the field."""
    message = parse(events_pb2.Forget, value)
    validate_id("forget_id", message.forget_id)
    validate_id("user_id", message.user_id)
    check_key(key, message.user_id.encode(), "the record's user_id")
    return Forget(
        forget_id=message.forget_id,
        user_id=message.user_id,
        up_to=read_up_to("up_to", message.up_to),
        requested_ms=read_ms(message.requested_time, "requested_time"),
    )
