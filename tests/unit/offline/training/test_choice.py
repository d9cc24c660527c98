"""The head is chosen on validation, and a mixture has to be better beyond doubt."""

from dataclasses import replace

import numpy as np
import pytest
from training_scene import CONFIG, cyclic_interactions

from services.offline.training import neighbours
from services.offline.training.choice import candidates, choose
from services.offline.training.presets import with_dot_head


def test_candidates_are_a_mixture_and_dot_products_of_the_same_training() -> None:
    found = candidates(CONFIG)
    assert {name for name, config in found.items() if config.head.is_mixture} == {"mol"}
    assert len(found) > 2
    assert {config.epochs for config in found.values()} == {CONFIG.epochs}


def test_a_candidate_that_hardly_learns_is_not_chosen() -> None:
    weak = replace(with_dot_head(CONFIG), learning_rate=1e-9)
    choice = choose(
        {"mol": replace(CONFIG, epochs=9), "weak": weak},
        cyclic_interactions(num_users=300, num_items=60, events=4000),
    )
    assert choice.name == "mol"
    assert choice.lead.is_above_zero
    assert choice.ndcg_at_10["mol"] > choice.ndcg_at_10["weak"]
    assert choice.cpu_seconds > 0


def test_what_item_neighbours_find_is_no_heads_merit(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = replace(with_dot_head(CONFIG), learning_rate=1e-9)
    data = cyclic_interactions(num_users=300, num_items=60, events=4000)
    options = {"mol": replace(CONFIG, epochs=9), "weak": weak}
    alone = choose(options, data)
    monkeypatch.setattr(neighbours, "_MIN_EVENTS", 10)
    served = choose(options, data)
    assert served.ndcg_at_10["weak"] > alone.ndcg_at_10["weak"] + 0.2
    assert served.ndcg_at_10["mol"] >= alone.ndcg_at_10["mol"]
    assert served.lead.mean < alone.lead.mean - 0.2


def test_equal_candidates_leave_the_dot_product() -> None:
    # Neither learns: both rank by their random start.
    weak = replace(CONFIG, learning_rate=1e-9, epochs=1)
    choice = choose({"mol": weak, "dot": with_dot_head(weak)}, cyclic_interactions())
    assert choice.name == "dot"
    assert choice.config == with_dot_head(weak)


def test_nobody_with_three_events_is_an_error_that_says_so() -> None:
    data = cyclic_interactions()
    _, first = np.unique(data.users, return_index=True)
    with pytest.raises(ValueError, match="no user has three events"):
        choose({"mol": CONFIG, "dot": with_dot_head(CONFIG)}, data.select(np.sort(first)))
