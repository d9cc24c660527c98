"""Convert histories to encode jobs, and the model's arrays to stored states.

Items unknown to the model are left out.

Letters: M states wanted of one sequence, P_q query components, P component pairs, d component width.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.event_schema import EventSchema, default_schema
from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.encoding.actions import STRIDE, Actions
from services.algorithms.encoding.aversion import DECAY, WINDOW, Aversion
from services.algorithms.scoring.packed_state import after_absence
from services.contracts.query_state import PackedQueryState
from services.contracts.stored_history import StoredEvent
from services.encoder.domain import EncodedStates, EncodeJob

UNKNOWN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The model's indices of items and users, and its sequence length.

    untrained: items of `item_index` unknown to training. schema: the meaning of event types. actions: rows of the
    action embedding, if any. aversion: moves states away from rejected items; None: off. absence: the absence rows, if
    any.
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
    """Each event's row (n,), of item and action; UNKNOWN if the encoder ignores either."""
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
    """A user's key in the encoders' caches, 63 bits. The cache compares entry and job, so a collision only costs
    time.
    """
    return int.from_bytes(blake2b(user_id.encode(), digest_size=8, person=b"encoder-cache").digest(), "little") >> 1


def encode_job(
    vocabulary: Vocabulary,
    user_id: str,
    events: Sequence[StoredEvent],
    wanted: Iterable[int],
    *,
    cached: bool = False,
) -> tuple[EncodeJob | None, dict[int, int]]:
    """A job for the states after the first n events, for each n in `wanted`.

    cached: the user's next job will likely begin like this one, as in the stream. The job is None if no wanted prefix
    has an item that the encoder reads. The dictionary gives, for each n with a state, its row in the job's answer.
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


def user_state(
    vocabulary: Vocabulary, states: EncodedStates, row: int, events: Sequence[StoredEvent]
) -> PackedQueryState:
    """The state after `events` for retrieval, moved away from rejected items."""
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
    """The state before an event at `at_ms`, after the absence since `last_event_ms` (Unix milliseconds)."""
    state, _ = after_absence(
        pack_state(states, row, vocabulary.model_version), vocabulary.absence, last_event_ms, at_ms
    )
    return state


def _turned_down(vocabulary: Vocabulary, events: Sequence[StoredEvent]) -> dict[int, float]:
    """Rows of items that recent events reject, with weights. An item's newest event counts."""
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
    """One state in half precision, as stored and sent."""
    components = states.components[row]
    return PackedQueryState(
        model_version=model_version,
        components=components.astype("<f2").tobytes(),
        gate=b"" if states.gate is None else states.gate[row].astype("<f2").tobytes(),
        num_components=components.shape[0],
        component_width=components.shape[1],
    )
