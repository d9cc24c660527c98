"""From histories to encode jobs, and from the model's arrays to stored states.

The model knows dense indices; everything outside knows string ids. Unknown items are left out here, and only here.

Letters: M states wanted of one sequence, P_q query components, P component pairs, d component width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.state_store import PackedState, StoredEvent
from services.encoder.domain import EncodedStates, EncodeJob

UNKNOWN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What the model knows by number, and how much of a history it takes."""

    model_version: str
    item_index: Mapping[str, int]
    user_index: Mapping[str, int]
    max_history: int


def encode_job(
    vocabulary: Vocabulary, user_id: str, events: Sequence[StoredEvent], wanted: Iterable[int]
) -> tuple[EncodeJob | None, dict[int, int]]:
    """A job for the states after the first n events, for each n in `wanted`.

    Returns the job (None when no wanted prefix holds a known item), and for each n that has a state its row in the
    job's answer.
    """
    lengths = sorted(set(wanted))
    longest = lengths[-1] if lengths else 0
    get = vocabulary.item_index.get
    dense = np.array([get(event[4], UNKNOWN) for event in events[:longest]], dtype=np.int64)
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
    )
    return job, rows


def pack_state(states: EncodedStates, row: int) -> PackedState:
    """One state in half precision, as it is stored and sent."""
    components = states.components[row]
    return PackedState(
        components=components.astype("<f2").tobytes(),
        gate=b"" if states.gate is None else states.gate[row].astype("<f2").tobytes(),
        num_components=components.shape[0],
        component_width=components.shape[1],
    )
