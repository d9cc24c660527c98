"""A state is led away from what its user turned down, and from nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate
from streams import NOW_MS, VOCABULARY

from services.algorithms.encoding.aversion import DECAY, STEP, WINDOW, Aversion
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.contracts.stored_history import StoredEvent
from services.encoder.domain import EncodedStates, pack_state, user_state

RNG = np.random.default_rng(0)
SHAPES = {"mixture": (4, 2), "dot product": (1, 1)}


def unit(shape: tuple[int, ...]) -> np.ndarray:
    found = RNG.normal(size=shape).astype(np.float32)
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


def scene(kind: str) -> tuple[ItemStates, PairGate | None, QueryStates]:
    p_q, p_x = SHAPES[kind]
    items, gate = make_items(RNG, 60, p_q, p_x, 8), make_pair_gate(RNG, p_q * p_x, 6) if p_q > 1 else None
    return items, gate, QueryStates(components=unit((1, p_q, 8)), gate=unit((1, p_q * p_x)) if p_q > 1 else None)


def steered(kind: str, weights: list[float], leave_out: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scores before and after of the first items, which were turned down."""
    items, gate, query = scene(kind)
    aversion = Aversion(items, gate, leave_out=leave_out)
    rows = np.arange(len(weights))
    led = aversion.steered(
        query.components[0], None if query.gate is None else query.gate[0], rows, np.array(weights, np.float64)
    )
    np.testing.assert_allclose(np.linalg.norm(led, axis=-1), 1, atol=1e-6)
    scorer, after = MolScorer(items, gate), QueryStates(components=led[None], gate=query.gate)
    return scorer.scores(query)[0, rows], scorer.scores(after)[0, rows]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("weight", [0.1, 1.0])
def test_a_step_lowers_the_score_of_what_was_turned_down(kind: str, weight: float) -> None:
    for _ in range(20):
        before, after = steered(kind, [weight])
        assert after[0] < before[0]


def test_a_dot_product_takes_the_step_that_is_written() -> None:
    items, _, query = scene("dot product")
    x = items.components[3, 0].astype(np.float64)
    wanted = query.components[0, 0] - STEP * DECAY**2 * x / np.linalg.norm(x)
    led = Aversion(items, None).steered(query.components[0], None, np.array([3]), np.array([DECAY**2]))
    np.testing.assert_allclose(led[0], wanted / np.linalg.norm(wanted), atol=1e-6)


def test_the_component_that_says_who_the_user_is_stays() -> None:
    items, gate, query = scene("mixture")
    assert query.gate is not None
    led = Aversion(items, gate, leave_out=3).steered(query.components[0], query.gate[0], np.array([5]), np.ones(1))
    assert np.array_equal(led[3], query.components[0, 3])
    assert not np.array_equal(led[2], query.components[0, 2])


def events(*kinds: tuple[int, str, float]) -> list[StoredEvent]:
    return [
        StoredEvent(NOW_MS + at, 0, at, at, f"item-{item}", kind, value) for at, (item, kind, value) in enumerate(kinds)
    ]


def test_what_the_last_events_speak_against_counts_once_and_fades() -> None:
    items = ItemStates(components=unit((50, 1, 4)), gate=None)
    vocabulary = replace(VOCABULARY, aversion=Aversion(items, None), untrained=frozenset({"item-9"}))
    states = EncodedStates(components=unit((1, 1, 4)), gate=None)
    plain = pack_state(states, 0, "model-1")

    def wanted(against: dict[int, float]) -> bytes:
        assert vocabulary.aversion is not None
        rows, weights = np.array([*against], np.int64), np.array([*against.values()], np.float64)
        led = vocabulary.aversion.steered(states.components[0], None, rows, weights)
        return led.astype("<f2").tobytes()

    def found(*kinds: tuple[int, str, float]) -> bytes:
        return user_state(vocabulary, states, 0, events(*kinds)).components

    assert found((1, "click", 1), (2, "rating", 5), (3, "impression", 1)) == plain.components
    assert found((1, "dislike", 1)) == wanted({1: 1.0})
    assert found((1, "dislike", 1), (2, "click", 1), (3, "click", 1)) == wanted({1: DECAY**2})
    assert found((1, "rating", 1), (2, "rating", 2)) == wanted({2: 0.5, 1: DECAY})
    # Somebody who comes back to an item likes it, or dislikes it once.
    assert found((1, "dislike", 1), (1, "click", 1)) == plain.components
    assert found((1, "dislike", 1), (1, "dislike", 1)) == wanted({1: 1.0})
    # Nothing is known of items that the model never saw.
    assert found((77, "dislike", 1), (9, "dislike", 1)) == plain.components
    assert found((1, "dislike", 1), *[(2, "click", 1.0)] * WINDOW) == plain.components
    assert user_state(VOCABULARY, states, 0, events((1, "dislike", 1))) == plain
