"""The topic `histories`: durable histories, and marks that say how far they reflect `interactions`.

The encoder writes and reads a user's record in the user's home partition. Each reading of `interactions` from its
beginning has a number. A record is valid if its reading number equals the one in the partition's newest mark. Values
end with a checksum; if it is wrong, the user's interactions are read again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from freshet.v1 import events_pb2
from google.protobuf.message import Message

from services.contracts import stored_history
from services.contracts.stored_history import PackedHistory, RecentId, StoredEvent
from services.contracts.topics.interactions import INTERACTIONS
from services.platform.errors import InvalidRequest
from services.platform.stream.records import parse, read_position, write_up_to
from services.platform.stream.topic import COMPACTED, Topic

HISTORIES = "histories"
MAX_RECORD_BYTES = 2 << 20
_DAY_MS = 24 * 3600 * 1000
TOPIC = Topic(
    name=HISTORIES,
    # Old records are compacted within about a day, even with few writes.
    settings=COMPACTED | {"max.compaction.lag.ms": str(_DAY_MS), "max.message.bytes": str(MAX_RECORD_BYTES)},
    as_many_as=INTERACTIONS,
)
# The empty key never collides with a user id.
MARK_KEY = b""
_FORMAT = 1
_CHECKSUM_BYTES = 8
# Field 15, eight bytes.
_CHECKSUM_TAG = b"\x79"

_M = TypeVar("_M", bound=Message)


class EncodedHistory(NamedTuple):
    """A record to write."""

    partition: int
    key: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord:
    """A user's record. seen: item -> newest event time. Other fields: see `user_state.values.UserHistory`."""

    reading: int
    positions: dict[int, int]
    forgotten: dict[int, int]
    events: list[StoredEvent]
    recent: list[RecentId]
    seen: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """`histories` reflects a partition of `interactions` up to `covered` (-1: nothing yet).

    reading: number of a reading of `interactions` from its beginning; 0 before the first. num_partitions: partitions of
    `interactions`. anchors, counts: see `user_state.values.Progress`.
    """

    reading: int
    covered: int
    num_partitions: int
    anchors: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


def encode_history(user_id: str, history: PackedHistory, reading: int) -> bytes:
    """Return a record's value; its key is the user id. Return b"" if it is too large for Kafka: the interactions
    are then read again.
    """
    message = events_pb2.UserHistory(
        format=_FORMAT, reading=reading, seen_item_ids=history.seen_item_ids, seen_time_ms=history.seen_times_ms
    )
    write_up_to(message.applied, history.positions)
    write_up_to(message.forgotten_up_to, history.forgotten)
    message.events.MergeFromString(history.events)
    message.recent.MergeFromString(history.recent)
    value = _sealed(user_id.encode(), message)
    return value if len(value) < MAX_RECORD_BYTES - 1024 else b""


def decode_history(key: bytes, value: bytes | None) -> HistoryRecord:
    message = _opened(events_pb2.UserHistory, key, value)
    try:
        return HistoryRecord(
            reading=message.reading,
            positions=dict(read_position("applied", one, least=-1) for one in message.applied),
            forgotten=dict(read_position("forgotten_up_to", one, least=-1) for one in message.forgotten_up_to),
            events=stored_history.events_of(message.events),
            recent=stored_history.recent_of(message.recent),
            seen=stored_history.seen_of(message.seen_item_ids, message.seen_time_ms),
        )
    except (ValueError, IndexError) as exc:
        raise InvalidRequest.of("events", f"columns that do not fit: {exc}", "as many entries as events") from exc


def encode_mark(mark: Mark) -> bytes:
    message = events_pb2.HistoriesMark(
        format=_FORMAT,
        reading=mark.reading,
        covered=mark.covered,
        num_partitions=mark.num_partitions,
        anchors=mark.anchors,
        counts={name: count for name, count in mark.counts.items() if count},
    )
    return _sealed(MARK_KEY, message)


def decode_mark(value: bytes | None) -> Mark:
    message = _opened(events_pb2.HistoriesMark, MARK_KEY, value)
    return Mark(
        reading=message.reading,
        covered=message.covered,
        num_partitions=message.num_partitions,
        anchors=message.anchors,
        counts=dict(message.counts),
    )


def _sealed(key: bytes, message: Message) -> bytes:
    data = message.SerializeToString()
    return data + _CHECKSUM_TAG + _checksum(key, data)


def _opened(kind: type[_M], key: bytes, value: bytes | None) -> Any:
    message: Any = parse(kind, value)
    data, end = (value or b"")[: -_CHECKSUM_BYTES - 1], (value or b"")[-_CHECKSUM_BYTES - 1 :]
    if end != _CHECKSUM_TAG + _checksum(key, data):
        raise InvalidRequest.of("checksum", end[1:].hex(), "that of key and value: the record was altered")
    if message.format != _FORMAT:
        raise InvalidRequest.of("format", message.format, f"{_FORMAT}: a newer version of Freshet wrote it")
    return message


def _checksum(key: bytes, data: bytes) -> bytes:
    return blake2b(len(key).to_bytes(4, "little") + key + data, digest_size=_CHECKSUM_BYTES).digest()
