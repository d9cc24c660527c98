"""Evaluation ranks each held-out event from the state that serving would have had just before it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_scene import CONFIG, WITH_USERS, cyclic_interactions

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.encoding.history import window_start
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import QueryStates
from services.offline.evaluation.engine.baselines import Popularity
from services.offline.evaluation.engine.ranked_events import counting, rank_events
from services.offline.training.evaluation import ModelScorer, states_before
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.sequences import Histories


@torch.no_grad()
def test_ranks_equal_a_slow_walk_through_the_events() -> None:
    interactions = cyclic_interactions(num_users=6, events=300)
    model = SequentialModel(CONFIG.encoder, CONFIG.head, num_items=interactions.num_items).eval()
    rows = np.arange(150, 300, 7)
    found = rank_events(ModelScorer(model), interactions, rows)
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


def test_states_are_the_same_however_many_are_encoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    interactions = cyclic_interactions(num_users=6, events=90)
    model = SequentialModel(WITH_USERS.encoder, WITH_USERS.head, num_items=interactions.num_items, num_users=6).eval()
    histories = Histories.of(interactions)
    users = np.repeat(np.arange(6), np.diff(histories.offsets))
    events = np.setdiff1d(np.arange(90), histories.offsets)
    one = states_before(model, histories, events, users[events], np.arange(6))
    monkeypatch.setattr("services.offline.training.evaluation._AT_ONCE", 8)
    many = states_before(model, histories, events, users[events], np.arange(6))
    np.testing.assert_allclose(many.components, one.components, atol=1e-5)


def test_popularity_ranks_by_training_counts_and_leaves_seen_items_out() -> None:
    interactions = cyclic_interactions(num_users=2, num_items=30, events=20)
    popular = Popularity()
    popular.fit(replace(interactions, items=np.repeat(np.arange(30, dtype=np.int32), np.arange(30))[-20:]))
    rows = np.flatnonzero([user in interactions.users[:row] for row, user in enumerate(interactions.users)])
    counts = np.bincount(np.repeat(np.arange(30), np.arange(30))[-20:], minlength=30).tolist()
    expected = []
    for row in rows:
        before = interactions.items[:row][interactions.users[:row] == interactions.users[row]]
        target = int(interactions.items[row])
        order = sorted(range(30), key=lambda item: (-counts[item], item))
        expected.append([item for item in order if item == target or item not in before].index(target))
    assert sorted(rank_events(popular, interactions, rows).ranks.tolist()) == sorted(expected)


def test_a_users_first_event_cannot_be_predicted() -> None:
    interactions = cyclic_interactions()
    popular = Popularity()
    popular.fit(interactions)
    _, first = np.unique(interactions.users, return_index=True)
    with pytest.raises(ValueError, match="has an earlier event of its user"):
        rank_events(popular, interactions, np.sort(first))


def test_only_what_somebody_took_may_be_predicted() -> None:
    kinds = [("click", 1), ("impression", 1), ("dislike", 1), ("remove_from_cart", 1), ("rating", 3), ("rating", 4)]
    kinds.append(("never heard of", 1))
    names = sorted({name for name, _ in kinds})
    data = replace(
        cyclic_interactions(num_users=2, events=len(kinds)),
        types=np.array([names.index(name) for name, _ in kinds], np.int16),
        values=np.array([value for _, value in kinds], np.float32),
        type_names=names,
    )
    assert counting(data, np.arange(1, len(kinds)), default_schema()).tolist() == [5]
    assert counting(data, np.arange(len(kinds)), default_schema()).tolist() == [0, 5]
