"""Who is to be forgotten, up to where, and what stays of such a user: pure functions and values.

A forget names positions of `interactions`; what lies at or below them counts for nothing in whatever is made of the
topic, now, after a second delivery, and in every later rebuild or import. What comes after counts again. Knows neither
Kafka nor Redis.
"""

from collections.abc import Iterable, Mapping, Sequence

from services.algorithms.bundles.event_schema import TURNED_DOWN_EVENTS, EventSchema
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.retraction import furthest, is_covered
from services.contracts.stored_history import PackedHistory, StoredEvent, pack_history
from services.contracts.topics.forgets import FORGETS, Forget
from services.platform.errors import PreconditionFailed
from services.user_state.values import UserHistory, UserUpdate


class Forgotten:
    """Who was forgotten, up to where: everything that `forgets` has said so far. Places only ever grow."""

    def __init__(self) -> None:
        self._up_to: dict[str, Mapping[int, int]] = {}

    def add(self, forget: Forget) -> None:
        """From now on the user is forgotten up to there; what an earlier forget covered stays covered."""
        before = self._up_to.get(forget.user_id)
        # What was handed out is never changed; and most users are forgotten once, so most share the forget's own.
        self._up_to[forget.user_id] = forget.up_to if before is None else furthest(before, forget.up_to)

    def up_to(self, user_id: str) -> Mapping[int, int]:
        """Per partition the last forgotten offset; empty for who was never forgotten."""
        return self._up_to.get(user_id, {})

    def last(self) -> Mapping[int, int]:
        """Per partition the highest offset that any forget names."""
        highest: Mapping[int, int] = {}
        for up_to in self._up_to.values():
            highest = furthest(highest, up_to)
        return highest


def check_same_log(named: Mapping[int, int], ends: Mapping[int, int]) -> None:
    """named: per partition the highest offset that any forget names. ends: one past the last record, of those
    partitions of `interactions` that are looked at.

    Raises: PreconditionFailed when a forget names a position that the topic does not have: it speaks of another log.
    """
    for partition, offset in named.items():
        if offset >= ends.get(partition, offset + 1):
            raise PreconditionFailed(
                f"partition {partition} of the topic ends before offset {ends[partition]}, but {FORGETS!r} voids a "
                f"user up to {offset}: the topic was made anew. Empty {FORGETS!r}, too, or bring the topic back"
            )


def pseudonyms_of(user_id: str, keys: Sequence[bytes]) -> list[str]:
    """The user's pseudonyms under several keys, in their order."""
    return [pseudonym_of(user_id, key) for key in keys]


def erase(history: UserHistory, up_to: Mapping[int, int]) -> UserHistory:
    """What stays of a user who is forgotten up to there: later events, positions, and of recent ids what a second
    delivery is told by (a hash and an outcome; items only of later ones)."""
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
    """What is written in the place of all that was stored of a user. The history has no state until somebody makes
    one."""
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
    """The items of a history, oldest event first, that were turned down of late."""
    return schema.turned_down([(one.item_id, (one.type, one.value)) for one in events[-TURNED_DOWN_EVENTS:]])


def seen_in(events: Iterable[StoredEvent]) -> dict[str, int]:
    """The items of a history, with the newest time of each: what a forgotten user's later events say was seen."""
    seen: dict[str, int] = {}
    for event in events:
        seen[event.item_id] = max(event.event_time_ms, seen.get(event.item_id, 0))
    return seen


def packed(history: UserHistory, seen: Mapping[str, int]) -> PackedHistory:
    """The user as `histories` keeps it."""
    return pack_history(history.positions, history.forgotten, history.events, history.recent, seen)
