"""How long a new item may become is measured on known ones: the length under which both score the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_scene import CONFIG, WITH_USERS, cyclic_interactions

from services.algorithms.scoring.states import ItemStates
from services.offline.training import TrainConfig, train
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.new_items import measure_new_item_length
from services.offline.training.presets import with_dot_head

DOT = with_dot_head(CONFIG)
NUM_ITEMS = 30


def model_whose_items_lie_beside_their_takers(cosine: float) -> SequentialModel:
    """Everybody's state is one direction, to which every item's own has this cosine."""
    model = SequentialModel(DOT.encoder, DOT.head, num_items=NUM_ITEMS, num_users=0).eval()
    width = model.head_shape.component_width
    own = np.zeros((NUM_ITEMS, 1, width), np.float32)
    own[:, 0, 0] = cosine
    own[:, 0, 1] = np.sqrt(max(0, 1 - cosine**2))
    model.all_item_states = lambda: ItemStates(components=own)  # type: ignore[method-assign]

    def states_at(items: torch.Tensor, times: object, users: object, places: torch.Tensor) -> tuple:
        states = torch.zeros(*places.shape, 1, width)
        states[..., 0, 0] = 1.0
        return states, None

    model.states_at = states_at  # type: ignore[method-assign, assignment]
    return model


@pytest.mark.parametrize(("cosine", "length"), [(0.9, 0.9), (0.6, 0.6), (0.3, 0.5), (1.2, 1.0), (-0.3, None)])
def test_a_model_whose_items_score_so_much_of_what_their_takers_do_gets_that_length(
    cosine: float, length: float | None
) -> None:
    model = model_whose_items_lie_beside_their_takers(cosine)
    assert measure_new_item_length(model, cyclic_interactions()) == pytest.approx(length, abs=1e-3)


def test_too_few_people_or_items_say_nothing() -> None:
    model = model_whose_items_lie_beside_their_takers(0.9)
    assert measure_new_item_length(model, cyclic_interactions(num_users=3)) is None
    data = cyclic_interactions()
    assert measure_new_item_length(model, data.select(data.items < 19)) is None
    assert measure_new_item_length(model, data.select(data.items < 0)) is None


@pytest.mark.parametrize("config", [CONFIG, WITH_USERS, DOT], ids=["mixture", "with users", "dot product"])
def test_a_trained_model_of_any_kind_gets_the_same_length_each_time(config: TrainConfig) -> None:
    model = train(replace(config, epochs=1), cyclic_interactions()).model
    once, again = (measure_new_item_length(model, cyclic_interactions()) for _ in range(2))
    assert once is not None
    assert 0 < once == again <= 1
