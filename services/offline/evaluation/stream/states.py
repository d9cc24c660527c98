"""Query states before each event of a stream, as serving would have held them: one causal pass per window.

An item that the model does not know stays in the history and is left out of what the encoder reads, unless the model
has rows for unknown items. It knows nothing of scores or of what is learnt from the states.

Letters: n events, S distinct states, L history length, D encoder width, P_q query components, P = P_q * P_x, d width.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.history import windows
from services.algorithms.item_buckets import item_buckets
from services.algorithms.states import QueryStates
from services.offline.datasets import Interactions
from services.offline.evaluation.stream.setting import BoolArray, IntArray, TrainingPart
from services.offline.training.models.sequential import PADDING, SequentialModel

_WINDOWS_PER_BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EventStates:
    """`states` are S distinct states; rows (n,) say which preceded each event, -1 where the user had no history."""

    states: QueryStates
    rows: IntArray

    def of(self, events: IntArray) -> QueryStates:
        """States before the events at these places, which must have one."""
        chosen = self.rows[events]
        gate = self.states.gate
        return QueryStates(components=self.states.components[chosen], gate=None if gate is None else gate[chosen])


def states_before(
    model: SequentialModel, part: TrainingPart, interactions: Interactions, *, first: int, end: int | None = None
) -> EventStates:
    """States before the events in rows [first, end) of `interactions`, from everything its user did before.

    `part` is what the model was trained on: its vocabularies are the model's. Place 0 of the result is row `first`.
    """
    end = len(interactions) if end is None else end
    item_rows = _history_rows(model, part, interactions)[interactions.items[:end]]
    read = np.flatnonzero(item_rows >= 0)
    order = read[np.argsort(interactions.users[read], kind="stable")]
    counts = np.bincount(interactions.users[read], minlength=interactions.num_users)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    before = _read_before(interactions.users[:end], item_rows >= 0)[first:]
    users = interactions.users[first:end].astype(np.int64)
    # The state before an event is the one after the last event that the encoder read: its place among all that are.
    places = np.where(before > 0, offsets[users] + before - 1, -1)
    wanted = np.unique(places[places >= 0])
    states = _encode(
        model,
        items=item_rows[order],
        times=interactions.timestamps[order].astype(np.int64),
        offsets=offsets,
        user_rows=part.user_rows,
        wanted=wanted,
    )
    rows = np.where(places >= 0, np.searchsorted(wanted, places), -1).astype(np.int64)
    return EventStates(states=states, rows=rows)


def _history_rows(model: SequentialModel, part: TrainingPart, interactions: Interactions) -> IntArray:
    """What stands for each item inside a history (X,): its row, else its bucket where the model has some, else -1."""
    num_buckets = model.encoder_shape.num_item_buckets
    if not num_buckets:
        return part.item_rows
    return np.where(
        part.item_rows >= 0, part.item_rows, model.num_items + item_buckets(interactions.item_ids, num_buckets)
    )


def _read_before(users: npt.NDArray[np.int32], is_read: BoolArray) -> IntArray:
    """For each event, how many earlier ones of its user the encoder reads."""
    order = np.argsort(users, kind="stable")
    running: IntArray = np.cumsum(is_read[order]) - is_read[order]
    sorted_users = users[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_users[1:] != sorted_users[:-1]]))
    base: IntArray = np.repeat(running[starts], np.diff(np.concatenate([starts, [len(users)]])))
    before = np.empty(len(users), dtype=np.int64)
    before[order] = running - base
    return before


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """One window to encode: places [start, start + length), for the states wanted[first_wanted:end_wanted]."""

    user: int
    start: int
    length: int
    first_wanted: int
    end_wanted: int


@torch.no_grad()
def _encode(
    model: SequentialModel,
    *,
    items: IntArray,
    times: IntArray,
    offsets: IntArray,
    user_rows: IntArray,
    wanted: IntArray,
) -> QueryStates:
    shape, head = model.encoder_shape, model.head_shape
    components = np.zeros((len(wanted), head.num_query_components, head.component_width), dtype=np.float32)
    gate = np.zeros((len(wanted), head.num_pairs), dtype=np.float32) if head.is_mixture else None
    stretches = _stretches(offsets, wanted, shape.max_history)
    stretches.sort(key=lambda stretch: stretch.length)
    for begin in range(0, len(stretches), _WINDOWS_PER_BATCH):
        part = stretches[begin : begin + _WINDOWS_PER_BATCH]
        starts = np.array([stretch.start for stretch in part])
        lengths = np.array([stretch.length for stretch in part])
        steps = np.arange(lengths.max())
        rows = starts[:, None] + np.minimum(steps, lengths[:, None] - 1)
        read = np.where(steps < lengths[:, None], items[rows], PADDING)
        encoded = model.encode(torch.from_numpy(read), torch.from_numpy(times[rows]))
        target = np.concatenate([np.arange(stretch.first_wanted, stretch.end_wanted) for stretch in part])
        line = np.repeat(np.arange(len(part)), [stretch.end_wanted - stretch.first_wanted for stretch in part])
        chosen = encoded[torch.from_numpy(line), torch.from_numpy(wanted[target] - starts[line])]
        index = None
        if shape.uses_user_index:
            index = torch.from_numpy(user_rows[np.array([stretch.user for stretch in part])[line]])
        made, made_gate = model.head.query_states(chosen, index)
        components[target] = made.numpy()
        if gate is not None and made_gate is not None:
            gate[target] = made_gate.numpy()
    return QueryStates(components=components, gate=gate)


def _stretches(offsets: IntArray, wanted: IntArray, max_history: int) -> list[_Stretch]:
    """Windows, by the window rule, that give the states after the places `wanted` (increasing)."""
    owners = np.searchsorted(offsets, wanted, side="right") - 1
    starts = np.flatnonzero(np.concatenate([[True], owners[1:] != owners[:-1]])) if len(wanted) else np.zeros(0, int)
    found = []
    for begin, stop in zip(starts, [*starts[1:], len(wanted)], strict=True):
        user = int(owners[begin])
        base = int(offsets[user])
        last = int(wanted[stop - 1]) - base
        for window in windows(last + 1, max_history, first_state=int(wanted[begin]) - base):
            low, high = np.searchsorted(wanted, [base + window.first_state, base + window.stop])
            if low < high:
                found.append(
                    _Stretch(
                        user=user,
                        start=base + window.start,
                        length=window.num_events,
                        first_wanted=int(low),
                        end_wanted=int(high),
                    )
                )
    return found
