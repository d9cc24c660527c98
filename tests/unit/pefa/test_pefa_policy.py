"""Policies: weights of feedback, lambda by evidence and coherence, and their text forms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.pefa.policy import (
    DEFAULT_SHARE,
    FROZEN,
    NAMED_SHARES,
    NEW_ITEM_SHARE,
    PAPER,
    FeedbackPolicy,
    SharePolicy,
    TypeWeight,
)
from services.algorithms.pefa.share_choice import (
    new_item_share_from_sums,
    share_of_length,
)
from services.algorithms.pefa.sums import SumsOf
from services.algorithms.scoring.states import ItemStates

policies = st.one_of(
    st.builds(SharePolicy, least=st.floats(0, 1), prior=st.floats(1e-3, 1e6)),
    st.builds(SharePolicy, kind=st.just("fixed"), least=st.floats(0, 1)),
)
amounts = st.floats(0, 1e9)

DEFAULT_FEEDBACK = FeedbackPolicy({"rating": TypeWeight(slope=0.5, centre=3.0), "dislike": TypeWeight(slope=-1.0)})


@given(policies, amounts, st.floats(0, 1))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_lambda_stays_between_least_and_one(policy: SharePolicy, evidence: float, coherence: float) -> None:
    share = float(policy.model_share(evidence, coherence))
    assert policy.least - 1e-12 <= share <= 1


@given(policies, amounts, amounts, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_lambda_shrinks_with_evidence_and_coherence(
    policy: SharePolicy, e1: float, e2: float, c1: float, c2: float
) -> None:
    least, most = policy.model_share([max(e1, e2), min(e1, e2)], [max(c1, c2), min(c1, c2)])
    assert least <= most + 1e-12


def test_nothing_known_means_the_model_alone() -> None:
    for policy in (*NAMED_SHARES.values(), SharePolicy(kind="fixed", least=0.0)):
        assert policy.model_share([0.0, 5.0], [0.0, 0.0]).tolist() == [1.0, 1.0]


def test_the_named_policies_are_what_their_names_say() -> None:
    assert FROZEN.model_share(1e9, 1.0) == 1
    assert PAPER.model_share(0.3, 0.2) == 0.5
    assert DEFAULT_SHARE.model_share(DEFAULT_SHARE.prior, 1.0) == pytest.approx(0.95)
    assert SharePolicy.parse("default") == DEFAULT_SHARE


@given(policies)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_share_policy_is_its_text(policy: SharePolicy) -> None:
    assert SharePolicy.parse(policy.text) == policy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "half",
        "fixed()",
        "fixed(least=1.5)",
        "fixed(least=-0.1)",
        "fixed(least=nan)",
        "evidence(prior=0)",
        "evidence(prior=inf)",
        "evidence(half_life=30d)",
        "evidence(prior=3d)",
        "evidence(age=3)",
        "fixed(least=0.5,prior=3)",
    ],
)
def test_a_policy_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        SharePolicy.parse(text)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((-1.0, 0.5), "evidence"), ((1.0, math.nan), "coherence")],
)
def test_evidence_that_cannot_be_is_refused(arguments: tuple[float, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} holds NaN or negative"):
        DEFAULT_SHARE.model_share(*arguments)


def test_ratings_weigh_by_their_distance_from_three_stars() -> None:
    weights = DEFAULT_FEEDBACK.weights(["rating"] * 5 + ["click", "dislike"], [1, 2, 3, 4, 5, 7, 1])
    assert weights.tolist() == [-1, -0.5, 0, 0.5, 1, 1, -1]


def test_weights_are_clipped_and_types_told_apart() -> None:
    types = {"watch": TypeWeight(slope=0.01, centre=0, limit=2), "purchase": TypeWeight(slope=3, limit=3)}
    policy = FeedbackPolicy(types, TypeWeight(slope=0))
    assert policy.weights(["watch", "watch", "purchase", "view"], [50, 1e9, 1, 1]).tolist() == [0.5, 2, 3, 0]
    assert FeedbackPolicy().weight("anything", 5.0) == 1


def test_values_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="value=nan"):
        DEFAULT_FEEDBACK.weight("rating", math.nan)
    with pytest.raises(ValueError, match="finite"):
        TypeWeight(slope=math.inf)


def known_items(count: int, length: float, *, interactions: int = 30) -> tuple[ItemStates, SumsOf]:
    """Items whose takers point at an angle from them: <g, sum> = `length` * ||sum||."""
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(count, 2, 8))
    directions /= np.linalg.norm(directions, axis=2, keepdims=True)
    across = rng.normal(size=directions.shape)
    across -= (across * directions).sum(axis=2, keepdims=True) * directions
    across /= np.linalg.norm(across, axis=2, keepdims=True)
    states = length * directions + np.sqrt(1 - length**2) * across
    said = SumsOf(
        sums=directions * rng.uniform(1, 9, (count, 2, 1)),
        evidence=np.full(count, 20.0),
        coherence=np.full(count, 0.5),
        counts=np.full(count, interactions),
    )
    return ItemStates(components=states.astype(np.float32)), said


def test_new_items_become_as_long_as_makes_them_score_like_known_ones() -> None:
    for length in (0.2, 0.5, 0.85):
        policy = new_item_share_from_sums(*known_items(50, length))
        assert 1 - policy.model_share(1e9, 1.0) == pytest.approx(length, abs=1e-6)
    assert new_item_share_from_sums(*known_items(50, -0.5)).model_share(1e9, 1.0) == 1


def test_too_few_interactions_say_nothing_about_the_length_of_new_items() -> None:
    assert new_item_share_from_sums(*known_items(5, 0.9)) == NEW_ITEM_SHARE
    assert new_item_share_from_sums(*known_items(50, 0.9, interactions=3)) == NEW_ITEM_SHARE
    states, said = known_items(50, 0.9)
    with pytest.raises(ValueError, match="expected one shape"):
        new_item_share_from_sums(ItemStates(components=states.components[1:]), said)


def test_a_new_item_has_nine_tenths_of_its_length_from_its_third_interaction_on_and_never_more_than_all() -> None:
    # Agreement is less than 1 even where people agree: query components share an item's weight. Measured .40 and .45.
    shares = share_of_length(0.8).model_share([3.0, 10.0, 1e9], [0.4, 0.4, 1.0])
    assert 0.9 * 0.8 < 1 - shares[0] < 1 - shares[1] < 1 - shares[2] <= 0.8
    assert share_of_length(0.8).model_share(3.0, 0.0) == 1
    for wrong in (0.0, 1.01, float("nan")):
        with pytest.raises(ValueError, match=f"length={wrong} allowed: more than 0, at most 1"):
            share_of_length(wrong)
