"""Every index in `index_builders.BUILDERS`, on catalogues whose answer is known by construction and against float64."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_builders import BUILDERS, Builder
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.protocol import Pass, Pool, TopK
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates

every_index = pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
every_exact_index = pytest.mark.parametrize(
    "builder", [builder for builder in BUILDERS if builder.exact], ids=lambda builder: builder.name
)

# A dot product, the shape of a trained model, and one of an odd width; all small ones are drawn below.
SHAPES = [(1, 1, 1, 16), (4, 8, 4, 16), (2, 3, 1, 33)]


def check_passes(passes: Sequence[Pass], num_queries: int, num_items: int) -> None:
    """Each pass is named, took a time, and touched between no and all items of each query."""
    assert passes
    for found in passes:
        assert found.name
        assert found.seconds >= 0
        assert found.touched.shape == (num_queries,)
        assert np.issubdtype(found.touched.dtype, np.integer)
        assert (found.touched >= 0).all()
        assert (found.touched <= num_items).all()


def check_answer(
    answer: TopK,
    exact: np.ndarray,
    k: int,
    allowed: np.ndarray | None,
    *,
    must_be_exact: bool,
    float64_error: float = 0.0,
) -> None:
    """Certificates hold; an exact answer has the oracle's scores; nothing disallowed, nothing twice, descending.

    `exact` (B, X): the float64 scores; `allowed` (X,) or (B, X); `float64_error`: the proven bound of those scores,
    where it matters: near ties count as equal along a chain, so a score may be off by as many of them as there are
    items (steep gates put copies 1e-11 apart).
    """
    num_queries, num_items = exact.shape
    tolerance = 1e-10 * max(1.0, float(np.abs(exact).max(initial=0))) + 2 * num_items * float64_error
    masks = np.broadcast_to(True if allowed is None else allowed, exact.shape)
    assert answer.item_indices.shape == answer.scores.shape == (num_queries, min(k, num_items))
    assert len(answer.certificates) == num_queries
    check_passes(answer.passes, num_queries, num_items)
    for query, certificate in enumerate(answer.certificates):
        mask = masks[query]
        rows = answer.item_indices[query][answer.item_indices[query] >= 0]
        scores = answer.scores[query][: len(rows)]
        wanted = np.sort(exact[query][mask])[::-1][:k]
        assert (answer.item_indices[query][: len(rows)] >= 0).all()
        assert (answer.item_indices[query][len(rows) :] == -1).all()
        assert (answer.scores[query][len(rows) :] == -np.inf).all()
        assert len(set(rows.tolist())) == len(rows) <= len(wanted)
        assert mask[rows].all()
        assert (np.diff(scores) <= 0).all()
        assert np.abs(scores - exact[query][rows]).max(initial=0) < tolerance
        if must_be_exact:
            assert certificate.kind == "exact"
        if certificate.gap is not None:
            assert len(rows) == len(wanted)
            left_out = mask.copy()
            left_out[rows] = False
            if left_out.any():
                assert exact[query][left_out].max() <= scores[-1] + certificate.gap + tolerance
        if certificate.kind == "exact":
            assert np.abs(scores - wanted).max(initial=0) < tolerance


def check_pool(pool: Pool, exact: np.ndarray, size: int, allowed: np.ndarray | None) -> None:
    """A pool holds allowed rows once each, at most `size` of them, and its bound covers whatever it left out."""
    num_queries, num_items = exact.shape
    tolerance = 1e-12 * max(1.0, float(np.abs(exact).max(initial=0)))
    masks = np.broadcast_to(True if allowed is None else allowed, exact.shape)
    check_passes(pool.passes, num_queries, num_items)
    assert pool.bounds.shape == (num_queries,)
    for query in range(num_queries):
        left_out = masks[query].copy()
        rows = pool.item_indices[query][pool.item_indices[query] >= 0]
        scores = pool.scores[query][: len(rows)]
        assert (pool.item_indices[query][: len(rows)] >= 0).all()
        assert len(set(rows.tolist())) == len(rows) <= size
        assert left_out[rows].all()
        assert (np.diff(scores) <= 0).all()
        left_out[rows] = False
        bound = pool.bound(query)
        if not left_out.any():
            assert bound is None or bound == -np.inf or len(rows) == size
        elif bound is not None:
            assert exact[query][left_out].max() <= bound + tolerance


@every_index
def test_equal_items_come_in_order_of_their_ids(builder: Builder) -> None:
    rng = np.random.default_rng(1)
    few = make_items(rng, 3, 4, 2, 8)
    copies = np.repeat(np.arange(3), 5)
    rng.shuffle(copies)
    assert few.gate is not None
    items = ItemStates(components=few.components[copies], gate=few.gate[copies])
    queries = make_queries(rng, 3, 4, 2, 8)
    gate = make_pair_gate(rng, 8, 16)
    # k is the whole catalogue, so every algorithm finds all of it and only the order is left to get right.
    answer = builder.build(items, gate).search(queries, 15)
    exact = mol_scores_reference(queries, few, gate).numpy()
    for query in range(3):
        best_first = np.argsort(-exact[query])
        place = np.empty(3, dtype=int)
        place[best_first] = np.arange(3)
        wanted = sorted(range(15), key=lambda row: (place[copies[row]], row))
        assert answer.item_indices[query].tolist() == wanted


@every_exact_index
def test_a_tie_at_the_kth_place_goes_to_the_smaller_id(builder: Builder) -> None:
    items = ItemStates(components=np.tile(np.array([[[1.0, 0.0]]], dtype=np.float32), (100, 1, 1)))
    queries = QueryStates(components=np.array([[[1.0, 0.0]]], dtype=np.float32))
    answer = builder.build(items, None).search(queries, 4)
    assert answer.item_indices[0].tolist() == [0, 1, 2, 3]


@every_exact_index
def test_a_tie_at_the_kth_place_goes_to_the_smaller_id_with_gates_too(builder: Builder) -> None:
    rng = np.random.default_rng(21)
    few = make_items(rng, 40, 4, 2, 8)
    assert few.gate is not None
    copies = rng.permutation(np.repeat(np.arange(40), 10))
    items = ItemStates(components=few.components[copies], gate=few.gate[copies])
    queries, gate = make_queries(rng, 2, 4, 2, 8), make_pair_gate(rng, 8, 6)
    exact = mol_scores_reference(queries, few, gate).numpy()
    answer = builder.build(items, gate).search(queries, 4)
    for query in range(2):
        best = np.flatnonzero(copies == exact[query].argmax())
        assert answer.item_indices[query].tolist() == best[:4].tolist()


@every_index
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [10, 400])
def test_random_catalogues_against_float64(builder: Builder, shape: tuple[int, ...], k: int) -> None:
    num_queries, p_q, p_x, d = shape
    rng = np.random.default_rng(k)
    queries, items = make_queries(rng, num_queries, p_q, p_x, d), make_items(rng, 300, p_q, p_x, d, spread=0.2)
    gate = make_pair_gate(rng, p_q * p_x, 16) if p_q * p_x > 1 else None
    exact = mol_scores_reference(queries, items, gate).numpy()
    answer = builder.build(items, gate).search(queries, k)
    check_answer(answer, exact, k, None, must_be_exact=builder.exact)
    if builder.exact:
        # No two of these scores are equal, so the rows are known as well.
        assert answer.item_indices.tolist() == np.argsort(-exact, axis=1)[:, :k].tolist()


@every_index
@pytest.mark.parametrize("gates", ["item and query", "pair network"])
def test_each_half_of_the_gate_alone_is_enough(builder: Builder, gates: str) -> None:
    rng = np.random.default_rng(16)
    queries, items = make_queries(rng, 3, 4, 2, 8), make_items(rng, 200, 4, 2, 8, spread=0.3)
    pair_gate: PairGate | None = None
    if gates == "pair network":
        queries, items = QueryStates(components=queries.components), ItemStates(components=items.components)
        pair_gate = make_pair_gate(rng, 8, 16)
    exact = mol_scores_reference(queries, items, pair_gate).numpy()
    answer = builder.build(items, pair_gate).search(queries, 10)
    check_answer(answer, exact, 10, None, must_be_exact=builder.exact)


@every_index
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_dot_products_need_not_be_normalised(builder: Builder, scale: float) -> None:
    rng = np.random.default_rng(17)
    lengths = np.exp(rng.normal(size=(400, 1, 1)))
    items = ItemStates(components=(scale * lengths * rng.normal(size=(400, 1, 24))).astype(np.float32))
    queries = QueryStates(components=(3 * rng.normal(size=(4, 1, 24))).astype(np.float32))
    exact = mol_scores_reference(queries, items, None).numpy()
    index = builder.build(items, None)
    allowed = rng.random((4, 400)) < 0.5
    check_answer(index.search(queries, 10), exact, 10, None, must_be_exact=builder.exact)
    check_answer(index.search(queries, 10, allowed), exact, 10, allowed, must_be_exact=builder.exact)
    check_pool(index.first_stage(queries, 30), exact, 30, None)


@every_index
def test_absent_query_components_and_all_zero_queries_are_answered(builder: Builder) -> None:
    rng = np.random.default_rng(18)
    queries, items = make_queries(rng, 3, 4, 2, 8), make_items(rng, 200, 4, 2, 8, spread=0.3)
    queries.components[0, 1] = 0
    queries.components[1] = 0
    gate = make_pair_gate(rng, 8, 16)
    exact = mol_scores_reference(queries, items, gate).numpy()
    answer = builder.build(items, gate).search(queries, 10)
    check_answer(answer, exact, 10, None, must_be_exact=builder.exact)
    if builder.exact:
        assert answer.item_indices[1].tolist() == list(range(10))


@every_index
def test_zero_item_components_are_answered(builder: Builder) -> None:
    rng = np.random.default_rng(19)
    queries, items = make_queries(rng, 3, 4, 2, 8), make_items(rng, 200, 4, 2, 8, spread=0.3)
    items.components[::3, 1] = 0
    items.components[::6] = 0
    gate = make_pair_gate(rng, 8, 16)
    exact = mol_scores_reference(queries, items, gate).numpy()
    index = builder.build(items, gate)
    check_answer(index.search(queries, 10), exact, 10, None, must_be_exact=builder.exact)
    check_pool(index.first_stage(queries, 30), exact, 30, None)


@every_index
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p_q=st.integers(1, 4),
    p_x=st.integers(1, 4),
    d=st.integers(1, 12),
    count=st.integers(1, 120),
    k=st.integers(1, 20),
    spread=st.sampled_from([0.0, 0.01, 0.2, 2.0]),
    allowed_share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    mask=st.sampled_from(["none", "shared", "per query"]),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
)
def test_answers_pools_and_certificates_always_hold(
    builder: Builder,
    seed: int,
    p_q: int,
    p_x: int,
    d: int,
    count: int,
    k: int,
    spread: float,
    allowed_share: float,
    mask: str,
    scale: float,
) -> None:
    rng = np.random.default_rng(seed)
    queries, items = make_queries(rng, 3, p_q, p_x, d), make_items(rng, count, p_q, p_x, d, spread=spread)
    # Some items repeat exactly, some queries lack a component.
    copies = rng.integers(count, size=count // 4)
    items.components[copies] = items.components[0]
    if items.gate is not None:
        items.gate[copies[::2]] = items.gate[0]
    queries.components[0, 0] = 0
    gate = make_pair_gate(rng, p_q * p_x, 6, scale=scale) if p_q * p_x > 1 else None
    shape = (3, count) if mask == "per query" else (count,)
    allowed = None if mask == "none" else rng.random(shape) < allowed_share
    exact = mol_scores_reference(queries, items, gate).numpy()
    error = float(MolScorer(items, gate).error_bounds_float64(queries).max())
    index = builder.build(items, gate)
    answer = index.search(queries, k, allowed)
    check_answer(answer, exact, k, allowed, must_be_exact=builder.exact, float64_error=error)
    check_pool(index.first_stage(queries, k, allowed), exact, k, allowed)


@every_index
@pytest.mark.parametrize(
    ("shape", "filtered"), [(SHAPES[1], "all"), (SHAPES[1], "shared"), *((shape, "own") for shape in SHAPES)], ids=str
)
def test_an_answer_does_not_depend_on_who_else_is_in_the_batch(
    builder: Builder, shape: tuple[int, ...], filtered: str
) -> None:
    """Bit for bit on the CPU; a device's matrix products add up by the batch's shape, float64 alike."""
    _, p_q, p_x, d = shape
    rng = np.random.default_rng([p_q, p_x, d])
    num_items, num_queries = 600, 17
    items, queries = make_items(rng, num_items, p_q, p_x, d), make_queries(rng, num_queries, p_q, p_x, d)
    index = builder.build(items, make_pair_gate(rng, p_q * p_x, 8) if items.gate is not None else None)
    # Filters from strict to lax, so that some queries must look deeper than others.
    masks = {"shared": rng.random(num_items) < 0.5, "own": rng.random((num_queries, num_items)) < rng.random((17, 1))}
    allowed = masks.get(filtered)
    if builder.name.startswith("mutable_moving_") and not builder.exact:
        pytest.skip("a heuristic's pool depends on what lies in its delta, which changes between the searches")
    on_device = "device_" in builder.name
    for k in (10, 100):
        answers, pools = index.search(queries, k, allowed), index.first_stage(queries, k, allowed)
        for query in (0, 8, num_queries - 1):
            alone, its_own = queries.take([query]), allowed[[query]] if filtered == "own" else allowed
            answer, pool = index.search(alone, k, its_own), index.first_stage(alone, k, its_own)
            assert np.array_equal(answer.item_indices[0], answers.item_indices[query])
            if on_device:
                np.testing.assert_allclose(answer.scores[0], answers.scores[query], rtol=1e-12)
                assert answer.certificates[0].kind == answers.certificates[query].kind
                continue
            assert answer.scores[0].tobytes() == answers.scores[query].tobytes()
            assert answer.certificates[0] == answers.certificates[query]
            assert np.array_equal(pool.item_indices[0], pools.item_indices[query])
            assert pool.scores[0].tobytes() == pools.scores[query].tobytes()
            assert pool.bounds[0].tobytes() == pools.bounds[query].tobytes()


@every_index
def test_no_queries_make_no_answers(builder: Builder) -> None:
    rng = np.random.default_rng(11)
    index = builder.build(make_items(rng, 50, 4, 2, 8), make_pair_gate(rng, 8, 4))
    answer = index.search(make_queries(rng, 0, 4, 2, 8), 10)
    assert answer.item_indices.shape == (0, 10)
    assert answer.certificates == ()


@every_index
def test_a_search_that_makes_no_sense_is_refused_by_name(builder: Builder) -> None:
    rng = np.random.default_rng(12)
    index = builder.build(make_items(rng, 50, 4, 2, 8), make_pair_gate(rng, 8, 4))
    right, wide, few = (make_queries(rng, 1, p_q, 2, width) for p_q, width in ((4, 8), (4, 9), (3, 8)))
    for message, queries, k, allowed in (
        ("k=0 allowed: at least 1", right, 0, None),
        ("k=-3 allowed: at least 1", right, -3, None),
        ("query components have width 9 but item components have width 8", wide, 5, None),
        ("3 query components x 2 item components make 6 pairs", few, 5, None),
        (r"allowed has shape \(49,\); expected \(50,\) or \(1, 50\)", right, 5, np.ones(49, dtype=bool)),
        ("allowed has dtype float64; expected bool", right, 5, np.ones(50)),
    ):
        for call in (index.search, index.first_stage):
            with pytest.raises(ValueError, match=message):
                call(queries, k, allowed)


@every_index
def test_an_empty_index_is_refused(builder: Builder) -> None:
    rng = np.random.default_rng(13)
    with pytest.raises(ValueError, match="index is empty"):
        builder.build(make_items(rng, 0, 4, 2, 8), make_pair_gate(rng, 8, 4))


@every_index
def test_an_index_counts_its_items_and_their_bytes(builder: Builder) -> None:
    rng = np.random.default_rng(15)
    items = make_items(rng, 50, 4, 2, 8)
    index = builder.build(items, make_pair_gate(rng, 8, 4))
    assert index.num_items == 50
    assert index.nbytes >= 50 * items.bytes_per_item
    assert index.name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_states_are_refused(bad: float) -> None:
    components = np.full((2, 1, 4), bad, dtype=np.float32)
    with pytest.raises(ValueError, match="NaN or infinite"):
        QueryStates(components=components)
    with pytest.raises(ValueError, match="NaN or infinite"):
        ItemStates(components=components)
