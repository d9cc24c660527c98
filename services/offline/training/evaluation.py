"""How well a model predicts held-out events: each from the state before it, against the whole catalogue.

The state is the one serving would hold: the window rule applied to everything that user did before, held-out events
included, once they have happened. Items that the user has seen are left out of the ranking, for the model and for the
popularity baseline beside it.

Letters: E events to predict, B of them at a time, L history length, X items.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.metrics.ranking import Ranks, summary, target_ranks
from services.algorithms.models.sequential import SequentialModel
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import QueryStates
from services.offline.datasets import Interactions
from services.offline.training.sequences import Histories, IntArray, windows_before

_EVENTS_PER_BATCH = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """`model` and `popularity` hold HR@{1,10,50,200}, NDCG@10 and MRR over `num_events` predicted events."""

    model: dict[str, float]
    popularity: dict[str, float]
    num_events: int
    ranks: Ranks


def evaluate(
    model: SequentialModel,
    interactions: Interactions,
    rows: npt.NDArray[np.int64],
    *,
    item_counts: npt.NDArray[np.int64],
    user_index: IntArray | None = None,
) -> Evaluation:
    """Predict the events in `rows` of `interactions`. A user's very first event has no history and is left out.

    `item_counts` (X,) are the training interactions; `user_index` (U,) maps a user's code to the model's dense index
    or -1, for a model with a user-id component.
    Raises: ValueError if no event remains to be predicted.
    """
    histories = Histories.of(interactions)
    events, users = _predictable(interactions, rows, histories)
    if not len(events):
        raise ValueError(f"none of the {len(rows)} events to predict has an earlier event of its user")
    scorer = MolScorer(model.all_item_states(), model.pair_gate())
    popularity = np.broadcast_to(item_counts.astype(np.float64), (_EVENTS_PER_BATCH, model.num_items))
    ranks, popular_ranks = [], []
    training, device = model.training, model.item_embedding.weight.device
    model.eval()
    try:
        for begin in range(0, len(events), _EVENTS_PER_BATCH):
            chosen = events[begin : begin + _EVENTS_PER_BATCH]
            owners = users[begin : begin + _EVENTS_PER_BATCH]
            indices = None if user_index is None else torch.from_numpy(user_index[owners]).to(device)
            states = _states_before(model, histories, chosen, owners, indices)
            targets = histories.items[chosen]
            seen = _seen_before(histories, chosen, owners, model.num_items)
            ranks.append(target_ranks(scorer.scores(states), targets, seen))
            popular_ranks.append(target_ranks(popularity[: len(chosen)], targets, seen))
    finally:
        model.train(training)
    joined = np.concatenate(ranks)
    return Evaluation(
        model=summary(joined),
        popularity=summary(np.concatenate(popular_ranks)),
        num_events=len(joined),
        ranks=joined,
    )


def _predictable(interactions: Interactions, rows: IntArray, histories: Histories) -> tuple[IntArray, IntArray]:
    """Places in `histories` of the wanted events that are not their user's first, and their users, in place order."""
    order, _ = interactions.by_user()
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    events = np.sort(place[rows])
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
