"""The bound on mixtures whose weights are known to intervals: against every corner, random weights, and the oracle."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_scene import make_items, make_pair_gate, make_queries, unit

from services.algorithms.indexes.gate_bounds import GateBounds, largest_mixture, silu_range
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, QueryStates


def best_corner(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """The largest mixture over all 2^P corners: a linear-fractional function has its maximum at one."""
    best = -np.inf
    for corner in itertools.product((0, 1), repeat=len(values)):
        log = np.where(corner, high, low)
        weight = np.exp(log - log.max())
        best = max(best, float(weight @ values / weight.sum()))
    return best


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pairs=st.integers(1, 8), scale=st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_the_largest_mixture_is_that_of_the_best_corner(seed: int, pairs: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1, 1, size=(3, pairs))
    values[0] = np.round(values[0])  # ties
    low = scale * rng.normal(size=(3, pairs))
    high = low + scale * rng.exponential(size=(3, pairs))
    found = largest_mixture(values, low, high)
    for query in range(3):
        best = best_corner(values[query], low[query], high[query])
        assert best <= found[query] + 1e-15
        assert found[query] <= best + 1e-11


def test_equal_weights_make_the_mean_and_free_weights_the_maximum() -> None:
    values = np.array([[0.9, 0.1, -0.4]])
    assert largest_mixture(values, np.zeros((1, 3)), np.zeros((1, 3))) == pytest.approx(0.2)
    assert largest_mixture(values, np.full((1, 3), -50.0), np.full((1, 3), 50.0)) == pytest.approx(0.9)


def test_weights_that_underflow_leave_the_largest_value() -> None:
    # The first pair may outweigh the second by e^99, though both of its weights are 0 in float64 beside e^0.
    values = np.array([[1.0, 0.0]])
    assert largest_mixture(values, np.array([[-2000.0, -1999.0]]), np.array([[-1900.0, 0.0]])) == 1.0


def test_the_shared_denominator_makes_it_tighter_than_a_knapsack_over_intervals_of_the_softmax() -> None:
    values = np.array([[0.9, 0.5, 0.0]])
    low, high = np.array([[-1.0, -1.0, -1.0]]), np.array([[1.0, 1.0, 1.0]])
    # Softmax weights lie in [e^-1 / (e^-1 + 2e), e / (e + 2/e)] = [.0634, .787]: fill by value.
    least, most = np.exp(-1) / (np.exp(-1) + 2 * np.e), np.e / (np.e + 2 / np.e)
    share = np.array([most, 1 - most - least, least])
    assert largest_mixture(values, low, high)[0] < float(share @ values[0]) - 0.01


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.1, 1.0, 5.0, 1000.0]))
def test_silu_stays_within_its_range(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    ends = np.sort(scale * rng.normal(size=(2, 20)), axis=0)
    low, high = silu_range(ends[0], ends[1])
    for share in np.linspace(0, 1, 101):
        z = ends[0] + share * (ends[1] - ends[0])
        with np.errstate(over="ignore"):
            value = z / (1 + np.exp(-z))
        assert (low <= value).all()
        assert (value <= high).all()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p_q=st.integers(1, 4),
    p_x=st.integers(1, 4),
    d=st.integers(1, 10),
    hidden=st.integers(1, 8),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    with_item_gate=st.booleans(),
    with_pair_gate=st.booleans(),
)
def test_no_item_scores_above_the_bound_of_its_own_cosines(
    seed: int, p_q: int, p_x: int, d: int, hidden: int, scale: float, with_item_gate: bool, with_pair_gate: bool
) -> None:
    rng = np.random.default_rng(seed)
    queries, items = make_queries(rng, 2, p_q, p_x, d), make_items(rng, 40, p_q, p_x, d, spread=0.5)
    if p_q * p_x > 1 and not with_item_gate:
        if not with_pair_gate:
            return
        queries, items = QueryStates(components=queries.components), ItemStates(components=items.components)
    gate = make_pair_gate(rng, p_q * p_x, hidden, scale=scale) if with_pair_gate and p_q * p_x > 1 else None
    exact = mol_scores_reference(queries, items, gate).numpy()
    bounds = GateBounds(MolScorer(items, gate))
    cosines = np.einsum("bqd,xpd->bxqp", queries.components.astype(float), items.components.astype(float))
    cosines = cosines.reshape(2, 40, p_q * p_x)
    for item in range(40):
        found = bounds.upper_bounds(queries, cosines[:, item] + 1e-12)
        assert (exact[:, item] <= found).all()
        assert (found <= cosines[:, item].max(axis=1) + 1e-12).all()


def test_a_pair_without_left_out_items_means_that_nothing_was_left_out() -> None:
    rng = np.random.default_rng(2)
    queries, items = make_queries(rng, 2, 2, 2, 4), make_items(rng, 5, 2, 2, 4)
    highest = np.array([[0.1, 0.2, 0.3, 0.4], [0.1, -np.inf, 0.3, 0.4]])
    found = GateBounds(MolScorer(items, None)).upper_bounds(queries, highest)
    assert np.isfinite(found[0])
    assert found[1] == -np.inf


def test_gates_that_hardly_vary_prove_what_the_largest_cosine_cannot() -> None:
    # Every item's first component agrees with every query's first one, so max_p t_p is near 1 and proves nothing;
    # with nearly equal weights that one pair of eight cannot carry an item to the first place.
    rng = np.random.default_rng(3)
    p_q, p_x, d, count = 4, 2, 32, 400
    components = rng.normal(size=(count, p_x, d))
    components[:, 0] = np.eye(d)[0] + 0.05 * components[:, 0]
    items = ItemStates(components=unit(components), gate=0.05 * rng.normal(size=(count, 8)).astype(np.float32))
    near = items.components[:8, None, 1] + 0.05 * rng.normal(size=(8, p_q, d))
    near[:, 0] = np.eye(d)[0]
    queries = QueryStates(components=unit(near), gate=0.05 * rng.normal(size=(8, 8)).astype(np.float32))
    index = TopKPerEmbedding(MolScorer(items, make_pair_gate(rng, 8, 8, scale=0.02)), pool_size=100)
    answer = index.search(queries, 1)
    largest = index.passes.run(
        queries,
        None,
        None,
        lambda request: index.lists(request, (100,)),
        lambda _, lists: lists[0].following.max(axis=1),
    )
    assert (largest > answer.scores[:, 0] + 0.3).all()
    assert {found.kind for found in answer.certificates} == {"exact"}
    assert answer.item_indices[:, 0].tolist() == list(range(8))
