"""Pure functions of the encoder: make the model's jobs from histories, batch them in few padded shapes, make states
from the model's arrays, and compute items' popularity.

Items unknown to the model are left out.

Letters: B batch, n events of one sequence, M states wanted of it, P_q query components, P component pairs, d component
width.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.event_schema import EventSchema, default_schema
from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.encoding.actions import STRIDE, Actions
from services.algorithms.encoding.aversion import DECAY, WINDOW, Aversion
from services.algorithms.items.popularity import joined, level_of, without
from services.algorithms.scoring.packed_state import after_absence
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.interactions import Interaction
from services.contracts.wire import PackedQueryState
from services.platform.stream.records import Position
from services.user_state.merging import Arrival, Merge, Outcome
from services.user_state.values import PopularityStep, UserHistory


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One sequence for the model. Shapes: item_index (n,), event_time (n,) in seconds, oldest first.

    item_index: dense indices, with actions if the model reads them. user_index: -1 if unknown to training. positions:
    the M wanted positions, increasing. cache_key: 0 or more if the user's next sequence likely begins like this one.
    """

    item_index: npt.NDArray[np.int64]
    event_time: npt.NDArray[np.int64]
    user_index: int
    positions: Sequence[int]
    cache_key: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedStates:
    """One job's states. Shapes: components (M, P_q, d), gate (M, P) or None for a plain dot product."""

    components: npt.NDArray[np.float32]
    gate: npt.NDArray[np.float32] | None


@dataclass(slots=True)
class UserWork:
    """One user in a batch: arrivals, their merge, and wanted states (sequence number -> prefix lengths).

    attributed: numbers of the arrivals that get an attribution. is_traced: whether an arrival has a trace.
    """

    arrivals: list[Arrival]
    merged: Merge
    history: UserHistory
    attributed: Collection[int] = ()
    wanted: dict[int, list[int]] = field(default_factory=dict)
    is_traced: bool = False


UNKNOWN = PADDING_ITEM = -1
# Up to this many jobs are batched in the order given.
_TOGETHER = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The model's indices of items and users, and its sequence length.

    untrained: items of `item_index` unknown to training. actions: rows of the action embedding. aversion: moves states
    away from rejected items.
    """

    model_version: str
    item_index: Mapping[str, int]
    user_index: Mapping[str, int]
    max_history: int
    untrained: Set[str] = frozenset()
    schema: EventSchema = field(default_factory=default_schema)
    actions: Actions | None = None
    aversion: Aversion | None = None
    absence: AbsenceRows | None = None


def rows_of(vocabulary: Vocabulary, events: Sequence[StoredEvent]) -> npt.NDArray[np.int64]:
    """Return each event's row (n,) of item and action; UNKNOWN if the encoder ignores either."""
    get = vocabulary.item_index.get
    rows = np.array([get(event[4], UNKNOWN) for event in events], dtype=np.int64)
    if vocabulary.actions is not None:
        find = vocabulary.actions.row
        actions = np.array([find(event[5], event[6]) if event[5] else 0 for event in events], dtype=np.int64)
        return np.where((rows == UNKNOWN) | (actions < 0), UNKNOWN, rows + actions * STRIDE)
    is_encoded = {kind: vocabulary.schema.of(kind).is_encoded for kind in {event[5] for event in events} if kind}
    if not all(is_encoded.values()):
        rows[[not is_encoded.get(event[5], True) for event in events]] = UNKNOWN
    return rows


def cache_key(user_id: str) -> int:
    """Return a user's key of 63 bits in the encoders' caches. A collision only costs time."""
    return int.from_bytes(blake2b(user_id.encode(), digest_size=8, person=b"encoder-cache").digest(), "little") >> 1


