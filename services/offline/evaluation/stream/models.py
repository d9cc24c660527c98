"""Trained models in a stream: the frozen one, and one that is retrained at intervals.

Both encode every event immediately; only a training changes item states.

Letters: C predicted events of a batch, X items of the whole vocabulary, K items of a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.encoding.absence import AbsenceRows, buckets_of
from services.algorithms.encoding.history import windows
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.datasets import Interactions
from services.offline.evaluation.stream.walk import (
    BoolArray,
    EventBatch,
    IntArray,
    Scores,
    StreamSetting,
    TrainingPart,
    training_part,
)
from services.offline.training.models.sequential import PADDING, SequentialModel

_WINDOWS_PER_BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EventStates:
    """S distinct states. rows (n,): row of the state before each event, -1 if the user had no history. gaps (n,):
    seconds since that history's last event.
    """

    states: QueryStates
    rows: IntArray
    gaps: IntArray
    absence: AbsenceRows | None

    def of(self, events: IntArray) -> QueryStates:
        """Return states before these events, as of the events' times. Every event must have a state."""
        states = self.states.take(self.rows[events])
        if self.absence is None:
            return states
        return self.absence.apply(states, buckets_of(self.gaps[events], self.absence.shape))


def states_before(
    model: SequentialModel, part: TrainingPart, interactions: Interactions, *, first: int, end: int | None = None
) -> EventStates:
    """Return states before the events in rows [first, end), from all earlier events of their users.

    `part` is the model's training data; place 0 is row `first`.
    """
    end = len(interactions) if end is None else end
    item_rows = part.item_rows[interactions.items[:end]]
    read = np.flatnonzero(item_rows >= 0)
    order = read[np.argsort(interactions.users[read], kind="stable")]
    counts = np.bincount(interactions.users[read], minlength=interactions.num_users)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    before = _read_before(interactions.users[:end], item_rows >= 0)[first:]
    users = interactions.users[first:end].astype(np.int64)
    # The state after the user's last event that the encoder read.
    places = np.where(before > 0, offsets[users] + before - 1, -1)
    wanted = np.unique(places[places >= 0])
    times = interactions.timestamps[order].astype(np.int64)
    states = _encode(
        model,
        items=item_rows[order],
        times=times,
        offsets=offsets,
        user_rows=part.user_rows,
        wanted=wanted,
    )
    rows = np.where(places >= 0, np.searchsorted(wanted, places), -1).astype(np.int64)
    known = places >= 0
    gaps = np.zeros(len(places), dtype=np.int64)
    gaps[known] = interactions.timestamps[first:end][known] - times[places[known]]
    return EventStates(states=states, rows=rows, gaps=gaps, absence=model.absence_rows())


def _read_before(users: npt.NDArray[np.int32], is_read: BoolArray) -> IntArray:
    """How many earlier events of its user the encoder reads, for each event."""
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
    """Places [start, start + length), for the states wanted[first_wanted:end_wanted]."""

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


class Fit(Protocol):
    """Trains a model; equal seeds give equal models."""

    def __call__(self, interactions: Interactions, *, seed: int) -> SequentialModel: ...


def quick_fit(epochs: int) -> Fit:
    """Return a fit with preset quick; small data gets more epochs, as in `freshet train`."""
    from services.offline.training import preset, train
    from services.offline.training.presets import default_epochs
    from services.offline.training.sequences import Histories

    def fit(interactions: Interactions, *, seed: int) -> SequentialModel:
        config = preset("quick", epochs=epochs, seed=seed)
        enough = default_epochs(config, Histories.of(interactions).num_positions)
        return train(replace(config, epochs=enough), interactions).model

    return fit


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamModel:
    """A model on a section of the stream: items (K), and states before the events from `first` on."""

    part: TrainingPart
    items: ItemStates
    pair_gate: PairGate | None
    user_component: int | None
    tau: float
    first: int
    before: EventStates

    @property
    def codes(self) -> IntArray:
        """Return the items as codes of the whole vocabulary (K,)."""
        return np.flatnonzero(self.part.item_rows >= 0)

    def predictable(self, places: IntArray) -> BoolArray:
        """Return which events at these stream places have a state (N,)."""
        return self.before.rows[places - self.first] >= 0

    def queries(self, places: IntArray) -> tuple[IntArray, QueryStates]:
        """Return which events at these stream places have a state, and those states."""
        rows = places - self.first
        able = np.flatnonzero(self.before.rows[rows] >= 0)
        return able, self.before.of(rows[able])


def stream_model(setting: StreamSetting, fit: Fit, *, seed: int, first: int = 0, end: int | None = None) -> StreamModel:
    """Train on everything before stream place `first`, and encode the stream from there to `end`."""
    part = training_part(setting.interactions, setting.split + first)
    model = fit(part.interactions, seed=seed)
    begin = setting.split + first
    stop = len(setting.interactions) if end is None else setting.split + end
    before = states_before(model, part, setting.interactions, first=begin, end=stop)
    shape = model.head_shape
    return StreamModel(
        part=part,
        items=model.all_item_states(),
        pair_gate=model.pair_gate(),
        user_component=shape.num_query_components - 1 if model.encoder_shape.uses_user_index else None,
        tau=shape.tau,
        first=begin - setting.split,
        before=before,
    )


class TrainedModels:
    """Scores by trained models, each from its `first` to the next model's."""

    def __init__(self, setting: StreamSetting, models: Sequence[StreamModel], *, name: str) -> None:
        """`models`: by section. Raises: ValueError if there are none."""
        if not models:
            raise ValueError("models is empty; allowed: at least one")
        self.name, self._models = name, list(models)
        self._num_items = setting.interactions.num_items
        self._starts = [max(0, model.first) for model in models]
        self._scorers = [MolScorer(model.items, model.pair_gate) for model in models]

    def step(self, batch: EventBatch) -> Mapping[str, Scores]:
        places = batch.places[batch.chosen]
        scores = np.full((len(places), self._num_items), -np.inf, dtype=np.float32)
        owners = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == number)
            model = self._models[number]
            able, queries = model.queries(places[rows])
            if len(able):
                scores[np.ix_(rows[able], model.codes)] = self._scorers[number].scores(queries)
        return {self.name: scores}
