"""A score taken apart: its pairs add up to it, and the model's share is what the bundle's own state makes of it."""

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries, unit

from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.explanation import score_parts
from services.algorithms.scoring.states import ItemStates

GATE = make_pair_gate(np.random.default_rng(0), 8, 6)
QUERY = make_queries(np.random.default_rng(1), 1, 4, 2, 5)
BASE = make_items(np.random.default_rng(2), 1, 4, 2, 5)
LEARNT = unit(np.random.default_rng(3).normal(size=(1, 2, 5)))


def refreshed(share: float) -> ItemStates:
    return ItemStates(components=(share * BASE.components + (1 - share) * LEARNT).astype(np.float32), gate=BASE.gate)


def test_the_pairs_add_up_to_the_score() -> None:
    parts = score_parts(QUERY, refreshed(0.3), GATE, base=BASE, model_share=0.3)
    exact = float(mol_scores_reference(QUERY, refreshed(0.3), GATE)[0, 0])
    assert parts.contributions.sum() == pytest.approx(exact, abs=1e-12)
    assert parts.weights.sum() == pytest.approx(1)


def test_a_component_that_no_interaction_moved_is_the_models_whatever_lambda() -> None:
    half_moved = refreshed(0.3)
    half_moved.components[0, 1] = BASE.components[0, 1]
    parts = score_parts(QUERY, half_moved, GATE, base=BASE, model_share=0.3)
    rest = parts.contributions - parts.from_model
    np.testing.assert_allclose(rest[1::2], 0, atol=1e-12)
    assert np.abs(rest[::2]).min() > 1e-6


def test_an_item_that_the_model_never_saw_is_interactions_alone() -> None:
    parts = score_parts(QUERY, refreshed(0.0), GATE, base=None, model_share=0.0)
    assert not parts.from_model.any()


def test_the_rest_is_what_interactions_say_weighted_by_one_minus_lambda() -> None:
    share = 0.4
    parts = score_parts(QUERY, refreshed(share), GATE, base=BASE, model_share=share)
    said = (QUERY.components[0].astype(np.float64) @ LEARNT[0].astype(np.float64).T).reshape(-1)
    np.testing.assert_allclose(parts.contributions - parts.from_model, parts.weights * (1 - share) * said, atol=1e-7)


def test_a_share_outside_its_range_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model_share=1.5 allowed: 0-1"):
        score_parts(QUERY, BASE, GATE, base=BASE, model_share=1.5)


def test_a_dot_product_is_one_pair_of_weight_one() -> None:
    query = make_queries(np.random.default_rng(1), 1, 1, 1, 5)
    item = make_items(np.random.default_rng(2), 1, 1, 1, 5)
    parts = score_parts(query, item, None, base=item, model_share=1.0)
    assert parts.weights.tolist() == [1.0]