def encode_job(
    vocabulary: Vocabulary,
    user_id: str,
    events: Sequence[StoredEvent],
    wanted: Iterable[int],
    *,
    cached: bool = False,
) -> tuple[EncodeJob | None, dict[int, int]]:
    """Return a job for the states after the first n events, for each n in `wanted`, and n -> row in the job's answer.
    The job is None if no wanted prefix has an item that the encoder reads. cached: see `EncodeJob.cache_key`.
    """
    lengths = sorted(set(wanted))
    longest = lengths[-1] if lengths else 0
    dense = rows_of(vocabulary, events[:longest])
    known = dense != UNKNOWN
    num_known = np.concatenate(([0], np.cumsum(known)))
    rows: dict[int, int] = {}
    positions: list[int] = []
    for length in lengths:
        position = int(num_known[length]) - 1
        if position < 0:
            continue
        if not positions or positions[-1] != position:
            positions.append(position)
        rows[length] = len(positions) - 1
    if not positions:
        return None, {}
    times = np.array([event[0] for event in events[:longest]], dtype=np.int64) // 1000
    job = EncodeJob(
        item_index=dense[known],
        event_time=times[known],
        user_index=vocabulary.user_index.get(user_id, UNKNOWN),
        positions=positions,
        cache_key=cache_key(user_id) if cached else None,
    )
    return job, rows


