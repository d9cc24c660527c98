"""The topic `forgets`: which users to forget, up to which positions of `interactions`.

The gateway writes it; each encoder process reads it in full. Errors do not contain the user's id, since messages are
logged.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from freshet.v1 import events_pb2

from services.platform.stream.records import check_key, parse, read_ms, read_up_to, set_ms, write_up_to
from services.platform.stream.topic import COMPACTED, Topic
from services.platform.validation import validate_id

FORGETS = "forgets"
TOPIC = Topic(name=FORGETS, num_partitions=1, settings=COMPACTED, has_dead_letters=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """A user's interactions at or below `up_to` (partition -> offset; -1: none) are void.

    requested_ms: Unix milliseconds.
    """

    forget_id: str
    user_id: str
    up_to: Mapping[int, int]
    requested_ms: int


def encode_forget(forget: Forget) -> bytes:
    """Return a record's value; its key is the user id."""
    message = events_pb2.Forget(forget_id=forget.forget_id, user_id=forget.user_id)
    write_up_to(message.up_to, forget.up_to)
    set_ms(message.requested_time, forget.requested_ms)
    return message.SerializeToString()


def decode_forget(key: bytes | None, value: bytes | None) -> Forget:
    """Decode and validate a record; a tombstone is invalid. Raises: InvalidRequest with the field."""
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
