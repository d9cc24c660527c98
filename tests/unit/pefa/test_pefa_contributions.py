"""Contributions: integers that depend on their own row alone, and on the formula."""

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pefa_scene import make_scene, take
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.pefa.contribution import SCALE, Contributions, cold_start_items, mean_gate
from services.algorithms.pefa.exact_floats import exp_of_negative, silu, spare_bits, to_multiples
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def formula(
    queries: QueryStates, weights: np.ndarray, items: ItemStates, pair_gate: PairGate, leave_out: int | None
) -> np.ndarray:
    """The design's sum for one interaction, transcribed in float64."""
    f = queries.components.astype(np.float64)
    if leave_out is not None:
        f[:, leave_out] = 0
    cosines = np.einsum("nqd,nxd->nqx", f, items.components.astype(np.float64)).reshape(len(f), -1)

    def activate(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    hidden = activate(cosines @ pair_gate.hidden_weight.T.astype(np.float64) + pair_gate.hidden_bias)
    gate = queries.gate.astype(np.float64) * items.gate
    gate = gate + hidden @ pair_gate.out_weight.T.astype(np.float64) + pair_gate.out_bias
    pi = softmax(activate(gate)).reshape(len(f), f.shape[1], -1)
    return np.einsum("n,nqx,nqd->nxd", weights, pi, f)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([(3, 2, 8), (1, 1, 5), (8, 4, 64), (2, 3, 7)]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_row_has_the_same_bits_in_every_batch(seed: int, count: int, shape: tuple[int, int, int]) -> None:
    p_q, p_x, d = shape
    scene = make_scene(seed, count, p_q=p_q, p_x=p_x, d=d)
    fold = Contributions(scene.pair_gate)
    order = np.random.default_rng(seed).permutation(count)
    shuffled = fold(take(scene.queries, order), scene.weights[order], take(scene.items, order))
    assert (shuffled == scene.contributions[order]).all()
    alone = [
        fold(take(scene.queries, [row]), scene.weights[[row]], take(scene.items, [row])) for row in range(min(count, 5))
    ]
    assert (np.concatenate(alone) == scene.contributions[: len(alone)]).all()
    # A slice whose memory lies differently: Fortran order, so that the library takes another path.
    odd = QueryStates(components=np.asfortranarray(scene.queries.components), gate=scene.queries.gate)
    assert (fold(odd, scene.weights, scene.items) == scene.contributions).all()


def test_another_processors_instructions_make_the_same_bits() -> None:
    # As on a machine of 2008: NumPy and BLAS then order additions differently, and their exponentials differ.
    program = (
        "import hashlib, pefa_scene;"
        "scene = pefa_scene.make_scene(20, 300, p_q=8, p_x=4, d=64);"
        "print(hashlib.sha256(scene.contributions.tobytes()).hexdigest())"
    )
    older = {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR", "OPENBLAS_CORETYPE": "Nehalem"}
    environment = {**os.environ, **older, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    here = make_scene(20, 300, p_q=8, p_x=4, d=64).contributions
    assert run.stdout.strip() == hashlib.sha256(here.tobytes()).hexdigest()


@pytest.mark.parametrize("leave_out", [None, 2])
def test_a_contribution_is_the_formula(leave_out: int | None) -> None:
    scene = make_scene(3, 200, leave_out=leave_out)
    wanted = formula(scene.queries, scene.weights, scene.items, scene.pair_gate, leave_out)
    assert np.abs(scene.contributions / SCALE - wanted).max() < 1e-6
    assert np.abs(wanted).max() > 0.1


def test_large_gates_stay_near_the_formula() -> None:
    rng = np.random.default_rng(4)
    queries, items = make_queries(rng, 100, 8, 4, 64), make_items(rng, 100, 8, 4, 64)
    pair_gate = make_pair_gate(rng, 32, 128, scale=2.0)
    got = Contributions(pair_gate)(queries, np.ones(100), items) / SCALE
    # Sums of about 100 large terms leave fewer bits for each factor; queries come unrounded here.
    assert np.abs(got - formula(queries, np.ones(100), items, pair_gate, None)).max() < 1e-3


def test_the_user_component_leaves_no_trace() -> None:
    scene = make_scene(6, 30, leave_out=2)
    others = scene.queries.components.copy()
    others[:, 2] = np.random.default_rng(7).normal(size=others[:, 2].shape).clip(-1, 1)
    changed = QueryStates(components=others, gate=scene.queries.gate)
    fold = Contributions(scene.pair_gate, leave_out=2)
    assert (fold(changed, scene.weights, scene.items) == scene.contributions).all()
    assert (Contributions(scene.pair_gate)(changed, scene.weights, scene.items) != scene.contributions).any()


def test_a_new_item_takes_pair_weights_from_the_query_alone() -> None:
    rng = np.random.default_rng(8)
    catalogue = make_items(rng, 20, 3, 2, 8)
    pair_gate = make_pair_gate(rng, 6, 5)
    queries = make_queries(rng, 10, 3, 2, 8)
    gate = mean_gate(catalogue)
    assert gate is not None
    assert np.allclose(gate, catalogue.gate.mean(axis=0), atol=1e-6)
    rows = cold_start_items(10, num_components=2, width=8, mean_gate=gate)
    got = Contributions(pair_gate)(queries, np.ones(10), rows) / SCALE
    flat = silu(pair_gate.hidden_bias.astype(np.float64)) @ pair_gate.out_weight.T.astype(np.float64)
    logits = queries.gate.astype(np.float64) * gate + flat + pair_gate.out_bias
    pi = softmax(logits / (1 + np.exp(-logits))).reshape(10, 3, 2)
    assert np.abs(got - np.einsum("nqx,nqd->nxd", pi, queries.components)).max() < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": np.ones(4)}, "5 queries, weights of shape"),
        ({"weights": np.full(5, np.nan)}, "weights hold nan"),
        ({"weights": np.full(5, 1e6)}, "weights hold 1000000"),
        ({"items": 4}, "4 items"),
        ({"leave_out": 3}, "leave_out=3 allowed: 0 to 2"),
        ({"leave_out": -1}, "leave_out=-1 allowed: 0 to 2"),
        ({"scale": 9.0}, "queries.components reach"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    scene = make_scene(11, 5)
    queries = scene.queries
    if "scale" in change:
        queries = QueryStates(components=queries.components * np.float32(9), gate=queries.gate)
    items = take(scene.items, slice(0, change.get("items", 5)))
    add = Contributions(scene.pair_gate, leave_out=change.get("leave_out"))
    with pytest.raises(ValueError, match=message):
        add(queries, change.get("weights", scene.weights), items)


def test_states_of_other_shapes_are_refused() -> None:
    scene, other = make_scene(12, 5), make_scene(12, 5, d=4)
    with pytest.raises(ValueError, match="width"):
        Contributions(scene.pair_gate)(other.queries, scene.weights, scene.items)
    with pytest.raises(ValueError, match="NaN"):
        QueryStates(components=np.full((1, 3, 8), np.nan, np.float32))
    with pytest.raises(ValueError, match="0 items"):
        mean_gate(take(scene.items, []))


@given(st.floats(-800, 0))
@example(-0.0)
@example(-745.2)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_exponential_is_right_to_the_last_bits(x: float) -> None:
    got = float(exp_of_negative(np.array([x]))[0])
    if x < -700:
        assert got == 0
    else:
        assert got == pytest.approx(math.exp(x), rel=4e-16)


def test_silu_is_x_times_the_logistic_function() -> None:
    x = np.linspace(-40, 40, 1001)
    assert np.allclose(silu(x), x / (1 + np.exp(-x)), rtol=1e-14, atol=1e-15)


def test_rounded_products_add_up_to_the_same_bits_in_any_order() -> None:
    rng = np.random.default_rng(13)
    left = to_multiples(rng.uniform(-1, 1, (50, 300)), 24)
    bits = spare_bits(300.0, 24)
    right = to_multiples(rng.uniform(-1, 1, (300, 20)), bits)
    order = rng.permutation(300)
    assert (left @ right == left[:, order] @ right[order]).all()
    assert (left @ right == np.array([[math.fsum(row * column) for column in right.T] for row in left])).all()
