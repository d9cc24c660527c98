"""Read the topic `forgets` in an encoder process: first the whole topic, then new records. Erase forgotten events.

A forget is a record that names positions of `interactions`. Interactions at or below them have no effect, even after
redelivery, a rebuild or an import. The caller tracks progress.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from services.algorithms.bundles.event_schema import TURNED_DOWN_EVENTS, EventSchema
from services.contracts.stored_history import PackedHistory, StoredEvent, pack_history
from services.contracts.topics.forgets import FORGETS, Forget, decode_forget
from services.platform.errors import DependencyUnavailable, InvalidRequest, PreconditionFailed
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.records import SourceRecord, furthest, is_covered
from services.user_state.values import UserHistory, UserUpdate

log = structlog.get_logger()

_PARTITION = 0


class Forgotten:
    """The forgotten positions of each user, which only increase."""

    def __init__(self) -> None:
        self._up_to: dict[str, Mapping[int, int]] = {}

    def add(self, forget: Forget) -> None:
        before = self._up_to.get(forget.user_id)
        # Mappings never change, so a user with one forget shares its mapping instead of a copy.
        self._up_to[forget.user_id] = forget.up_to if before is None else furthest(before, forget.up_to)

    def read(self, topic: "ForgetTopic") -> None:
        """Add all forgets of a topic. Raises: DependencyUnavailable."""
        for record in topic.read():
            if record.forget is not None:
                self.add(record.forget)

    def up_to(self, user_id: str) -> Mapping[int, int]:
        """Return the last forgotten offset per partition; empty if the user was never forgotten."""
        return self._up_to.get(user_id, {})

    def last(self) -> Mapping[int, int]:
        highest: Mapping[int, int] = {}
        for up_to in self._up_to.values():
            highest = furthest(highest, up_to)
        return highest


def check_same_log(named: Mapping[int, int], ends: Mapping[int, int]) -> None:
    """Raise PreconditionFailed if a forget names an offset at or after its partition's end.

    named: per partition the highest offset in any forget. ends: one past the last record of each partition to check.
    """
    for partition, offset in named.items():
        if offset >= ends.get(partition, offset + 1):
            raise PreconditionFailed(
                f"partition {partition} of `interactions` ends before offset {ends[partition]}, but {FORGETS!r} voids "
                f"a user up to {offset}: `interactions` was recreated. Empty {FORGETS!r} too, or restore `interactions`"
            )


def erase(history: UserHistory, up_to: Mapping[int, int]) -> UserHistory:
    """Return the history without the events up to these positions, and with the positions in `forgotten`.

    The applied positions and the hashes and outcomes of recent event ids remain, because they identify a redelivery.
    """
    forgotten = furthest(history.forgotten, up_to)
    return UserHistory(
        events=[event for event in history.events if not is_covered(forgotten, event.partition, event.offset)],
        recent=[
            entry._replace(item_id="") if is_covered(forgotten, entry.partition, entry.offset) else entry
            for entry in history.recent
        ],
        positions=dict(history.positions),
        forgotten=forgotten,
        expected=history.expected,
    )


def whole_update(
    user_id: str,
    model_version: str,
    history: UserHistory,
    seen: Mapping[str, int],
    schema: EventSchema,
    *,
    expected: bytes,
) -> UserUpdate:
    """Return an update that replaces everything stored of a user, without query state."""
    return UserUpdate(
        user_id=user_id,
        model_version=model_version,
        expected=expected,
        positions=history.positions,
        events=history.events,
        recent=history.recent,
        seen_times=seen,
        turned_down=turned_down(schema, history.events),
        forgotten=history.forgotten,
    )


def turned_down(schema: EventSchema, events: Sequence[StoredEvent]) -> list[str]:
    """Return the recently rejected items of a history. events: oldest first."""
    recent = events[-TURNED_DOWN_EVENTS:]
    if schema.can_speak_against.isdisjoint(one.type for one in recent):
        return []  # the usual case, without a list of all events
    return schema.turned_down([(one.item_id, (one.type, one.value)) for one in recent])


def seen_in(events: Iterable[StoredEvent]) -> dict[str, int]:
    """Return a history's items with the newest time of each."""
    seen: dict[str, int] = {}
    for event in events:
        seen[event.item_id] = max(event.event_time_ms, seen.get(event.item_id, 0))
    return seen


def packed(history: UserHistory, seen: Mapping[str, int]) -> PackedHistory:
    return pack_history(history.positions, history.forgotten, history.events, history.recent, seen)


