"""From histories to encode jobs, and from the model's arrays to stored states.

The model knows dense indices; everything outside knows string ids. An item that training never saw becomes its hash
bucket here, and only here; where the model has no buckets it is left out.

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
from services.algorithms.encoding.item_buckets import item_bucket
from services.algorithms.scoring.packed_state import after_absence
from services.contracts.query_state import PackedQueryState
from services.contracts.stored_history import StoredEvent
from services.encoder.domain import EncodedStates, EncodeJob

UNKNOWN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What the model knows by number, and how much of a history it takes.

    untrained: items of `item_index` that the bundle holds without training having seen them. schema: what types of
    events mean. actions: rows of the model's action embedding, where it has one. aversion: leads states away from what
    was turned down; None: they stay. absence: what the model knows of absences; None: nothing.
    """

    model_version: str
    item_index: Mapping[str, int]
    user_index: Mapping[str, int]
    max_history: int
    num_item_buckets: int = 0
    untrained: Set[str] = frozenset()
    schema: EventSchema = field(default_factory=default_schema)
    actions: Actions | None = None
    aversion: Aversion | None = None
    absence: AbsenceRows | None = None

    def row(self, item_id: str) -> int:
        """What stands for an item inside a history: its dense index, else its bucket's, else UNKNOWN."""
        index = self.item_index.get(item_id, UNKNOWN)
        if self.num_item_buckets and (index == UNKNOWN or item_id in self.untrained):
            return len(self.item_index) + item_bucket(item_id, self.num_item_buckets)
        return index


def rows_of(vocabulary: Vocabulary, events: Sequence[StoredEvent]) -> npt.NDArray[np.int64]:
    """What stands for each event (n,), its item's row with its action's; UNKNOWN for those that the encoder does not
    read: items that it does not know, and types of events."""
    get = vocabulary.item_index.get
    numbers = [get(event[4], UNKNOWN) for event in events]
    if vocabulary.num_item_buckets and (vocabulary.untrained or UNKNOWN in numbers):
        numbers = [vocabulary.row(event[4]) for event in events]
    rows = np.array(numbers, dtype=np.int64)
    if vocabulary.actions is not None:
        find = vocabulary.actions.row
        actions = np.array([find(event[5], event[6]) if event[5] else 0 for event in events], dtype=np.int64)
        return np.where((rows == UNKNOWN) | (actions < 0), UNKNOWN, rows + actions * STRIDE)
    is_encoded = {kind: vocabulary.schema.of(kind).is_encoded for kind in {event[5] for event in events} if kind}
    if not all(is_encoded.values()):
        rows[[not is_encoded.get(event[5], True) for event in events]] = UNKNOWN
    return rows


def cache_key(user_id: str) -> int:
    """A user's key in the encoders' caches, 63 bits. What is cached is compared with what is asked for, so two users
    with one key would cost time, never a wrong state."""
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

    `cached` says that this user's next job will likely begin as this one does (the stream's do).
    Returns the job (None when no wanted prefix holds an item that can be encoded), and for each n that has a state its
    row in the job's answer.
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
    """The state after `events`, to ask with: what the encoder made of them, led away from what was turned down."""
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
    """The state before an event at `at_ms`, whose own last event was at `last_event_ms` (Unix milliseconds): what the
    encoder made, after the absence in between."""
    state, _ = after_absence(
        pack_state(states, row, vocabulary.model_version), vocabulary.absence, last_event_ms, at_ms
    )
    return state


def _turned_down(vocabulary: Vocabulary, events: Sequence[StoredEvent]) -> dict[int, float]:
    """Rows of items that the last events speak against, and how much; of several events for one item the newest."""
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
    """One state in half precision, as it is stored and sent. model_version: of the model that made it."""
    components = states.components[row]
    return PackedQueryState(
        model_version=model_version,
        components=components.astype("<f2").tobytes(),
        gate=b"" if states.gate is None else states.gate[row].astype("<f2").tobytes(),
        num_components=components.shape[0],
        component_width=components.shape[1],
    )
