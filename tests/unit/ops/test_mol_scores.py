"""Each compiled instruction set (and BLAS, for one pair) against the plain formula, within the stated error."""

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import native_builds
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.native import INSTRUCTION_SETS
from services.algorithms.native.threads import compute_threads, set_compute_threads
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates

# Queries, items, P_q, P_x, d, G: around the widths of vectors (4, 8, 16), row blocks (4, 8) and tiles (12, 24, 48).
SHAPES = [
    (1, 1, 1, 1, 3, 1),
    (1, 7, 4, 2, 8, 16),
    (3, 130, 2, 3, 5, 4),
    (5, 33, 1, 4, 16, 8),
    (2, 65, 8, 4, 64, 128),
    (5, 15, 3, 5, 1, 7),
    (1, 16, 7, 1, 9, 13),
    (1, 17, 5, 3, 4, 31),
    (2, 1000, 6, 2, 7, 9),
    (1, 48, 8, 8, 32, 128),
    (1, 49, 1, 1, 33, 5),
]
every_build = pytest.mark.parametrize("name", INSTRUCTION_SETS)


def build(name: str, items: ItemStates, gate: PairGate | None) -> MolScorer:
    builds = native_builds("mol_scores")
    if name not in builds:
        pytest.skip(f"this processor lacks {name}")
    return MolScorer(items, gate, kernels=builds[name])


@functools.cache
def scene(shape: tuple[int, ...]) -> tuple[QueryStates, ItemStates, PairGate | None, np.ndarray]:
    num_queries, count, p_q, p_x, d, hidden = shape
    rng = np.random.default_rng(count)
    queries, items = make_queries(rng, num_queries, p_q, p_x, d), make_items(rng, count, p_q, p_x, d)
    gate = make_pair_gate(rng, p_q * p_x, hidden) if p_q * p_x > 1 else None
    return queries, items, gate, mol_scores_reference(queries, items, gate).numpy()


@every_build
@pytest.mark.parametrize("shape", SHAPES)
def test_every_score_is_within_the_stated_error_of_the_formula(name: str, shape: tuple[int, ...]) -> None:
    queries, items, gate, exact = scene(shape)
    error = np.abs(build(name, items, gate).scores(queries) - exact).max(axis=1)
    assert (error <= MolScorer(items, gate).error_bounds(queries)).all()
    assert error.max() < 1e-6


@every_build
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_chosen_items_are_the_same_in_any_order_and_number(name: str, shape: tuple[int, ...]) -> None:
    queries, items, gate, exact = scene(shape)
    rng = np.random.default_rng(0)
    counts = rng.permutation([0, 1, 15, 17, 300])[: len(queries)]
    rows = [rng.integers(0, len(items), size=count) for count in counts]
    scorer = build(name, items, gate)
    found, precise = scorer.scores_at(queries, rows), scorer.scores_float64_at(queries, rows)
    assert [len(row) for row in found] == [len(row) for row in precise] == list(counts)
    bounds = MolScorer(items, gate).error_bounds_float64(queries)
    for query, chosen in enumerate(rows):
        assert found[query].dtype == np.float32
        assert np.abs(found[query] - exact[query, chosen]).max(initial=0) < 1e-6
        # The reference rounds as well.
        assert np.abs(precise[query] - exact[query, chosen]).max(initial=0) <= 2 * bounds[query]


