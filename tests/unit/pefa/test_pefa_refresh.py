"""Refreshed states: the paper's equation 8 per component, and what becomes of sums that cancel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pefa_scene import make_scene, take
from retrieval_scene import make_items

from services.algorithms.pefa.contribution import SCALE, cold_start_items, mean_gate
from services.algorithms.pefa.policy import DEFAULT_SHARE, NEW_ITEM_SHARE, SharePolicy
from services.algorithms.pefa.refresh import refreshed
from services.algorithms.pefa.sums import ItemSums
from services.algorithms.scoring.states import ItemStates
from services.offline.evaluation.pefa.paper import relevance, xs_passages


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_with_one_component_the_streamed_form_is_the_papers(seed: int, share: float) -> None:
    scene = make_scene(seed, 40, p_q=1, p_x=1, num_items=12)
    rng = np.random.default_rng(seed)
    base = make_items(rng, 12, 1, 1, 8)
    ones = np.ones(40)
    sums = ItemSums(num_components=1, width=8)
    fixed = np.rint(scene.queries.components.astype(np.float64) * SCALE).astype(np.int64)
    sums.add(scene.item_ids, fixed, ones)
    read = sums.of([f"item-{row}" for row in range(12)])
    shares = SharePolicy(kind="fixed", least=share).model_share(read.evidence, read.coherence)
    streamed = refreshed(base, read.sums, shares)
    rows = [int(item_id.removeprefix("item-")) for item_id in scene.item_ids]
    relevant = relevance(np.column_stack([range(40), rows]), num_queries=40, num_passages=12)
    paper = xs_passages(base.components[:, 0], scene.queries.components[:, 0], relevant, share)
    assert np.abs(streamed.components[:, 0] - paper).max() < 1e-6
    assert streamed.gate is None


def test_each_component_is_blended_with_its_own_direction_and_the_gate_stays() -> None:
    rng = np.random.default_rng(1)
    base = make_items(rng, 6, 3, 2, 8)
    sums = rng.normal(size=(6, 2, 8))
    share = np.linspace(0, 1, 6)
    got = refreshed(base, sums, share)
    directions = sums / np.linalg.norm(sums, axis=2, keepdims=True)
    wanted = share[:, None, None] * base.components + (1 - share[:, None, None]) * directions
    assert np.abs(got.components - wanted).max() < 1e-6
    assert got.gate is base.gate
    assert np.linalg.norm(got.components[2], axis=1).max() < 0.999  # not renormalised
    own = rng.uniform(size=(6, 2))
    wanted = own[:, :, None] * base.components + (1 - own[:, :, None]) * directions
    assert np.abs(refreshed(base, sums, own).components - wanted).max() < 1e-6


def test_a_component_without_a_sum_stays_the_models() -> None:
    rng = np.random.default_rng(2)
    base = make_items(rng, 2, 3, 2, 8)
    sums = np.zeros((2, 2, 8))
    sums[0, 1, 3] = 1e-9  # tiny is not zero: its direction counts
    got = refreshed(base, sums, np.full(2, 0.25))
    assert np.array_equal(got.components[1], base.components[1])
    assert np.array_equal(got.components[0, 0], base.components[0, 0])
    assert got.components[0, 1, 3] == pytest.approx(0.25 * base.components[0, 1, 3] + 0.75)


def test_a_new_item_is_what_its_contributors_were() -> None:
    rng = np.random.default_rng(3)
    catalogue = make_items(rng, 9, 3, 2, 8)
    rows = cold_start_items(2, num_components=2, width=8, mean_gate=mean_gate(catalogue))
    sums = rng.normal(size=(2, 2, 8))
    sums[1] = 0
    got = refreshed(rows, sums, np.zeros(2))
    assert np.allclose(np.linalg.norm(got.components[0], axis=1), 1)
    assert not got.components[1].any()
    assert np.allclose(got.gate[0], catalogue.gate.mean(axis=0), atol=1e-6)


def test_a_new_item_whose_feedback_nearly_cancels_stays_short() -> None:
    _, sums = torn(1e-3)
    read = sums.of(["item-0"])
    rows = cold_start_items(1, num_components=2, width=8, mean_gate=np.zeros(6, np.float32))
    share = NEW_ITEM_SHARE.model_share(read.evidence, read.coherence)
    got = refreshed(rows, read.sums, share)
    assert np.linalg.norm(got.components[0], axis=1).max() < 1e-2
    assert 0.5 < NEW_ITEM_SHARE.model_share(3.0, 0.5) < 0.6


def torn(scale: float) -> tuple[ItemStates, ItemSums]:
    """200 interactions for and 200 against an item from the same people, and one more that weighs `scale`."""
    scene = make_scene(4, 201, num_items=1)
    half = scene.contributions[:200] * np.sign(scene.weights[:200]).astype(np.int64)[:, None, None]
    sums = ItemSums(num_components=2, width=8)
    weights = np.abs(scene.weights[:200])
    sums.add(["item-0"] * 200, half, weights)
    sums.add(["item-0"] * 200, -half, -weights)
    one = np.rint(scene.contributions[200:] / scene.weights[200] * scale).astype(np.int64)
    sums.add(["item-0"], one, np.array([scale]))
    return take(scene.items, [0]), sums


def test_feedback_that_nearly_cancels_moves_an_item_no_further_than_what_remains() -> None:
    for scale in (1e-6, 1e-3, 0.1):
        base, sums = torn(scale)
        read = sums.of(["item-0"])
        assert read.evidence[0] > 50
        moved = refreshed(base, read.sums, DEFAULT_SHARE.model_share(read.evidence, read.coherence))
        assert np.abs(moved.components - base.components).max() < 2.5 * scale / DEFAULT_SHARE.prior + 1e-6
        # Without the policy's care, normalising blows the remainder up to full length.
        amplified = refreshed(base, read.sums, np.array([0.5]))
        assert np.linalg.norm(amplified.components - base.components, axis=2).max() > 0.2


def test_what_cancels_exactly_leaves_the_models_state() -> None:
    base, sums = torn(0.0)
    read = sums.of(["item-0"])
    assert read.coherence[0] == 0
    for policy in (DEFAULT_SHARE, SharePolicy(kind="fixed", least=0.1)):
        share = policy.model_share(read.evidence, read.coherence)
        assert share.tolist() == [1.0]
        assert np.array_equal(refreshed(base, read.sums, share).components, base.components)
    assert np.array_equal(refreshed(base, read.sums, np.zeros(1)).components, base.components)


@pytest.mark.parametrize(
    ("sums", "share", "message"),
    [
        (np.ones((3, 2, 8)), np.array([0.5, 1.0000001, 0]), "share holds 1.0000001; allowed: 0 to 1"),
        (np.ones((3, 2, 8)), np.array([0.5, -0.1, 0]), "share holds -0.1"),
        (np.ones((3, 2, 8)), np.array([0.5, np.nan, 0]), "share holds nan"),
        (np.ones((3, 2, 8)), np.array([0.5]), "share has shape"),
        (np.ones((3, 2, 7)), np.full(3, 0.5), "sums has shape"),
        (np.full((3, 2, 8), np.inf), np.full(3, 0.5), "NaN or infinite"),
    ],
)
def test_what_does_not_fit_is_refused(sums: np.ndarray, share: np.ndarray, message: str) -> None:
    base = make_items(np.random.default_rng(5), 3, 3, 2, 8)
    with pytest.raises(ValueError, match=message):
        refreshed(base, sums, share)
