"""Trained models in a stream: the frozen one, and one that is retrained at intervals.

Both encode every event immediately; only a training changes item states.

Letters: X items of the whole vocabulary, K items of a model, n events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from services.algorithms.encoding.absence import AbsenceRows, buckets_of
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.datasets import Interactions
from services.offline.evaluation.stream.walk import (
    BoolArray,
    Event,
    IntArray,
    Scores,
    StreamSetting,
    TrainingPart,
    training_part,
)
from services.offline.training.evaluation import states_before
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.sequences import Histories


class Fit(Protocol):
    """Trains a model; equal seeds give equal models."""

    def __call__(self, interactions: Interactions, *, seed: int) -> SequentialModel: ...


def quick_fit(epochs: int) -> Fit:
    """Return a fit with preset quick; small data gets more epochs, as in `freshet train`."""
    from services.offline.training import preset, train
    from services.offline.training.presets import default_epochs

    def fit(interactions: Interactions, *, seed: int) -> SequentialModel:
        config = preset("quick", epochs=epochs, seed=seed)
        enough = default_epochs(config, Histories.of(interactions).num_positions)
        return train(replace(config, epochs=enough), interactions).model

    return fit


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamModel:
    """A model on a section of the stream, with its K items and the states before the events from position `first` on.

    rows (n,): the row of each event's state, or -1 if the user had no history. gaps (n,): seconds since the last event
    of that history.
    """

    part: TrainingPart
    items: ItemStates
    pair_gate: PairGate | None
    user_component: int | None
    absence: AbsenceRows | None
    first: int
    states: QueryStates
    rows: IntArray
    gaps: IntArray

    @property
    def codes(self) -> IntArray:
        """Return the items as codes of the whole vocabulary (K,)."""
        return np.flatnonzero(self.part.item_rows >= 0)

    def predictable(self, places: IntArray) -> BoolArray:
        """Return which events at these stream places have a state (N,)."""
        return self.rows[places - self.first] >= 0

    def queries(self, places: IntArray) -> tuple[IntArray, QueryStates]:
        """Return the indices of the stream places whose events have a state, and the states at the events' times."""
        able = np.flatnonzero(self.predictable(places))
        events = places[able] - self.first
        states = self.states.take(self.rows[events])
        if self.absence is not None:
            states = self.absence.apply(states, buckets_of(self.gaps[events], self.absence.shape))
        return able, states

    def query(self, place: int) -> QueryStates | None:
        """Return the state before the event at this stream place, if any."""
        _, states = self.queries(np.array([place]))
        return states if len(states) else None


def stream_model(setting: StreamSetting, fit: Fit, *, seed: int, first: int = 0, end: int | None = None) -> StreamModel:
    """Train on everything before stream place `first`, and encode the stream from there to `end`."""
    part = training_part(setting.interactions, setting.split + first)
    model = fit(part.interactions, seed=seed)
    stop = len(setting.interactions) if end is None else setting.split + end
    states, rows, gaps = _states_before_events(model, part, setting.interactions, setting.split + first, stop)
    shape = model.head_shape
    return StreamModel(
        part=part,
        items=model.all_item_states(),
        pair_gate=model.pair_gate(),
        user_component=shape.num_query_components - 1 if model.encoder_shape.uses_user_index else None,
        absence=model.absence_rows(),
        first=first,
        states=states,
        rows=rows,
        gaps=gaps,
    )


def _states_before_events(
    model: SequentialModel, part: TrainingPart, interactions: Interactions, first: int, end: int
) -> tuple[QueryStates, IntArray, IntArray]:
    """Return the query states before the events first to end - 1, encoded from all earlier events of their users. Also
    return rows and gaps as in `StreamModel`.
    """
    item_rows = part.item_rows[interactions.items[:end]]
    read = np.flatnonzero(item_rows >= 0)
    known_events = replace(interactions.select(read), items=item_rows[read].astype(np.int32))
    histories, order = Histories.of(known_events), read[known_events.by_user()[0]]
    # `order` sorts by user and row, so these keys increase.
    users = interactions.users[:end].astype(np.int64)
    keys = users * end + np.arange(end)
    places = np.searchsorted(keys[order], keys[first:])
    known = np.flatnonzero(places > histories.offsets[users[first:]])
    # Histories are sorted by length, so that a batch has little padding.
    known = known[np.argsort(places[known] - histories.offsets[users[first:][known]], kind="stable")]
    index = part.user_rows if model.encoder_shape.uses_user_index else None
    states = states_before(model, histories, places[known], users[first:][known], index)
    rows, gaps = np.full(end - first, -1, dtype=np.int64), np.zeros(end - first, dtype=np.int64)
    rows[known] = np.arange(len(known))
    gaps[known] = interactions.timestamps[first:end][known] - histories.times[places[known] - 1]
    return states, rows, gaps


class TrainedModels:
    """Scores by trained models. Each model scores the events from its `first` to the `first` of the next model."""

    def __init__(self, setting: StreamSetting, models: Sequence[StreamModel], *, name: str) -> None:
        """Take the models by section. Raises: ValueError if there are none."""
        if not models:
            raise ValueError("models is empty; allowed: at least one")
        self.name, self._models = name, list(models)
        self._num_items = setting.interactions.num_items
        self._starts = [max(0, model.first) for model in models]
        self._scorers = [MolScorer(model.items, model.pair_gate) for model in models]
        self._codes = [model.codes for model in models]

    def scores(self, event: Event) -> Mapping[str, Scores]:
        found = np.full(self._num_items, -np.inf, dtype=np.float32)
        number = int(np.searchsorted(self._starts, event.place, side="right")) - 1
        query = self._models[number].query(event.place)
        if query is not None:
            found[self._codes[number]] = self._scorers[number].scores(query)[0]
        return {self.name: found}

    def learn(self, event: Event) -> None:
        pass