@every_build
def test_several_threads_give_the_answer_of_one(name: str) -> None:
    rng = np.random.default_rng(7)
    queries, items = make_queries(rng, 4, 8, 4, 16), make_items(rng, 3000, 8, 4, 16)
    scorer = build(name, items, make_pair_gate(rng, 32, 64))
    rows = [rng.permutation(3000)[:500] for _ in range(4)]
    threads = compute_threads()
    answers = []
    try:
        for count in (1, 3):
            set_compute_threads(count)
            answers.append((scorer.scores(queries), *scorer.scores_at(queries, rows)))
    finally:
        set_compute_threads(threads)
    for one, three in zip(*answers, strict=True):
        assert (one == three).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p_q=st.integers(1, 9),
    p_x=st.integers(1, 4),
    d=st.integers(1, 20),
    hidden=st.integers(1, 12),
    scale=st.sampled_from([0.0, 1e-20, 0.1, 1.0, 10.0, 1e4]),
    with_item_gate=st.booleans(),
    with_pair_gate=st.booleans(),
)
def test_float32_and_float64_stay_within_their_bounds(
    seed: int,
    p_q: int,
    p_x: int,
    d: int,
    hidden: int,
    scale: float,
    with_item_gate: bool,
    with_pair_gate: bool,
) -> None:
    rng = np.random.default_rng(seed)
    queries, items = make_queries(rng, 2, p_q, p_x, d), make_items(rng, 50, p_q, p_x, d)
    if with_item_gate and queries.gate is not None:
        queries = QueryStates(components=queries.components, gate=(scale * queries.gate).astype(np.float32))
    if not with_item_gate:
        queries = QueryStates(components=queries.components)
        items = ItemStates(components=items.components)
    gate = make_pair_gate(rng, p_q * p_x, hidden, scale=scale) if with_pair_gate or not with_item_gate else None
    if p_q * p_x == 1 and gate is None and items.gate is None and p_x > 1:
        return
    exact = mol_scores_reference(queries, items, gate).numpy()
    scorer = MolScorer(items, gate)
    assert (np.abs(scorer.scores(queries) - exact).max(axis=1) <= scorer.error_bounds(queries)).all()
    for query in range(2):
        found = scorer.scores_float64(queries, query, np.arange(50))
        # The reference rounds as well.
        assert np.abs(found - exact[query]).max() <= 2 * scorer.error_bounds_float64(queries)[query]


@every_build
def test_one_pair_without_a_gate_is_the_dot_product(name: str) -> None:
    rng = np.random.default_rng(1)
    queries, items = make_queries(rng, 4, 1, 1, 16), make_items(rng, 50, 1, 1, 16)
    wanted = queries.components[:, 0].astype(np.float64) @ items.components[:, 0].astype(np.float64).T
    scorer = build(name, items, None)
    for way in (scorer, MolScorer(items, None)):
        assert np.abs(way.scores(queries) - wanted).max() < 1e-6
    everything = [np.arange(50)] * 4
    assert np.abs(np.array(scorer.scores_float64_at(queries, everything)) - wanted).max() < 1e-15


@every_build
def test_one_pair_with_a_gate_is_the_dot_product_still(name: str) -> None:
    rng = np.random.default_rng(1)
    components = rng.normal(size=(20, 1, 4)).astype(np.float32)
    items = ItemStates(components=components, gate=rng.normal(size=(20, 1)).astype(np.float32))
    queries = QueryStates(components=components[:3], gate=rng.normal(size=(3, 1)).astype(np.float32))
    wanted = components[:3, 0].astype(np.float64) @ components[:, 0].astype(np.float64).T
    scorer = build(name, items, make_pair_gate(rng, 1, 5))
    assert np.abs(scorer.scores(queries) - wanted).max() < 1e-5
    assert np.abs(np.array(scorer.scores_at(queries, [np.arange(20)] * 3)) - wanted).max() < 1e-5


@every_build
def test_an_absent_user_component_scores_finitely(name: str) -> None:
    rng = np.random.default_rng(2)
    queries, items = make_queries(rng, 1, 4, 2, 8), make_items(rng, 20, 4, 2, 8)
    queries.components[0, 1] = 0
    gate = make_pair_gate(rng, 8, 16)
    exact = mol_scores_reference(queries, items, gate).numpy()
    assert np.abs(build(name, items, gate).scores(queries) - exact).max() < 1e-6


@every_build
@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e8, 1e15])
@pytest.mark.parametrize("large", ["query gate", "hidden layer", "output layer"])
def test_extreme_gates_neither_overflow_nor_lose_the_weights(name: str, scale: float, large: str) -> None:
    rng = np.random.default_rng(3)
    queries, items = make_queries(rng, 2, 2, 2, 4), make_items(rng, 100, 2, 2, 4)
    gate = make_pair_gate(rng, 4, 8)
    if large == "query gate":
        queries = QueryStates(components=queries.components, gate=(scale * queries.gate).astype(np.float32))
    elif large == "hidden layer":
        gate.hidden_weight[:] *= np.float32(scale)
        gate.hidden_bias[:] *= np.float32(scale)
    else:
        gate.out_weight[:] *= np.float32(scale)
        gate.out_bias[:] *= np.float32(scale)
    exact = mol_scores_reference(queries, items, gate).numpy()
    found = build(name, items, gate).scores(queries)
    assert np.isfinite(found).all()
    assert (np.abs(found - exact).max(axis=1) <= MolScorer(items, gate).error_bounds(queries)).all()
    # A bound of 1 proves little: with weights this large most items have one pair that outweighs all others, exactly.
    assert np.median(np.abs(found - exact)) < 1e-6


