"""Evaluation ranks each held-out event from the state that serving would have had just before it."""

import numpy as np
import pytest
import torch
from training_scene import CONFIG, cyclic_interactions

from services.algorithms.encoding.history import window_start
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import QueryStates
from services.offline.training.evaluation import evaluate
from services.offline.training.models.sequential import SequentialModel


@torch.no_grad()
def test_ranks_equal_a_slow_walk_through_the_events() -> None:
    interactions = cyclic_interactions(num_users=6, events=300)
    model = SequentialModel(CONFIG.encoder, CONFIG.head, num_items=interactions.num_items).eval()
    rows = np.arange(150, 300, 7)
    found = evaluate(model, interactions, rows, item_counts=interactions.item_counts())
    expected = []
    for row in rows:
        mine = np.flatnonzero(interactions.users[:row] == interactions.users[row])
        window = mine[window_start(len(mine), 16) :]
        components, gate = model.states_at(
            torch.from_numpy(interactions.items[window].astype(np.int64))[None],
            torch.from_numpy(interactions.timestamps[window])[None],
            None,
            torch.tensor([[len(window) - 1]]),
        )
        assert gate is not None
        states = QueryStates(components=components[0].numpy(), gate=gate[0].numpy())
        scores = mol_scores_reference(states, model.all_item_states(), model.pair_gate())[0].numpy()
        target = int(interactions.items[row])
        rivals = np.setdiff1d(np.arange(interactions.num_items), [*interactions.items[mine], target])
        expected.append(int((scores[rivals] > scores[target]).sum()))
    assert sorted(found.ranks.tolist()) == sorted(expected)


def test_popularity_ranks_by_training_counts_and_leaves_seen_items_out() -> None:
    interactions = cyclic_interactions(num_users=2, num_items=30, events=20)
    model = SequentialModel(CONFIG.encoder, CONFIG.head, num_items=30)
    counts = np.arange(30, dtype=np.int64)
    rows = np.flatnonzero([user in interactions.users[:row] for row, user in enumerate(interactions.users)])
    found = evaluate(model, interactions, rows, item_counts=counts)
    hits = 0
    for row in rows:
        before = interactions.items[:row][interactions.users[:row] == interactions.users[row]]
        target = int(interactions.items[row])
        hits += int(sum(1 for item in range(target + 1, 30) if item not in before) < 10)
    assert found.popularity["hr@10"] == pytest.approx(hits / len(rows))
    assert model.training  # as it was


def test_a_users_first_event_cannot_be_predicted() -> None:
    interactions = cyclic_interactions()
    model = SequentialModel(CONFIG.encoder, CONFIG.head, num_items=interactions.num_items)
    _, first = np.unique(interactions.users, return_index=True)
    with pytest.raises(ValueError, match="has an earlier event of its user"):
        evaluate(model, interactions, np.sort(first), item_counts=interactions.item_counts())
