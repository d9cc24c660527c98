"""A user's history as columns, in Redis and in `histories`."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple, TypeVar

from freshet.v1 import events_pb2

from services.platform.errors import PreconditionFailed


class StoredEvent(NamedTuple):
    """One event of a history, ordered by (event_time_ms, partition, offset). id_hash: see `hash_event_id`."""

    event_time_ms: int
    partition: int
    offset: int
    id_hash: int
    item_id: str
    type: str = ""
    value: float = 0.0
    exposure_id: str = ""


class RecentId(NamedTuple):
    """A recent event id (hashed), with its record's position and outcome (the writer's code, 0-255). item_id: the
    item of an interaction that counts, so that an undo works after the event left the history; else "".
    """

    id_hash: int
    partition: int
    offset: int
    outcome: int
    item_id: str = ""


# These do the same as `_make`, without a Python call for each event.
_EVENT, _RECENT_ID = partial(tuple.__new__, StoredEvent), partial(tuple.__new__, RecentId)


class PackedHistory(NamedTuple):
    """A stored history, not decoded. events, recent: serialised `HistoryEvents` and `RecentIds`. seen_item_ids: joined
    with NUL. seen_times_ms: the first item's newest event time, then differences.
    """

    positions: Mapping[int, int]
    forgotten: Mapping[int, int]
    events: bytes
    recent: bytes
    seen_item_ids: str
    seen_times_ms: Sequence[int]


def hash_event_id(event_id: str) -> int:
    """Return 64 bits of an event id. Two of 128 ids collide with probability 4e-16."""
    return int.from_bytes(hashlib.blake2b(event_id.encode(), digest_size=8).digest(), "little")


_FORMAT = 2
_FORMAT_BYTE = bytes([_FORMAT])

_T = TypeVar("_T")


def pack_events(events: Sequence[StoredEvent]) -> bytes:
    """Return the format's number, then the serialised `HistoryEvents`; b"" for none."""
    if not events:
        return b""
    return _FORMAT_BYTE + events_message(events).SerializeToString()


def unpack_events(blob: bytes | None) -> list[StoredEvent]:
    """The inverse of `pack_events`. Raises: PreconditionFailed for another format."""
    return events_of(events_pb2.HistoryEvents.FromString(event_columns(blob)))


def event_columns(blob: bytes | None) -> bytes:
    """Return the serialised `HistoryEvents`. Raises: PreconditionFailed for another format."""
    if blob and blob[0] != _FORMAT:
        raise PreconditionFailed(
            f"a history has format {blob[0]}, this version reads {_FORMAT}: another version of Freshet wrote it. "
            "Run that version, or empty the state store: it is filled again from the topic"
        )
    return blob[1:] if blob else b""


def pack_seen(seen: Mapping[str, int]) -> tuple[str, list[int]]:
    return "\0".join(seen), _differences(list(seen.values()))


def pack_history(
    positions: Mapping[int, int],
    forgotten: Mapping[int, int],
    events: Sequence[StoredEvent],
    recent: Sequence[RecentId],
    seen: Mapping[str, int],
) -> PackedHistory:
    """Return a history as the state store's `dump` does."""
    columns = events_message(events).SerializeToString()
    return PackedHistory(positions, forgotten, columns, pack_recent(recent), *pack_seen(seen))


def seen_of(item_ids: str, times_ms: Iterable[int]) -> dict[str, int]:
    """The inverse of `pack_seen`. Raises: ValueError if items and times differ in number."""
    return dict(zip(item_ids.split("\0") if item_ids else (), accumulate(times_ms), strict=True))


def events_message(events: Sequence[StoredEvent]) -> events_pb2.HistoryEvents:
    """Return a history's columns, a `HistoryEvents`."""
    if not events:
        return events_pb2.HistoryEvents()
    times, partitions, offsets, hashes, items, types, values, exposures = zip(*events, strict=True)
    number = {name: at for at, name in enumerate(dict.fromkeys(types))}
    has_types = len(number) > 1 or types[0] != ""
    return events_pb2.HistoryEvents(
        count=len(events),
        event_time_ms=_differences(times),
        partition=_one_or_all(partitions),
        offset=_differences(offsets),
        id_hash=hashes,
        item_ids="\0".join(items),
        type=_one_or_all([number[name] for name in types]) if has_types else (),
        types=number if has_types else (),
        value=_one_or_all(values) if any(values) else (),
        exposure_ids="\0".join(exposures) if any(exposures) else "",
    )


def events_of(message: Any) -> list[StoredEvent]:
    """The inverse of `events_message`. Raises: ValueError if columns differ in length."""
    count, names = message.count, message.types
    if not count:
        return []
    columns = (
        accumulate(message.event_time_ms),
        _all(message.partition, count, 0),
        accumulate(message.offset),
        message.id_hash,
        message.item_ids.split("\0"),
        [names[at] for at in _all(message.type, count, 0)] if names else [""] * count,
        _all(message.value, count, 0.0),
        message.exposure_ids.split("\0") if message.exposure_ids else [""] * count,
    )
    return list(map(_EVENT, zip(*columns, strict=True)))


def pack_recent(recent: Sequence[RecentId]) -> bytes:
    """Return the columns of recent ids, a serialised `RecentIds`."""
    if not recent:
        return b""
    hashes, partitions, offsets, outcomes, items = zip(*recent, strict=True)
    message = events_pb2.RecentIds(
        count=len(recent),
        id_hash=hashes,
        partition=_one_or_all(partitions),
        offset=_differences(offsets),
        outcome=_one_or_all(outcomes) if any(outcomes) else (),
        item_ids="\0".join(items) if any(items) else "",
    )
    return message.SerializeToString()


def unpack_recent(ids: bytes | None) -> list[RecentId]:
    """The inverse of `pack_recent`."""
    return recent_of(events_pb2.RecentIds.FromString(ids or b""))


def recent_of(message: Any) -> list[RecentId]:
    """Return the recent ids of a `RecentIds`. Raises: ValueError if columns differ in length."""
    count = message.count
    columns = (
        message.id_hash,
        _all(message.partition, count, 0),
        accumulate(message.offset),
        _all(message.outcome, count, 0),
        message.item_ids.split("\0") if message.item_ids else [""] * count,
    )
    return list(map(_RECENT_ID, zip(*columns, strict=True)))


def _differences(numbers: Sequence[int]) -> list[int]:
    return [*numbers[:1], *map(sub, numbers[1:], numbers)]


def _one_or_all(column: Sequence[_T]) -> Sequence[_T]:
    return column[:1] if column.count(column[0]) == len(column) else column


def _all(column: Sequence[_T], count: int, absent: _T) -> Sequence[_T]:
    return column if len(column) == count else [*(column or (absent,))] * count
