"""The bound pass: nothing that reaches the threshold is ever dropped, on every instruction set."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native_builds import native_builds
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.ops.mol_bounds import AverageItems, BoundPass, best_averages
from services.algorithms.ops.mol_bounds.int8_network import int8_network
from services.algorithms.ops.mol_bounds.items import Lanes
from services.algorithms.ops.mol_bounds.tables import TURN
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates, silu

LIBRARIES = native_builds("mol_bounds")
EVERYWHERE = pytest.mark.parametrize("library", LIBRARIES)
TESTS = pytest.mark.parametrize("by_gates", [False, True], ids=["largest cosine", "gate intervals"])


def scene(
    seed: int, *, num_queries: int, count: int, p_q: int, p_x: int, d: int, hidden: int, gates: float, network: float
) -> tuple[QueryStates, ItemStates, PairGate | None]:
    rng = np.random.default_rng(seed)
    queries, items = make_queries(rng, num_queries, p_q, p_x, d), make_items(rng, count, p_q, p_x, d, spread=0.4)
    if items.gate is not None and queries.gate is not None:
        items.gate[...] *= gates
        queries.gate[...] -= 0.5
    items.components[rng.integers(count, size=count // 4)] = items.components[0]
    items.components[-1] = 0
    queries.components[0, 0] = 0
    gate = make_pair_gate(rng, p_q * p_x, hidden, scale=network) if p_q * p_x > 1 else None
    return queries, items, gate


@EVERYWHERE
@TESTS
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    components=st.sampled_from([(1, 1), (1, 2), (3, 1), (2, 3), (4, 2), (3, 5), (8, 4), (2, 17)]),
    d=st.integers(1, 40),
    count=st.integers(4, 150),
    hidden=st.sampled_from([1, 6, 16, 33]),
    gates=st.sampled_from([0.0, 0.3, 3.0, 40.0]),
    network=st.sampled_from([0.0, 0.05, 0.5, 8.0]),
    quantile=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
# Every row leaves at the first of two tests: the second one gets none.
@example(seed=1230198, components=(1, 1), d=1, count=4, hidden=1, gates=0.0, network=0.0, quantile=0.0)
def test_no_item_that_reaches_the_threshold_is_dropped(
    library: str,
    by_gates: bool,
    seed: int,
    components: tuple[int, int],
    d: int,
    count: int,
    hidden: int,
    gates: float,
    network: float,
    quantile: float,
) -> None:
    p_q, p_x = components
    queries, items, gate = scene(
        seed, num_queries=2, count=count, p_q=p_q, p_x=p_x, d=d, hidden=hidden, gates=gates, network=network
    )
    exact = mol_scores_reference(queries, items, gate).numpy()
    # Thresholds that are scores themselves: the item that has it must stay.
    thresholds = np.quantile(exact, quantile, axis=1, method="nearest")
    allowed = np.random.default_rng(seed).random((2, count)) < 0.8
    bound = BoundPass(MolScorer(items, gate), kernels=LIBRARIES[library], by_gates=by_gates)
    found = bound.survivors(queries, thresholds, allowed)
    for query in range(2):
        reaching = np.flatnonzero((exact[query] >= thresholds[query]) & allowed[query])
        assert set(reaching.tolist()) <= set(found.rows[query].tolist())
        assert allowed[query][found.rows[query]].all()
        assert (np.diff(found.rows[query]) > 0).all()


@EVERYWHERE
@TESTS
def test_what_is_far_below_the_threshold_is_dropped(library: str, by_gates: bool) -> None:
    queries, items, gate = scene(5, num_queries=3, count=2000, p_q=4, p_x=4, d=16, hidden=16, gates=0.2, network=0.1)
    exact = mol_scores_reference(queries, items, gate).numpy()
    thresholds = np.sort(exact, axis=1)[:, -5]
    bound = BoundPass(MolScorer(items, gate), kernels=LIBRARIES[library], by_gates=by_gates)
    found = bound.survivors(queries, thresholds)
    limit = 2000 if not by_gates else 200
    assert max(len(rows) for rows in found.rows) <= limit * 0.9


# Of 1,500 items for each of four queries: those that stay, and those that reach the test of gates. An implementation of
# the same mathematics in NumPy, with exact exponentials, kept the same but for one item.
STAYING = {
    (4, 2, 32): ([30, 42, 34, 38], [1030, 1135, 1039, 1135]),
    (8, 4, 64): ([44, 51, 84, 54], [1466, 1470, 1486, 1458]),
    (3, 3, 7): ([32, 30, 29, 30], [1020, 1374, 677, 1053]),
    (2, 17, 9): ([49, 37, 35, 34], [516, 728, 791, 948]),
}


@EVERYWHERE
@pytest.mark.parametrize("shape", STAYING)
def test_every_build_keeps_as_few_items(library: str, shape: tuple[int, int, int]) -> None:
    p_q, p_x, d = shape
    queries, items, gate = scene(
        6, num_queries=4, count=1500, p_q=p_q, p_x=p_x, d=d, hidden=24, gates=0.5, network=0.15
    )
    exact = mol_scores_reference(queries, items, gate).numpy()
    found = BoundPass(MolScorer(items, gate), kernels=LIBRARIES[library]).survivors(
        queries, np.sort(exact, axis=1)[:, -20]
    )
    for counts, wanted in zip(([len(rows) for rows in found.rows], found.tested), STAYING[shape], strict=True):
        assert (np.abs(np.array(counts) - wanted) <= 2).all()


def test_absurd_weights_drop_nothing_rather_than_a_right_item() -> None:
    for scale in (1e12, 1e18, 1e30):
        queries, items, gate = scene(7, num_queries=2, count=300, p_q=2, p_x=2, d=8, hidden=8, gates=1.0, network=scale)
        thresholds = np.sort(mol_scores_reference(queries, items, gate).numpy(), axis=1)[:, -5]
        exact = mol_scores_reference(queries, items, gate).numpy()
        for library in LIBRARIES.values():
            bound = BoundPass(MolScorer(items, gate), kernels=library)
            found = bound.survivors(queries, thresholds)
            for query in range(2):
                assert set(np.flatnonzero(exact[query] >= thresholds[query])) <= set(found.rows[query].tolist())


def exp_silu(gates: np.ndarray) -> np.ndarray:
    return np.exp(silu(gates))


def test_the_weight_falls_until_its_turn_and_is_larger_right_of_it() -> None:
    gates = np.linspace(-60, 60, 240_001)
    weights = exp_silu(gates)
    turn = int(np.argmin(weights))
    assert float(gates[turn]) == pytest.approx(TURN, abs=1e-3)
    assert (np.diff(weights[: turn + 1]) <= 1e-15).all()
    assert (np.diff(weights[turn:]) >= 0).all()
    away = np.linspace(0, 30, 30_001)
    assert (exp_silu(TURN + away) >= exp_silu(TURN - away) * (1 - 1e-12)).all()


def test_an_average_pool_is_the_best_by_coded_averages() -> None:
    rng = np.random.default_rng(9)
    items, queries = make_items(rng, 1203, 4, 3, 10), make_queries(rng, 3, 4, 3, 10)
    averages = AverageItems(MolScorer(items, make_pair_gate(rng, 12, 4)))
    allowed = rng.random((3, 1203)) < 0.5
    means = items.components.mean(axis=1) @ queries.components.mean(axis=1).T
    for name, library in native_builds("mol_bounds").items():
        pools = best_averages(averages, queries, 60, allowed, kernels=library)
        for query, pool in enumerate(pools):
            assert len(pool) == 60
            assert allowed[query][pool].all()
            best = np.argsort(np.where(allowed[query], -means[:, query], np.inf))[:60]
            assert len(np.intersect1d(pool, best)) >= 56, name


def test_too_wide_components_are_refused() -> None:
    with pytest.raises(ValueError, match="component width is 65537"):
        Lanes(num_query_components=1, num_item_components=1, width=65_537)


def test_the_int8_network_holds_its_certificate_step_by_step() -> None:
    rng = np.random.default_rng(10)
    gate = make_pair_gate(rng, 8, 24, scale=0.4)
    network = int8_network(gate, Lanes(num_query_components=4, num_item_components=2, width=8), TURN)
    hidden = np.linspace(-40, 40, 400_001)
    segment = np.clip(hidden * 2 + 16, 0, 31).astype(int)
    line = network.segment_values[segment] + network.segment_slopes[segment] * hidden
    apart = np.abs(line - hidden / (1 + np.exp(-hidden)))
    assert network.segment_error / 2 < apart.max() <= network.segment_error
