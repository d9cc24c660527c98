"""The head is chosen on validation after equal processor time; what is dearer to serve has to be better."""

from dataclasses import replace

import numpy as np
import pytest
from training_scene import CONFIG, cyclic_interactions

from services.algorithms.bundles.event_schema import default_schema
from services.offline.datasets import Interactions
from services.offline.training import TrainConfig, neighbours
from services.offline.training.choice import candidates, choose, microseconds_per_position
from services.offline.training.presets import with_dot_head, with_wide_dot_head

# What learns nothing ranks by its random start.
IDLE = 1e-9


def alike(config: TrainConfig, interactions: Interactions, device: str) -> float:
    return 10.0


def test_candidates_are_a_mixture_and_dot_products_of_the_same_training() -> None:
    found = candidates(CONFIG)
    assert {name for name, config in found.items() if config.head.is_mixture} == {"mol"}
    assert {config.epochs for config in found.values()} == {CONFIG.epochs}
    assert {config.num_negatives for config in found.values()} == {CONFIG.num_negatives}


def test_a_candidate_that_hardly_learns_is_not_chosen() -> None:
    weak = replace(with_dot_head(CONFIG), learning_rate=IDLE)
    choice = choose(
        {"mol": replace(CONFIG, epochs=9), "weak": weak},
        cyclic_interactions(num_users=300, num_items=60, events=4000),
        default_schema(),
        cost=alike,
    )
    assert choice.name == "mol"
    assert choice.lead.is_above_zero
    assert choice.reason == "beyond doubt better than all cheaper"
    assert choice.ndcg_at_10["mol"] > choice.ndcg_at_10["weak"]
    assert choice.cpu_seconds > 0


def test_candidates_get_the_mixtures_processor_time() -> None:
    options = {
        "mol": replace(CONFIG, epochs=6, learning_rate=IDLE),
        "dot": replace(with_dot_head(CONFIG), epochs=6, learning_rate=IDLE),
        "dear": replace(with_dot_head(CONFIG), epochs=6, learning_rate=IDLE, loss="full-softmax"),
    }
    costs = {"mol": 30.0, "dot": 10.0, "dear": 90.0}
    tried: list[str] = []
    choice = choose(
        options,
        cyclic_interactions(),
        default_schema(),
        on_candidate=tried.append,
        cost=lambda config, data, device: next(costs[name] for name in options if options[name] == config),
    )
    # A third of six epochs is two; a position of the dot product costs a third, of the full softmax three times that.
    assert tried == [
        f"{name}: {epochs} epochs at {costs[name]:.0f} µs of processor time per position"
        for name, epochs in (("mol", 2), ("dot", 6), ("dear", 1))
    ]
    assert choice.config == replace(options[choice.name], epochs={"dot": 18, "dear": 2}[choice.name])


@pytest.mark.parametrize("batch_sequences", [4, 1000])
def test_a_positions_cost_is_measured_however_few_batches_a_training_has(batch_sequences: int) -> None:
    config = replace(CONFIG, epochs=1, batch_sequences=batch_sequences)
    assert 0 < microseconds_per_position(config, cyclic_interactions()) < float("inf")


def test_what_item_neighbours_find_is_no_heads_merit(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = replace(with_dot_head(CONFIG), learning_rate=IDLE)
    data = cyclic_interactions(num_users=300, num_items=60, events=4000)
    options = {"mol": replace(CONFIG, epochs=9), "weak": weak}
    alone = choose(options, data, default_schema(), cost=alike)
    monkeypatch.setattr(neighbours, "_MIN_EVENTS", 10)
    served = choose(options, data, default_schema(), cost=alike)
    assert served.ndcg_at_10["weak"] > alone.ndcg_at_10["weak"] + 0.2
    assert served.ndcg_at_10["mol"] >= alone.ndcg_at_10["mol"]
    assert served.lead.mean < alone.lead.mean - 0.2


def test_of_candidates_that_nothing_tells_apart_the_cheapest_to_serve_is_chosen() -> None:
    weak = replace(CONFIG, learning_rate=IDLE, epochs=1)
    options = {"mol": weak, "wide": with_wide_dot_head(weak), "dot": with_dot_head(weak)}
    choice = choose(options, cyclic_interactions(), default_schema(), cost=alike)
    assert choice.name == "dot"
    assert choice.config == with_dot_head(weak)
    assert "none is cheaper to serve" in choice.reason or (
        choice.reason.startswith("no difference beyond doubt (") and choice.reason.endswith("it is cheaper to serve")
    )


def test_nobody_with_three_events_is_an_error_that_says_so() -> None:
    data = cyclic_interactions()
    _, first = np.unique(data.users, return_index=True)
    with pytest.raises(ValueError, match="no user has three events"):
        choose({"mol": CONFIG, "dot": with_dot_head(CONFIG)}, data.select(np.sort(first)), default_schema())
