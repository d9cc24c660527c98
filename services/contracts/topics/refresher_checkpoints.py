"""The topic `refresher-checkpoints`: refreshers' states for a partition's next owner.

A checkpoint has a head, in partition 0, which names its parts by offset, size and digest. Parts lie in the other
partitions, split to fit a broker's limit. A part that no head names gets a tombstone.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.platform.errors import InvalidRequest
from services.platform.stream.topic import COMPACTED, NUM_PARTITIONS, Topic

REFRESHER_CHECKPOINTS = "refresher-checkpoints"
# The newest segment is never compacted, and heads are read in full.
TOPIC = Topic(
    name=REFRESHER_CHECKPOINTS,
    num_partitions=1 + NUM_PARTITIONS,
    settings={**COMPACTED, "segment.bytes": str(64 << 20), "min.cleanable.dirty.ratio": "0.1"},
)
HEADS = 0
# Kafka's limit with key and overhead: 1,048,588 bytes.
PART_BYTES = 1_000_000

_SHA_BYTES = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """A record with a part or a piece of a part. key: the end of the record's key."""

    key: str
    offset: int
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A checkpoint. next_piece: number of the owner's next record."""

    owner: str
    next_piece: int
    values: Mapping[str, Any]
    parts: Mapping[str, tuple[Piece, ...]]

    @property
    def keys(self) -> set[str]:
        return {piece.key for pieces in self.parts.values() for piece in pieces}


def prefix_of(model_version: str, partition: int) -> str:
    """Return the prefix of keys of a partition of `attributions`."""
    return f"{model_version}/{partition}/"


def digest_of(data: bytes) -> str:
    return base64.b85encode(hashlib.sha256(data).digest()[:16]).decode()


def encode_head(head: Head) -> bytes:
    document = {
        "owner": head.owner,
        "next_piece": head.next_piece,
        "values": dict(head.values),
        "parts": {
            name: [[piece.key, piece.offset, piece.size, piece.digest] for piece in pieces]
            for name, pieces in head.parts.items()
        },
    }
    body = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)
    return hashlib.sha256(body).digest() + body


def decode_head(value: bytes) -> Head:
    """Decode a head. Raises: InvalidRequest if it is truncated, altered or of another format."""
    sha, body = value[:_SHA_BYTES], value[_SHA_BYTES:]
    if hashlib.sha256(body).digest() != sha:
        raise InvalidRequest.of("value", f"sha256 {hashlib.sha256(body).hexdigest()}", sha.hex())
    try:
        document = json.loads(zlib.decompress(body))
        parts = {name: tuple(_piece(*piece) for piece in pieces) for name, pieces in document["parts"].items()}
        owner, next_piece, values = document["owner"], document["next_piece"], document["values"]
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise InvalidRequest.of("value", f"{exc!r}", "a head as this program writes it") from exc
    if not (isinstance(owner, str) and type(next_piece) is int and isinstance(values, dict)):
        raise InvalidRequest.of("value", "owner, next_piece or values of another type", "text, whole number, object")
    return Head(owner=owner, next_piece=next_piece, values=values, parts=parts)


def _piece(key: str, offset: int, size: int, digest: str) -> Piece:
    if not (isinstance(key, str) and type(offset) is type(size) is int and isinstance(digest, str)):
        raise TypeError(f"a piece of {key!r:.40}, {offset!r:.40}, {size!r:.40}, {digest!r:.40}")
    return Piece(key, offset, size, digest)