@dataclass(frozen=True, slots=True)
class ForgetRecord:
    """A record with its forget, or with the reason why it cannot be read."""

    record: SourceRecord
    forget: Forget | None
    reason: str = ""


class ForgetTopic:
    """Reads the topic in order. Not thread-safe."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._is_whole = False

    def read(self) -> list[ForgetRecord]:
        """Return the records since the last call without waiting; the first call returns the whole topic.

        Raises: DependencyUnavailable; the next call then reads the same records.
        """
        found = self._reader.poll(0) if self._is_whole else self._read_whole()
        return [_decoded(record) for record in found]

    def close(self) -> None:
        """Close the connection; the next read connects again and continues."""
        self._reader.close()

    def _read_whole(self) -> list[SourceRecord]:
        partitions = list(self._reader.partitions())
        if partitions != [_PARTITION]:
            raise PreconditionFailed(
                f"topic {FORGETS!r} has partitions {partitions}; allowed: one, so that it has an order"
            )
        self._reader.seek({_PARTITION: 0})
        found = self._reader.read_to_end()
        self._is_whole = True
        return found


@dataclass(kw_only=True, eq=False)
class KnownForgets:
    """All forgets read so far.

    ends: returns the end offset of each partition of `interactions`. unreadable: unreadable records that have no dead
    letter yet. named: for each partition the highest offset in any forget.
    """

    topic: ForgetTopic
    forgotten: Forgotten
    ends: Callable[[], Offsets] = dict
    unreadable: list[ForgetRecord] = field(default_factory=list, init=False)
    named: Mapping[int, int] = field(default_factory=dict, init=False)
    # Each user's latest forget; compaction retains it.
    _latest: dict[str, ForgetRecord] = field(default_factory=dict, init=False)
    # Records not yet compared with the log's ends, and whether the last comparison found positions beyond the ends.
    _compared_next: list[ForgetRecord] = field(default_factory=list, init=False)
    _was_ahead: bool = field(default=False, init=False)
    # Guards what `of` reads.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def read(self) -> list[ForgetRecord]:
        """Return the readable records since the last call.

        Raises: DependencyUnavailable, also the first time that a forget names a position beyond the log's end: a newly
        elected leader may not know its end yet.
        """
        self._compared_next += self.topic.read()
        ends = self.ends() if self._compared_next else {}
        found = [_within(ends, record) for record in self._compared_next]
        ahead = [one.record.offset for one, within in zip(self._compared_next, found, strict=True) if within is not one]
        was_ahead, self._was_ahead = self._was_ahead, bool(ahead)
        if ahead and not was_ahead:
            raise DependencyUnavailable(
                f"forgets {ahead[:10]} name positions beyond the log's end; they are read again"
            )
        if ahead:
            log.error("forgets_ahead_of_log", offsets=ahead, ends=dict(ends))
        readable = []
        for record, within in zip(self._compared_next, found, strict=True):
            if record.forget is None or within.forget is None:
                self.unreadable.append(record)
                continue
            self.named = furthest(self.named, record.forget.up_to)
            with self._lock:
                self.forgotten.add(within.forget)
                self._latest[within.forget.user_id] = within
            readable.append(within)
        self._compared_next = []
        return readable

    def behind(self, offset: int) -> list[ForgetRecord]:
        """Return each user's latest forget after this offset, and drop unreadable records up to it."""
        self.unreadable = [one for one in self.unreadable if one.record.offset > offset]
        return [one for one in self._latest.values() if one.record.offset > offset]

    def of(self, user_id: str) -> tuple[int, Mapping[int, int]] | None:
        """Return the offset of the user's latest forget, and the forgotten positions. Thread-safe."""
        with self._lock:
            latest = self._latest.get(user_id)
            return None if latest is None else (latest.record.offset, self.forgotten.up_to(user_id))


def _decoded(record: SourceRecord) -> ForgetRecord:
    try:
        return ForgetRecord(record, decode_forget(record.key, record.value))
    except InvalidRequest as exc:
        return ForgetRecord(record, None, exc.message)


def _within(ends: Offsets, record: ForgetRecord) -> ForgetRecord:
    """Limit the positions to the log's present end, so that later events count."""
    if record.forget is None:
        return record
    named = record.forget.up_to
    up_to = {partition: min(offset, ends.get(partition, offset + 1) - 1) for partition, offset in named.items()}
    return record if up_to == named else replace(record, forget=replace(record.forget, up_to=up_to))
