"""Which users are forgotten, up to which positions, and what remains: pure functions and values.

A forget names positions of `interactions`. Records at or below them have no effect, even after redelivery, a rebuild or
an import.
"""

from collections.abc import Iterable, Mapping, Sequence

from services.algorithms.bundles.event_schema import TURNED_DOWN_EVENTS, EventSchema
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.stored_history import PackedHistory, StoredEvent, pack_history
from services.contracts.topics.forgets import FORGETS, Forget
from services.platform.errors import PreconditionFailed
from services.platform.stream.records import furthest, is_covered
from services.user_state.values import UserHistory, UserUpdate


class Forgotten:
    """Per user, the forgotten positions from all forgets so far. They only increase."""

    def __init__(self) -> None:
        self._up_to: dict[str, Mapping[int, int]] = {}

    def add(self, forget: Forget) -> None:
        """Forget the user up to these positions, too."""
        before = self._up_to.get(forget.user_id)
        # Returned mappings never change; most users share their only forget's.
        self._up_to[forget.user_id] = forget.up_to if before is None else furthest(before, forget.up_to)

    def up_to(self, user_id: str) -> Mapping[int, int]:
        """The last forgotten offset per partition; empty if never forgotten."""
        return self._up_to.get(user_id, {})

    def last(self) -> Mapping[int, int]:
        """The highest offset per partition in any forget."""
        highest: Mapping[int, int] = {}
        for up_to in self._up_to.values():
            highest = furthest(highest, up_to)
        return highest


def check_same_log(named: Mapping[int, int], ends: Mapping[int, int]) -> None:
    """Check that the forgets belong to this log.

    named: per partition the highest offset in any forget. ends: one past the last record of each partition to check.
    Raises: PreconditionFailed if a forget names an offset at or after its partition's end.
    """
    for partition, offset in named.items():
        if offset >= ends.get(partition, offset + 1):
            raise PreconditionFailed(
                f"partition {partition} of `interactions` ends before offset {ends[partition]}, but {FORGETS!r} voids "
                f"a user up to {offset}: `interactions` was recreated. Empty {FORGETS!r} too, or restore `interactions`"
            )


def pseudonyms_of(user_id: str, keys: Sequence[bytes]) -> list[str]:
    """The user's pseudonym for each key, in order."""
    return [pseudonym_of(user_id, key) for key in keys]


def erase(history: UserHistory, up_to: Mapping[int, int]) -> UserHistory:
    """The history without the events up to these positions, which are added to `forgotten`.

    All `positions` remain, and hashes and outcomes of recent event ids, which identify a redelivery.
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
    """An update that replaces everything stored of a user, without query state."""
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
    """A history's recently rejected items. events: oldest first."""
    return schema.turned_down([(one.item_id, (one.type, one.value)) for one in events[-TURNED_DOWN_EVENTS:]])


def seen_in(events: Iterable[StoredEvent]) -> dict[str, int]:
    """A history's items with the newest time of each."""
    seen: dict[str, int] = {}
    for event in events:
        seen[event.item_id] = max(event.event_time_ms, seen.get(event.item_id, 0))
    return seen


def packed(history: UserHistory, seen: Mapping[str, int]) -> PackedHistory:
    """The user in the format of `histories`."""
    return pack_history(history.positions, history.forgotten, history.events, history.recent, seen)
