"""Merge one user's new records into the user's history: pure functions.

The rules:
- A position is applied once.
- A recent event id at another position is a duplicate.
- Events are ordered by (event time, partition, offset).
- A late event is inserted in order if the window reaches back that far; otherwise only its item is noted as seen.
- An event of a type that the schema excludes from histories changes no history, but its item may count as seen.
- An undo removes its event.
- Records at or below the user's forgotten positions have no effect.
- Items unknown to the model stay in the history.

Batch boundaries do not change the result.

Letters: L = max_history.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

from services.algorithms.bundles.event_schema import EventSchema, EventType
from services.algorithms.encoding.history import trim
from services.contracts.stored_history import RecentId, StoredEvent, hash_event_id
from services.contracts.topics.interactions import Interaction, decode_interaction, validate
from services.platform.errors import InvalidRequest
from services.platform.stream.records import DeadLetter, Position, SourceRecord, is_covered
from services.user_state.values import UserHistory

# Number of a user's last records whose event ids are stored. At most half as many records are applied together, so all
# ids of a redelivered batch are still stored.
RECENT_IDS = 128
MAX_RECORDS_PER_USER = RECENT_IDS // 2


class Outcome(IntEnum):
    """A record's effect. The numbers are stored."""

    APPLIED = 0
    DUPLICATE = 1
    # Older than the window; only the item is noted as seen.
    LATE = 2
    UNDONE = 3
    # The event to undo is neither in the history nor among the recent ids.
    UNDO_WITHOUT_EVENT = 4
    # At or below the user's forgotten position.
    FORGOTTEN = 5
    # The schema excludes the event's type from histories.
    KEPT_OUT = 6
    KEPT_OUT_UNSEEN = 7


@dataclass(frozen=True, slots=True)
class Arrival:
    """A valid interaction with an event id, its position, and the broker's time."""

    partition: int
    offset: int
    recorded_ms: int
    interaction: Interaction

    def fields(self, user_pseudonym: str) -> dict[str, Any]:
        return {
            "event_id": self.interaction.event_id,
            "item_id": self.interaction.item_id,
            "event_time_ms": self.interaction.event_time_ms,
            "recorded_ms": self.recorded_ms,
            "partition": self.partition,
            "offset": self.offset,
            "user_pseudonym": user_pseudonym,
        }


def read_arrival(record: SourceRecord) -> Arrival | DeadLetter:
    """The record's validated interaction, or a dead letter."""
    try:
        interaction = decode_interaction(record.value, record.headers, record.key, missing_time_ms=record.written_ms)
        # With the broker's time, a second reading gives the same result.
        validate(interaction, record.written_ms)
    except InvalidRequest as exc:
        return DeadLetter(record, exc.message)
    if not interaction.event_id:
        interaction = replace(interaction, event_id=f"{record.partition}-{record.offset}")
    return Arrival(record.partition, record.offset, record.written_ms, interaction)


class Prefix(NamedTuple):
    """The first `num_events` events of the merge's sequence `sequence`."""

    sequence: int
    num_events: int


@dataclass(frozen=True, slots=True)
class Undone:
    """An undone event: item, position, and the event if the window still had it."""

    item_id: str
    position: Position
    event: StoredEvent | None = None