@every_build
def test_no_queries_and_no_items_make_empty_scores(name: str) -> None:
    rng = np.random.default_rng(4)
    gate = make_pair_gate(rng, 4, 8)
    items = make_items(rng, 9, 2, 2, 4)
    assert build(name, items, gate).scores(make_queries(rng, 0, 2, 2, 4)).shape == (0, 9)
    assert build(name, items, gate).scores_at(make_queries(rng, 0, 2, 2, 4), []) == []
    none = build(name, make_items(rng, 0, 2, 2, 4), gate)
    assert none.scores(make_queries(rng, 3, 2, 2, 4)).shape == (3, 0)
    nothing = [np.empty(0, dtype=np.int64)] * 3
    assert [len(row) for row in none.scores_float64_at(make_queries(rng, 3, 2, 2, 4), nothing)] == [0, 0, 0]


@every_build
def test_arrays_of_any_layout_are_read_right_and_never_written_to(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    queries, items = make_queries(rng, 3, 4, 2, 8), make_items(rng, 70, 4, 2, 8)
    gate = make_pair_gate(rng, 8, 16)
    exact = mol_scores_reference(queries, items, gate).numpy()
    assert items.gate is not None
    assert queries.gate is not None
    fortran = ItemStates(components=np.asfortranarray(items.components), gate=np.asfortranarray(items.gate))
    strided = QueryStates(
        components=np.repeat(queries.components, 2, axis=0)[::2], gate=np.repeat(queries.gate, 2, axis=1)[:, ::2]
    )
    np.save(tmp_path / "components.npy", items.components)
    np.save(tmp_path / "gate.npy", items.gate)
    mapped = ItemStates(
        components=np.load(tmp_path / "components.npy", mmap_mode="r"),
        gate=np.load(tmp_path / "gate.npy", mmap_mode="r"),
    )
    for stored in (fortran, mapped):
        assert np.abs(build(name, stored, gate).scores(strided) - exact).max() < 1e-6


def test_the_kernel_holds_the_arrays_it_was_given_and_nothing_else() -> None:
    rng = np.random.default_rng(9)
    items = make_items(rng, 500, 4, 2, 8)
    scorer = MolScorer(items, make_pair_gate(rng, 8, 16))
    assert scorer.nbytes == 500 * items.bytes_per_item
    assert np.shares_memory(scorer.components, items.components)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": (1, 4, 2, 9)}, "query components have width 9 but item components have width 8"),
        ({"queries": (1, 3, 2, 8)}, "3 query components x 2 item components make 6 pairs; the gate has 8"),
        ({"pair_gate": 6}, "items.gate has 8 pairs but pair_gate has 6"),
        ({"query_gate": None}, "query gate is absent but the items' gate is present"),
        ({"item_gate": None, "pair_gate": None}, "neither items.gate nor pair_gate"),
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
        MolScorer(items, gate).scores(queries)


@pytest.mark.parametrize("rows", [[5], [-1], [0, 4, 7]])
def test_rows_beyond_the_catalogue_are_refused(rows: list[int]) -> None:
    rng = np.random.default_rng(6)
    scorer = MolScorer(make_items(rng, 5, 4, 2, 8), make_pair_gate(rng, 8, 16))
    queries = make_queries(rng, 1, 4, 2, 8)
    for call in (scorer.scores_at, scorer.scores_float64_at):
        with pytest.raises(ValueError, match=r"rows=-?\d+\.\.-?\d+ allowed: 0 to 4"):
            call(queries, [np.array(rows)])
        with pytest.raises(ValueError, match="rows has 2 entries; expected one per query: 1"):
            call(queries, [np.array([0])] * 2)
