"""Forget records: what survives the wire, and what is refused with the field named."""

import pytest
from freshet.v1 import common_pb2, events_pb2

from services.contracts.topics.forgets import Forget, decode_forget, encode_forget
from services.platform.errors import InvalidRequest

FORGET = Forget(forget_id="f1", user_id="日本", up_to={0: -1, 7: 2**40}, requested_ms=1_800_000_000_123)


def message(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "forget_id": "f1",
        "user_id": "zoe-7",
        "up_to": [common_pb2.StreamPosition(partition=1, offset=5)],
    }
    data: bytes = events_pb2.Forget(**(fields | changes)).SerializeToString()  # type: ignore[arg-type]
    return data


def test_a_forget_survives_the_wire() -> None:
    assert decode_forget("日本".encode(), encode_forget(FORGET)) == FORGET


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        (b"zoe-7", None, "value"),
        (b"zoe-7", b"\xff", "value"),
        (b"zoe-7", message(user_id=""), "user_id"),
        (b"zoe-7", message(forget_id="x" * 129), "forget_id"),
        (b"bob", message(), "key"),
        (None, message(), "key"),
        (b"zoe-7", message(up_to=[]), "up_to"),
        (b"zoe-7", message(up_to=[common_pb2.StreamPosition(partition=-1, offset=0)]), "up_to"),
        (b"zoe-7", message(up_to=[common_pb2.StreamPosition(partition=0, offset=-2)]), "up_to"),
    ],
)
def test_what_breaks_a_limit_is_refused_without_naming_the_user(
    key: bytes | None, value: bytes | None, names: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{names}=") as caught:
        decode_forget(key, value)
    assert "zoe-7" not in caught.value.message