@dataclass(slots=True)
class Merge:
    """A user after some arrivals.

    outcomes: one per arrival. sequences: the histories that prefixes refer to, each oldest event first; the last is the
    new history. preceding: arrival number -> the history before an event that is inserted or gets an attribution.
    undone: arrival number -> the undone event. seen_times: newest event time of each item to note as seen. unseen:
    items no longer seen; they are removed before `seen_times` is added. changed_by: number of the last arrival that
    changed the history. news: at least one arrival is new.
    """

    recent: list[RecentId]
    positions: dict[int, int]
    sequences: list[list[StoredEvent]]
    outcomes: list[Outcome] = field(default_factory=list)
    preceding: dict[int, Prefix] = field(default_factory=dict)
    undone: dict[int, Undone] = field(default_factory=dict)
    seen_times: dict[str, int] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    changed_by: int | None = None
    news: bool = False

    @property
    def changed(self) -> bool:
        """Whether the history changed."""
        return self.changed_by is not None

    @property
    def events(self) -> list[StoredEvent]:
        return self.sequences[-1]

    def replace_events(self, events: list[StoredEvent]) -> None:
        """Replace the history; a prefix may refer to the old list."""
        newest = next(reversed(self.preceding.values()), None)  # sequence numbers of prefixes never decrease
        if newest is not None and newest.sequence == len(self.sequences) - 1:
            self.sequences.append(events)
        else:
            self.sequences[-1] = events


def merge(
    history: UserHistory,
    arrivals: Sequence[Arrival],
    max_history: int,
    schema: EventSchema,
    forgotten: Mapping[int, int] | None = None,
) -> Merge:
    """Apply arrivals (in stream order per partition, at most MAX_RECORDS_PER_USER) to a user's history.

    forgotten: the last forgotten offset per partition. Cost: O(len(arrivals) + L); a late event adds O(L).
    """
    void = forgotten or {}
    result = Merge(recent=list(history.recent), positions=dict(history.positions), sequences=[list(history.events)])
    # The last index of each id in `recent`. Only the last RECENT_IDS entries count; older ones are deleted below.
    last_at = {entry.id_hash: at for at, entry in enumerate(history.recent)}
    before: dict[tuple[int, int], int] | None = None
    for number, arrival in enumerate(arrivals):
        if arrival.offset <= history.positions.get(arrival.partition, -1):
            if before is None:
                before = {(entry.partition, entry.offset): entry.outcome for entry in history.recent}
            found = before.get((arrival.partition, arrival.offset))
            result.outcomes.append(_presumed(arrival, schema, void) if found is None else Outcome(found))
            continue
        id_hash = hash_event_id(arrival.interaction.event_id)
        item_id = ""
        if is_covered(void, arrival.partition, arrival.offset):
            outcome = Outcome.FORGOTTEN
        elif last_at.get(id_hash, -1) >= max(0, len(result.recent) - RECENT_IDS):
            outcome = Outcome.DUPLICATE
        elif arrival.interaction.undoes_event_id:
            outcome = _undo(result, number, hash_event_id(arrival.interaction.undoes_event_id))
        else:
            kind = schema.of(arrival.interaction.type)
            outcome = _insert(result, number, arrival, id_hash, max_history, kind)
            if outcome is not Outcome.LATE and (kind.seen or kind.is_attributed):
                item_id = arrival.interaction.item_id
        result.outcomes.append(outcome)
        last_at[id_hash] = len(result.recent)
        result.recent.append(RecentId(id_hash, arrival.partition, arrival.offset, outcome, item_id))
        result.positions[arrival.partition] = arrival.offset
        result.news = True
    del result.recent[:-RECENT_IDS]
    return result


def _presumed(arrival: Arrival, schema: EventSchema, void: Mapping[int, int]) -> Outcome:
    """Return the outcome of an applied record whose id is no longer stored, for example after an interrupted import."""
    if is_covered(void, arrival.partition, arrival.offset):
        return Outcome.FORGOTTEN
    kind = schema.of(arrival.interaction.type)
    if kind.history or arrival.interaction.undoes_event_id:
        return Outcome.APPLIED
    return Outcome.KEPT_OUT if kind.seen else Outcome.KEPT_OUT_UNSEEN


