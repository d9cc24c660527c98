"""How well a model predicts held-out events: each from the state before it, against the whole catalogue.

The state is the one serving would hold: the window rule applied to everything that user did before, held-out events
included, once they have happened, as of the event's own time. Items that the user has seen are left out of the ranking,
for every scorer alike, so a model and its baselines answer the same questions.

Letters: E events to predict, B of them at a time, L history length, X items.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.encoding.absence import buckets_of
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates
from services.offline.datasets import Interactions
from services.offline.evaluation.common.recall import Ranks, summary, target_ranks
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.sequences import Histories, IntArray, windows_before

_EVENTS_PER_BATCH = 256
_COVERAGE_DEPTH = 10


class EventScorer(Protocol):
    """Something that scores the catalogue for what a user does next: a model or a baseline."""

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> npt.NDArray[np.floating]:
        """(B, X) scores, higher is better, from what stands before position events[b] of users[b], that is
        histories.items[histories.offsets[users[b]] : events[b]], from the event's time and nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutBatch:
    """B events to predict: positions in `histories` (B,), their users (B,) and items (B,), and what those users had
    seen before, which does not compete (B, X)."""

    histories: Histories
    events: IntArray
    users: IntArray
    targets: IntArray
    seen: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedEvents:
    """Shapes: events (E,) positions in `Histories`, increasing, users (E,), ranks (E,), 0-based.

    `coverage` is the share of the catalogue that stands among the first ten of at least one event.
    """

    events: IntArray
    users: IntArray
    ranks: Ranks
    coverage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """`model` and `popularity` hold HR@{1,10,50,200}, NDCG@10 and MRR over `num_events` predicted events."""

    model: dict[str, float]
    popularity: dict[str, float]
    num_events: int
    ranks: Ranks


class ModelScorer:
    """A trained model's scores from its own query states. Puts the model into evaluation mode.

    `user_index` (U,) maps a user's code to the model's dense index or -1, for a model with a user-id component.
    """

    def __init__(self, model: SequentialModel, user_index: IntArray | None = None) -> None:
        self._model, self._user_index = model.eval(), user_index
        self._scorer = MolScorer(model.all_item_states(), model.pair_gate())
        self._absence = model.absence_rows()

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> npt.NDArray[np.floating]:
        device = self._model.item_embedding.weight.device
        indices = None if self._user_index is None else torch.from_numpy(self._user_index[users]).to(device)
        states = _states_before(self._model, histories, events, users, indices)
        if self._absence is not None:
            states = self._absence.apply(states, buckets_of(histories.gaps(events), self._absence.shape))
        return self._scorer.scores(states)


class _CountScorer:
    def __init__(self, item_counts: npt.NDArray[np.int64]) -> None:
        self._counts = item_counts.astype(np.float64)

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> npt.NDArray[np.floating]:
        del histories, users
        return np.broadcast_to(self._counts, (len(events), len(self._counts)))


def held_out_batches(interactions: Interactions, rows: npt.NDArray[np.int64]) -> Iterator[HeldOutBatch]:
    """The events in `rows` by batches, in the order of `Histories`. First events of users are left out, and where
    outcomes are known, events that do not speak for their items.

    Raises: ValueError if no event remains to be predicted.
    """
    histories = Histories.of(interactions)
    events, users = _predictable(interactions, rows, histories)
    if not len(events):
        raise ValueError(f"none of the {len(rows)} events to predict has an earlier event of its user")
    for begin in range(0, len(events), _EVENTS_PER_BATCH):
        chosen, owners = events[begin : begin + _EVENTS_PER_BATCH], users[begin : begin + _EVENTS_PER_BATCH]
        yield HeldOutBatch(
            histories=histories,
            events=chosen,
            users=owners,
            targets=histories.items[chosen],
            seen=_seen_before(histories, chosen, owners, interactions.num_items),
        )


def rank_events(scorer: EventScorer, interactions: Interactions, rows: npt.NDArray[np.int64]) -> RankedEvents:
    """Rank the item of each event of `held_out_batches` against the catalogue.

    Items that the user has seen do not compete; equal scores are ordered by item index. Raises: as `held_out_batches`.
    """
    batches, ranks, shown = [], [], np.zeros(interactions.num_items, dtype=bool)
    for batch in held_out_batches(interactions, rows):
        scores = scorer.scores(batch.histories, batch.events, batch.users)
        ranks.append(target_ranks(scores, batch.targets, batch.seen))
        depth = min(_COVERAGE_DEPTH, scores.shape[1] - 1)
        first = np.argpartition(np.where(batch.seen, np.inf, -scores), depth, axis=1)
        shown[first[:, :_COVERAGE_DEPTH].ravel()] = True
        batches.append((batch.events, batch.users))
    events, users = (np.concatenate(part) for part in zip(*batches, strict=True))
    return RankedEvents(events=events, users=users, ranks=np.concatenate(ranks), coverage=float(shown.mean()))


def evaluate(
    model: SequentialModel,
    interactions: Interactions,
    rows: npt.NDArray[np.int64],
    *,
    item_counts: npt.NDArray[np.int64],
    user_index: IntArray | None = None,
) -> Evaluation:
    """Predict the events in `rows` of `interactions`. A user's very first event has no history and is left out.

    `item_counts` (X,) are the training interactions; `user_index` (U,) as in `ModelScorer`.
    Raises: ValueError if no event remains to be predicted.
    """
    training = model.training
    try:
        ranked = rank_events(ModelScorer(model, user_index), interactions, rows)
    finally:
        model.train(training)
    popular = rank_events(_CountScorer(item_counts), interactions, rows)
    return Evaluation(
        model=summary(ranked.ranks),
        popularity=summary(popular.ranks),
        num_events=len(ranked.ranks),
        ranks=ranked.ranks,
    )


def _predictable(interactions: Interactions, rows: IntArray, histories: Histories) -> tuple[IntArray, IntArray]:
    """Positions in `histories` of the wanted events that are not their user's first, increasing, and their users."""
    if interactions.outcomes is not None:
        rows = rows[interactions.outcomes[rows] == 0]
    order, _ = interactions.by_user()
    events = np.flatnonzero(np.isin(order, rows))
    users = np.searchsorted(histories.offsets, events, side="right") - 1
    later = events > histories.offsets[users]
    return events[later], users[later]


@torch.no_grad()
def _states_before(
    model: SequentialModel, histories: Histories, events: IntArray, users: IntArray, user_index: torch.Tensor | None
) -> QueryStates:
    windows = windows_before(histories, events, users, model.encoder_shape.max_history)
    device = model.item_embedding.weight.device
    components, gate = model.states_at(
        torch.from_numpy(windows.items).to(device),
        torch.from_numpy(windows.times).to(device),
        user_index,
        torch.from_numpy(windows.lengths - 1).unsqueeze(1).to(device),
    )
    return QueryStates(
        components=components.squeeze(1).cpu().numpy(), gate=None if gate is None else gate.squeeze(1).cpu().numpy()
    )


def _seen_before(histories: Histories, events: IntArray, users: IntArray, num_items: int) -> npt.NDArray[np.bool_]:
    seen = np.zeros((len(events), num_items), dtype=bool)
    for row, (event, user) in enumerate(zip(events, users, strict=True)):
        seen[row, histories.items[histories.offsets[user] : event]] = True
    return seen
