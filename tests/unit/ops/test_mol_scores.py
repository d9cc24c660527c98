"""The tiled scores against the plain formula in float64, at odd shapes, with the stated error bound."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.ops.mol_scores import MolScorer, mol_scores
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.states import ItemStates, PairGate, QueryStates

SHAPES = [(1, 1, 1, 1, 3, 1), (1, 7, 4, 2, 8, 16), (3, 130, 2, 3, 5, 4), (5, 33, 1, 4, 16, 8), (2, 65, 8, 4, 64, 128)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile_bytes", [600, 4096, 1 << 20])
def test_every_tiling_equals_the_formula_within_the_stated_error(shape: tuple[int, ...], tile_bytes: int) -> None:
    num_queries, count, p_q, p_x, d, hidden = shape
    rng = np.random.default_rng(count)
    queries, items = make_queries(rng, num_queries, p_q, p_x, d), make_items(rng, count, p_q, p_x, d)
    gate = make_pair_gate(rng, p_q * p_x, hidden) if p_q * p_x > 1 else None
    exact = mol_scores_reference(queries, items, gate).numpy()
    scorer = MolScorer(items, gate, tile_bytes=tile_bytes)
    error = np.abs(scorer.scores(queries) - exact).max(axis=1)
    assert (error <= scorer.error_bounds(queries)).all()
    assert error.max() < 1e-6
    assert np.abs(mol_scores(queries, items, gate, tile_bytes=tile_bytes) - exact).max() < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p_q=st.integers(1, 5),
    p_x=st.integers(1, 4),
    d=st.integers(1, 20),
    hidden=st.integers(1, 12),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    with_item_gate=st.booleans(),
)
def test_float32_and_float64_stay_within_their_bounds(
    seed: int, p_q: int, p_x: int, d: int, hidden: int, scale: float, with_item_gate: bool
) -> None:
    rng = np.random.default_rng(seed)
    queries, items = make_queries(rng, 2, p_q, p_x, d), make_items(rng, 50, p_q, p_x, d)
    if not with_item_gate:
        queries = QueryStates(components=queries.components)
        items = ItemStates(components=items.components)
    gate = make_pair_gate(rng, p_q * p_x, hidden, scale=scale)
    exact = mol_scores_reference(queries, items, gate).numpy()
    scorer = MolScorer(items, gate, tile_bytes=2048)
    assert (np.abs(scorer.scores(queries) - exact).max(axis=1) <= scorer.error_bounds(queries)).all()
    for query in range(2):
        found = scorer.scores_float64(queries, query, np.arange(50))
        # The reference rounds as well.
        assert np.abs(found - exact[query]).max() <= 2 * scorer.error_bounds_float64(queries)[query]


def test_one_pair_without_a_gate_is_the_dot_product() -> None:
    rng = np.random.default_rng(1)
    queries, items = make_queries(rng, 4, 1, 1, 16), make_items(rng, 50, 1, 1, 16)
    wanted = queries.components[:, 0].astype(np.float64) @ items.components[:, 0].astype(np.float64).T
    assert np.abs(mol_scores(queries, items, None) - wanted).max() < 1e-6


def test_an_absent_user_component_scores_finitely() -> None:
    rng = np.random.default_rng(2)
    queries, items = make_queries(rng, 1, 4, 2, 8), make_items(rng, 20, 4, 2, 8)
    queries.components[0, 1] = 0
    gate = make_pair_gate(rng, 8, 16)
    exact = mol_scores_reference(queries, items, gate).numpy()
    assert np.abs(mol_scores(queries, items, gate) - exact).max() < 1e-6


def test_extreme_gates_neither_overflow_nor_lose_the_weights() -> None:
    rng = np.random.default_rng(3)
    queries, items = make_queries(rng, 2, 2, 2, 4), make_items(rng, 30, 2, 2, 4)
    queries = QueryStates(components=queries.components, gate=1e4 * queries.gate)
    exact = mol_scores_reference(queries, items, None).numpy()
    found = mol_scores(queries, items, None)
    assert np.isfinite(found).all()
    assert (np.abs(found - exact).max(axis=1) <= MolScorer(items, None).error_bounds(queries)).all()


def test_no_queries_and_no_items_make_empty_scores() -> None:
    rng = np.random.default_rng(4)
    gate = make_pair_gate(rng, 4, 8)
    assert mol_scores(make_queries(rng, 0, 2, 2, 4), make_items(rng, 9, 2, 2, 4), gate).shape == (0, 9)
    assert mol_scores(make_queries(rng, 3, 2, 2, 4), make_items(rng, 0, 2, 2, 4), gate).shape == (3, 0)


def test_no_tensor_larger_than_the_budget_is_made() -> None:
    rng = np.random.default_rng(5)
    queries, items = make_queries(rng, 3, 4, 2, 8), make_items(rng, 20_000, 4, 2, 8)
    scorer = MolScorer(items, make_pair_gate(rng, 8, 16), tile_bytes=1 << 16)
    result_bytes = 3 * 20_000 * 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        scorer.scores(queries)
    largest = [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0]
    assert [size for size in largest if size > 1 << 16] == [result_bytes]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": (1, 4, 2, 9)}, "query components have width 9 but item components have width 8"),
        ({"queries": (1, 3, 2, 8)}, "3 query components x 2 item components make 6 pairs; the gate has 8"),
        ({"pair_gate": 6}, "items.gate has 8 pairs but pair_gate has 6"),
        ({"query_gate": None}, "query gate is absent but the items' gate is present"),
        ({"item_gate": None, "pair_gate": None}, "neither items.gate nor pair_gate"),
        ({"tile_bytes": 16}, "tile_bytes is 16; one query-item pair needs 68"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict, message: str) -> None:
    rng = np.random.default_rng(6)
    queries, items = make_queries(rng, *change.get("queries", (1, 4, 2, 8))), make_items(rng, 5, 4, 2, 8)
    if "query_gate" in change:
        queries = QueryStates(components=queries.components)
    if "item_gate" in change:
        items = ItemStates(components=items.components)
    pairs = change.get("pair_gate", 8)
    gate: PairGate | None = None if pairs is None else make_pair_gate(rng, pairs, 16)
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        mol_scores(queries, items, gate, tile_bytes=change.get("tile_bytes", 1 << 20))