def _insert(result: Merge, number: int, arrival: Arrival, id_hash: int, max_history: int, kind: EventType) -> Outcome:
    interaction = arrival.interaction
    event = StoredEvent(
        interaction.event_time_ms,
        arrival.partition,
        arrival.offset,
        id_hash,
        interaction.item_id,
        interaction.type,
        interaction.value,
        interaction.exposure_id,
    )
    events = result.events
    if kind.seen:
        result.seen_times[event.item_id] = max(result.seen_times.get(event.item_id, 0), event.event_time_ms)
    if not kind.history:
        return _keep_out(result, number, event, max_history, kind)
    if not events or event[:3] > events[-1][:3]:
        result.preceding[number] = Prefix(len(result.sequences) - 1, len(events))
        events.append(event)
    else:
        at = bisect_right(events, event[:3], key=_order)
        # A shorter window has never moved, so it has the whole history and nothing precedes it.
        if at == 0 and len(events) >= max_history - max_history // 4:
            return Outcome.LATE
        result.preceding[number] = Prefix(len(result.sequences) - 1, at)
        result.replace_events([*events[:at], event, *events[at:]])
    if len(result.events) >= max_history:
        result.replace_events(list(trim(result.events, max_history)))
    result.changed_by = number
    return Outcome.APPLIED


def _keep_out(result: Merge, number: int, event: StoredEvent, max_history: int, kind: EventType) -> Outcome:
    """Leave the history unchanged. If the event gets an attribution, store the prefix before it in `preceding`."""
    if kind.is_attributed:
        at = bisect_right(result.events, event[:3], key=_order)
        if at == 0 and len(result.events) >= max_history - max_history // 4:
            return Outcome.LATE
        result.preceding[number] = Prefix(len(result.sequences) - 1, at)
    return Outcome.KEPT_OUT if kind.seen else Outcome.KEPT_OUT_UNSEEN


def _undo(result: Merge, number: int, id_hash: int) -> Outcome:
    """Remove an event from the history. If only its recent id is left, mark it as undone."""
    undone = None
    events = result.events
    at = next((i for i, event in enumerate(events) if event.id_hash == id_hash), None)
    if at is not None:
        undone = Undone(events[at].item_id, Position(events[at].partition, events[at].offset), events[at])
        result.replace_events([*events[:at], *events[at + 1 :]])
        result.changed_by = number
    first, was_seen = max(0, len(result.recent) - RECENT_IDS), True
    for index in range(len(result.recent) - 1, first - 1, -1):
        entry = result.recent[index]
        if entry.id_hash == id_hash and entry.item_id:
            undone = undone or Undone(entry.item_id, Position(entry.partition, entry.offset))
            result.recent[index] = entry._replace(item_id="")
            was_seen = entry.outcome != Outcome.KEPT_OUT_UNSEEN
            break
    if undone is None:
        return Outcome.UNDO_WITHOUT_EVENT
    result.undone[number] = undone
    if not was_seen:
        return Outcome.UNDONE
    item_id = undone.item_id
    again = max((event.event_time_ms for event in result.events if event.item_id == item_id), default=None)
    others = (entry for entry in result.recent[first:] if entry.outcome != Outcome.KEPT_OUT_UNSEEN)
    if again is None and any(entry.item_id == item_id for entry in others):
        return Outcome.UNDONE  # the item stays seen because of an event outside the window
    result.unseen.add(item_id)
    result.seen_times.pop(item_id, None)
    if again is not None:
        result.seen_times[item_id] = again
    return Outcome.UNDONE


def _order(event: StoredEvent) -> tuple[int, int, int]:
    return event[:3]


def rounds(places: Sequence[tuple[int, str]], limit: int = MAX_RECORDS_PER_USER) -> list[list[int]]:
    """Split records, given as partition and user ("" if there is no user), into parts with at most `limit` records of a
    user. Each part takes as many records of each partition as possible.
    """
    parts: list[list[int]] = []
    reached: dict[int, int] = {}
    counts: Counter[tuple[int, str]] = Counter()
    for number, (partition, user_id) in enumerate(places):
        part = reached.get(partition, 0)
        while user_id and counts[part, user_id] >= limit:
            part += 1
        counts[part, user_id] += 1
        reached[partition] = part
        parts += [[] for _ in range(part + 1 - len(parts))]
        parts[part].append(number)
    return parts
