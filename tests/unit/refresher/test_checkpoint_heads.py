"""Heads of the topic `refresher-checkpoints` whose checksum is right and whose content is another program's."""

import hashlib
import json
import zlib
from typing import Any

import pytest
from fakes.stream import MemoryTopics

from services.contracts.topics.refresher_checkpoints import (
    HEADS,
    REFRESHER_CHECKPOINTS,
    Head,
    Piece,
    decode_head,
    encode_head,
)
from services.platform.errors import InvalidRequest
from services.refresher.adapters.checkpoint_topic import CheckpointTopic

GOOD = Head(owner="o", next_piece=3, values={"format": 2}, parts={"rest": (Piece("o/1", 0, 5, "d"),)})


def sealed(body: bytes) -> bytes:
    return hashlib.sha256(body).digest() + body


def head(**changes: Any) -> bytes:
    document = json.loads(zlib.decompress(encode_head(GOOD)[32:]))
    return sealed(zlib.compress(json.dumps({**document, **changes}).encode()))


BAD = {
    "not compressed": sealed(b"{}"),
    "no JSON": sealed(zlib.compress(b"{")),
    "no object": sealed(zlib.compress(b"[1]")),
    "parts as a list": head(parts=[1]),
    "a piece that is a number": head(parts={"rest": [1]}),
    "a piece of three": head(parts={"rest": [["k", 0, 5]]}),
    "an offset that is text": head(parts={"rest": [["k", "0", 5, "d"]]}),
    "an owner that is a number": head(owner=1),
    "a number that is text": head(next_piece="3"),
    "values as a list": head(values=[]),
}


def test_a_head_is_read_as_it_was_written() -> None:
    assert decode_head(encode_head(GOOD)) == GOOD


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_a_whole_head_of_other_content_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="value="):
        decode_head(value)


@pytest.mark.parametrize(("key", "value"), [(b"m/x/claim", b"a"), (b"m//claim", b"a"), (b"m/0/claim", b"\xff")])
def test_a_claim_of_no_partition_or_owner_is_nobodys(key: bytes, value: bytes) -> None:
    topics = MemoryTopics({REFRESHER_CHECKPOINTS: 2})
    topics.write(REFRESHER_CHECKPOINTS, key, value, partition=HEADS)
    checkpoints = CheckpointTopic(topics.reader(), None, "m")  # type: ignore[arg-type]
    assert list(checkpoints.look(0)) == []