def length_buckets(max_history: int) -> list[int]:
    """Return the lengths that sequences are padded to. Evenly spread lengths grow by less than a third on average."""
    quarter = max_history // 4
    return sorted({max(4, quarter // 2), max(4, quarter), 2 * quarter, 3 * quarter, max_history})


def pad_jobs(jobs: Sequence[EncodeJob], buckets: Sequence[int]) -> dict[str, npt.NDArray[np.int64]]:
    """The model's inputs for some jobs: left-aligned, padded at the end.

    Shapes: item_index (B, L), event_time (B, L), user_index (B, 1), position (B, M): L padded length, M positions
    wanted.
    """
    longest = max(len(job.item_index) for job in jobs)
    length = next((bucket for bucket in buckets if bucket >= longest), longest)
    most = max(len(job.positions) for job in jobs)
    wanted = 1 << (most - 1).bit_length()
    items = np.full((len(jobs), length), PADDING_ITEM, dtype=np.int64)
    times = np.empty((len(jobs), length), dtype=np.int64)
    positions = np.empty((len(jobs), wanted), dtype=np.int64)
    for row, job in enumerate(jobs):
        used = len(job.item_index)
        items[row, :used] = job.item_index
        times[row, :used] = job.event_time
        times[row, used:] = job.event_time[-1]
        positions[row, : len(job.positions)] = job.positions
        positions[row, len(job.positions) :] = job.positions[-1]
    users = np.array([[job.user_index] for job in jobs], dtype=np.int64)
    return {"item_index": items, "event_time": times, "user_index": users, "position": positions}


def calls(jobs: Sequence[EncodeJob], numbers: Sequence[int], max_rows: int) -> Iterator[list[int]]:
    """Split the jobs with these numbers into calls of at most `max_rows`.

    More than `_TOGETHER` are sorted by length, so that a long history does not pad many short ones.
    """
    ordered = list(numbers)
    if len(ordered) > _TOGETHER:
        ordered.sort(key=lambda number: len(jobs[number].item_index))
    for start in range(0, len(ordered), max_rows):
        yield ordered[start : start + max_rows]


def user_state(
    vocabulary: Vocabulary, states: EncodedStates, row: int, events: Sequence[StoredEvent]
) -> PackedQueryState:
    """Return the state after `events`, moved away from rejected items."""
    against = _turned_down(vocabulary, events) if vocabulary.aversion is not None else {}
    if vocabulary.aversion is not None and against:
        gate = None if states.gate is None else states.gate[row]
        rows, weights = np.fromiter(against, np.int64), np.fromiter(against.values(), np.float64)
        components = vocabulary.aversion.steered(states.components[row], gate, rows, weights)
        states, row = EncodedStates(components[None], None if gate is None else gate[None]), 0
    return pack_state(states, row, vocabulary.model_version)


def attributed_state(
    vocabulary: Vocabulary, states: EncodedStates, row: int, last_event_ms: int, at_ms: int
) -> PackedQueryState:
    """Return the state before an event at `at_ms`, after the absence since `last_event_ms` (Unix milliseconds)."""
    state, _ = after_absence(
        pack_state(states, row, vocabulary.model_version), vocabulary.absence, last_event_ms, at_ms
    )
    return state


def _turned_down(vocabulary: Vocabulary, events: Sequence[StoredEvent]) -> dict[int, float]:
    """Return rows and weights of items that their newest recent event rejects."""
    schema, found, spoken = vocabulary.schema, dict[int, float](), set[str]()
    if not any(event.type in schema.can_speak_against for event in events[-WINDOW:]):
        return found
    for age, event in enumerate(reversed(events[-WINDOW:])):
        row = vocabulary.item_index.get(event.item_id)
        if event.item_id in spoken or row is None or event.item_id in vocabulary.untrained:
            continue
        spoken.add(event.item_id)
        weight = schema.feedback.weight(event.type, event.value) if event.type in schema.can_speak_against else 0.0
        if weight < 0:
            found[row] = min(1.0, -weight) * DECAY**age
    return found


def pack_state(states: EncodedStates, row: int, model_version: str) -> PackedQueryState:
    components = states.components[row]
    return PackedQueryState(
        model_version=model_version,
        components=components.astype("<f2").tobytes(),
        gate=b"" if states.gate is None else states.gate[row].astype("<f2").tobytes(),
        num_components=components.shape[0],
        component_width=components.shape[1],
    )


# Late events do not count, because the user's earlier events with the item are unknown.
_TAKEN = (Outcome.APPLIED, Outcome.KEPT_OUT, Outcome.KEPT_OUT_UNSEEN)


def popularity_steps(work: Iterable[UserWork], schema: EventSchema, half_life_s: float) -> dict[int, PopularityStep]:
    """Return how a batch changes the items' popularity in each partition. Only the strongest of a user's events with an
    item counts. An undone event is subtracted if the window still had it; otherwise it decays.
    """
    made: dict[int, tuple[dict[str, float], dict[str, float]]] = {}
    for user in work:
        _add_user(made, user, schema, half_life_s)
    return {
        partition: PopularityStep(half_life_s=half_life_s, joins=joins, goes=goes)
        for partition, (joins, goes) in made.items()
    }


def _add_user(
    made: dict[int, tuple[dict[str, float], dict[str, float]]], user: UserWork, schema: EventSchema, half_life_s: float
) -> None:
    # The history may include redelivered records; events before the batch have lower offsets.
    first = {arrival.partition: arrival.offset for arrival in reversed(user.arrivals)}
    items = {arrival.interaction.item_id for arrival in user.arrivals}
    items.update(undone.item_id for undone in user.merged.undone.values())
    stored: dict[Position, Interaction | StoredEvent] = {
        Position(event.partition, event.offset): event
        for event in user.history.events
        if event.item_id in items and event.offset < first.get(event.partition, math.inf)
    }
    # Events outside the window, of unknown weight.
    others = {
        (one.item_id, one.outcome == Outcome.APPLIED)
        for one in user.history.recent
        if one.item_id in items
        and one.offset < first.get(one.partition, math.inf)
        and Position(one.partition, one.offset) not in stored
    }
    for number, (arrival, outcome) in enumerate(zip(user.arrivals, user.merged.outcomes, strict=True)):
        undone = user.merged.undone.get(number)
        event = arrival.interaction if outcome in _TAKEN else None if undone is None else undone.event
        if event is None:
            continue
        before = _strongest(event.item_id, stored, schema, half_life_s)
        if undone is None:
            stored[Position(arrival.partition, arrival.offset)] = event
        else:
            stored.pop(undone.position, None)
        after = _strongest(event.item_id, stored, schema, half_life_s)
        if before == after or (event.item_id, schema.of(event.type).history) in others:
            continue
        levels = made.setdefault(arrival.partition, ({}, {}))[after < before]
        change = without(max(before, after), min(before, after))
        if change is not None:
            levels[event.item_id] = joined(change, levels.get(event.item_id, -math.inf))


def _strongest(
    item_id: str, events: Mapping[Position, Interaction | StoredEvent], schema: EventSchema, half_life_s: float
) -> float:
    weighed = (
        (schema.weight_for(event.type, event.value), event.event_time_ms)
        for event in events.values()
        if event.item_id == item_id
    )
    return max((level_of(weight, time_ms, half_life_s) for weight, time_ms in weighed if weight), default=-math.inf)
