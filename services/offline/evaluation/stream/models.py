"""Trained models in a stream: the frozen one, and one that is trained again at intervals.

Both encode every event as it comes, so a user's state is always fresh; what stands still between trainings is the
items.

Letters: C predicted events of a batch, X items of the whole vocabulary, K items of a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import ItemStates, PairGate, QueryStates
from services.offline.datasets import Interactions
from services.offline.evaluation.stream.setting import BoolArray, IntArray, StreamSetting, TrainingPart, training_part
from services.offline.evaluation.stream.states import EventStates, states_before
from services.offline.evaluation.stream.walk import EventBatch, Scores
from services.offline.training.models.sequential import SequentialModel


class Fit(Protocol):
    """Trains a model on all of some interactions. Equal seeds give equal models."""

    def __call__(self, interactions: Interactions, *, seed: int) -> SequentialModel: ...


def quick_fit(epochs: int) -> Fit:
    """Preset quick; small data is trained for more epochs, as `freshet train` does."""
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
    """A model, and what it says of a stretch of the stream: items (K), and states before the events from `first` on."""

    part: TrainingPart
    items: ItemStates
    pair_gate: PairGate | None
    user_component: int | None
    first: int
    before: EventStates

    @property
    def codes(self) -> IntArray:
        """The model's items as codes of the whole vocabulary (K,)."""
        return np.flatnonzero(self.part.item_rows >= 0)

    def predictable(self, places: IntArray) -> BoolArray:
        """Which of the events at these stream places have a state (N,)."""
        return self.before.rows[places - self.first] >= 0

    def queries(self, places: IntArray) -> tuple[IntArray, QueryStates]:
        """Which of the events at these stream places have a state, and those states."""
        rows = places - self.first
        able = np.flatnonzero(self.before.rows[rows] >= 0)
        return able, self.before.of(rows[able])


def stream_model(
    setting: StreamSetting, fit: Fit, *, seed: int, first: int = 0, end: int | None = None, past: bool = False
) -> StreamModel:
    """Train on everything before stream place `first`, and encode the stream from there to `end`.

    `past` encodes the training part as well: places then begin at minus its length.
    """
    part = training_part(setting.interactions, setting.split + first)
    model = fit(part.interactions, seed=seed)
    begin = 0 if past else setting.split + first
    stop = len(setting.interactions) if end is None else setting.split + end
    before = states_before(model, part, setting.interactions, first=begin, end=stop)
    shape = model.head_shape
    return StreamModel(
        part=part,
        items=model.all_item_states(),
        pair_gate=model.pair_gate(),
        user_component=shape.num_query_components - 1 if model.encoder_shape.uses_user_index else None,
        first=begin - setting.split,
        before=before,
    )


class TrainedModels:
    """Scores of frozen items; of several models, each from its `first` on."""

    def __init__(self, setting: StreamSetting, models: Sequence[StreamModel], *, name: str) -> None:
        """`models` in the order of their stretches. Raises: ValueError without any."""
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
