"""Every index, on catalogues whose answer is known by construction and on random ones against float64."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_scene import make_items, make_pair_gate, make_queries, unit

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.protocol import Index, TopK
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.states import ItemStates, PairGate, QueryStates

Build = Callable[..., Index]


def brute_force(items: ItemStates, gate: PairGate | None, **options: object) -> Index:
    return BruteForce(items, gate, **options)  # type: ignore[arg-type]


def whole_pool(items: ItemStates, gate: PairGate | None, **options: object) -> Index:
    """TopKAvg whose pool is the catalogue: must be exact, too."""
    return TopKAvg(items, gate, pool_size=len(items) + 1, **options)  # type: ignore[arg-type]


def small_pool(items: ItemStates, gate: PairGate | None, **options: object) -> Index:
    return TopKAvg(items, gate, pool_size=8, **options)  # type: ignore[arg-type]


EXACT_BUILDS = [brute_force, whole_pool]
ALL_BUILDS = [*EXACT_BUILDS, small_pool]


def check_against_float64(answer: TopK, exact: np.ndarray, k: int, allowed: np.ndarray, *, must_be_exact: bool) -> None:
    """Certificates hold; an exact answer has the oracle's scores; nothing disallowed, nothing twice, descending."""
    for query, certificate in enumerate(answer.certificates):
        mask = allowed if allowed.ndim == 1 else allowed[query]
        rows = answer.item_indices[query][answer.item_indices[query] >= 0]
        scores = answer.scores[query][: len(rows)]
        wanted = np.sort(exact[query][mask])[::-1][:k]
        assert len(rows) == len(wanted) == min(k, int(mask.sum()))
        assert len(set(rows.tolist())) == len(rows)
        assert mask[rows].all()
        assert (np.diff(scores) <= 0).all()
        assert np.abs(scores - exact[query][rows]).max(initial=0) < 1e-10
        assert (answer.scores[query][len(rows) :] == -np.inf).all()
        if must_be_exact:
            assert certificate.kind == "exact"
        if certificate.kind == "exact":
            assert np.abs(scores - wanted).max(initial=0) < 1e-10
        elif certificate.gap is not None:
            left_out = mask.copy()
            left_out[rows] = False
            assert exact[query][left_out].max() <= scores[-1] + certificate.gap + 1e-12


@pytest.mark.parametrize("build", ALL_BUILDS)
def test_the_item_that_equals_the_query_comes_first(build: Build) -> None:
    # Orthogonal items with equal components: item 3 is the query, every other item scores 0.
    items = ItemStates(components=np.repeat(np.eye(6, dtype=np.float32)[:, None, :], 2, axis=1))
    gate = make_pair_gate(np.random.default_rng(0), 4, 3)
    queries = QueryStates(components=np.repeat(np.eye(6, dtype=np.float32)[[3]][:, None, :], 2, axis=1))
    answer = build(items, gate).search(queries, 2)
    assert answer.item_indices[0].tolist() == [3, 0]
    assert answer.scores[0] == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("build", ALL_BUILDS)
def test_dot_products_in_a_known_order(build: Build) -> None:
    angles = np.linspace(0, np.pi, 9)
    items = ItemStates(components=np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)[:, None, :])
    queries = QueryStates(components=np.array([[[1.0, 0.0]], [[-1.0, 0.0]]], dtype=np.float32))
    answer = build(items, None).search(queries, 3)
    assert answer.item_indices.tolist() == [[0, 1, 2], [8, 7, 6]]
    assert [found.kind for found in answer.certificates] == ["exact", "exact"]


@pytest.mark.parametrize("build", ALL_BUILDS)
def test_equal_items_come_in_order_of_their_ids(build: Build) -> None:
    rng = np.random.default_rng(1)
    few = make_items(rng, 3, 4, 2, 8)
    copies = np.repeat(np.arange(3), 5)
    rng.shuffle(copies)
    items = ItemStates(components=few.components[copies], gate=few.gate[copies])
    ranks = rng.permutation(15)
    queries = make_queries(rng, 3, 4, 2, 8)
    gate = make_pair_gate(rng, 8, 16)
    answer = build(items, gate, tie_ranks=ranks).search(queries, 15)
    exact = mol_scores_reference(queries, few, gate).numpy()
    for query in range(3):
        found = answer.item_indices[query]
        best_first = [copy for kind in np.argsort(-exact[query]) for copy in [kind] * 5]
        wanted = sorted(range(15), key=lambda row: (best_first.index(copies[row]), ranks[row]))
        if build is small_pool:
            continue  # its pool of 15 = k is the whole catalogue as well, but only the order below is promised
        assert found.tolist() == wanted


@pytest.mark.parametrize("build", EXACT_BUILDS)
def test_a_tie_at_the_kth_place_goes_to_the_smaller_id(build: Build) -> None:
    items = ItemStates(components=np.tile(np.array([[[1.0, 0.0]]], dtype=np.float32), (100, 1, 1)))
    ranks = np.arange(100)[::-1].copy()
    queries = QueryStates(components=np.array([[[1.0, 0.0]]], dtype=np.float32))
    answer = build(items, None, tie_ranks=ranks).search(queries, 4)
    assert answer.item_indices[0].tolist() == [99, 98, 97, 96]


@pytest.mark.parametrize("build", ALL_BUILDS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (3, 4, 2, 8), (2, 2, 3, 5), (4, 8, 4, 16)])
@pytest.mark.parametrize("k", [1, 10, 400, 10**6])
def test_random_catalogues_against_float64(build: Build, shape: tuple[int, ...], k: int) -> None:
    num_queries, p_q, p_x, d = shape
    rng = np.random.default_rng(k)
    queries, items = make_queries(rng, num_queries, p_q, p_x, d), make_items(rng, 300, p_q, p_x, d, spread=0.2)
    gate = make_pair_gate(rng, p_q * p_x, 16) if p_q * p_x > 1 else None
    exact = mol_scores_reference(queries, items, gate).numpy()
    answer = build(items, gate).search(queries, k)
    everything = np.ones(300, dtype=bool)
    check_against_float64(answer, exact, k, everything, must_be_exact=build in EXACT_BUILDS)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p_q=st.integers(1, 4),
    p_x=st.integers(1, 4),
    d=st.integers(1, 12),
    count=st.integers(1, 120),
    k=st.integers(1, 20),
    pool_size=st.integers(1, 40),
    spread=st.sampled_from([0.0, 0.01, 0.2, 2.0]),
    allowed_share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    per_query=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
)
def test_certificates_always_hold(
    seed: int,
    p_q: int,
    p_x: int,
    d: int,
    count: int,
    k: int,
    pool_size: int,
    spread: float,
    allowed_share: float,
    per_query: bool,
    scale: float,
) -> None:
    rng = np.random.default_rng(seed)
    queries, items = make_queries(rng, 3, p_q, p_x, d), make_items(rng, count, p_q, p_x, d, spread=spread)
    # Some items repeat exactly, some queries lack a component.
    items.components[rng.integers(count, size=count // 4)] = items.components[0]
    queries.components[0, 0] = 0
    gate = make_pair_gate(rng, p_q * p_x, 6, scale=scale) if p_q * p_x > 1 else None
    allowed = rng.random((3, count) if per_query else count) < allowed_share
    exact = mol_scores_reference(queries, items, gate).numpy()
    check_against_float64(BruteForce(items, gate).search(queries, k, allowed), exact, k, allowed, must_be_exact=True)
    average = TopKAvg(items, gate, pool_size=pool_size)
    check_against_float64(average.search(queries, k, allowed), exact, k, allowed, must_be_exact=False)
    for index in (BruteForce(items, gate), average):
        pool = index.first_stage(queries, k, allowed)
        for query in range(3):
            mask = (allowed if allowed.ndim == 1 else allowed[query]).copy()
            rows = pool.item_indices[query][pool.item_indices[query] >= 0]
            assert mask[rows].all()
            assert len(rows) == min(k, int(mask.sum()))
            mask[rows] = False
            bound = pool.bound(query)
            if not mask.any():
                assert bound == -np.inf
            elif bound is not None:
                assert exact[query][mask].max() <= bound
            assert bound is not None or index is average


def test_close_components_make_the_average_provably_exact() -> None:
    rng = np.random.default_rng(7)
    queries, items = make_queries(rng, 20, 1, 4, 16), make_items(rng, 500, 1, 4, 16, spread=0.001)
    gate = make_pair_gate(rng, 4, 8)
    answer = TopKAvg(items, gate, pool_size=100).search(queries, 5)
    assert {found.kind for found in answer.certificates} == {"exact"}


def test_distant_components_make_the_average_an_estimate_and_it_says_so() -> None:
    rng = np.random.default_rng(8)
    queries = make_queries(rng, 20, 4, 4, 16)
    items = ItemStates(
        components=unit(rng.normal(size=(500, 4, 16))), gate=rng.normal(size=(500, 16)).astype(np.float32)
    )
    answer = TopKAvg(items, make_pair_gate(rng, 16, 8), pool_size=100).search(queries, 5)
    assert {found.kind for found in answer.certificates} == {"estimate"}
    assert answer.certificates[0].gap is None


@pytest.mark.parametrize("build", ALL_BUILDS)
def test_fewer_allowed_items_than_k_make_a_shorter_answer(build: Build) -> None:
    rng = np.random.default_rng(9)
    index = build(make_items(rng, 50, 4, 2, 8), make_pair_gate(rng, 8, 4))
    allowed = np.zeros(50, dtype=bool)
    allowed[[7, 30]] = True
    answer = index.search(make_queries(rng, 1, 4, 2, 8), 10, allowed)
    assert sorted(answer.item_indices[0][:2].tolist()) == [7, 30]
    assert (answer.item_indices[0][2:] == -1).all()
    assert answer.certificates[0].kind == "exact"


@pytest.mark.parametrize("build", ALL_BUILDS)
def test_all_items_filtered_makes_an_empty_exact_answer(build: Build) -> None:
    rng = np.random.default_rng(10)
    index = build(make_items(rng, 50, 4, 2, 8), make_pair_gate(rng, 8, 4))
    answer = index.search(make_queries(rng, 2, 4, 2, 8), 10, np.zeros((2, 50), dtype=bool))
    assert (answer.item_indices == -1).all()
    assert [found.kind for found in answer.certificates] == ["exact", "exact"]


@pytest.mark.parametrize("build", ALL_BUILDS)
def test_no_queries_make_no_answers(build: Build) -> None:
    rng = np.random.default_rng(11)
    index = build(make_items(rng, 50, 4, 2, 8), make_pair_gate(rng, 8, 4))
    answer = index.search(make_queries(rng, 0, 4, 2, 8), 10)
    assert answer.item_indices.shape == (0, 10)
    assert answer.certificates == ()


@pytest.mark.parametrize("build", ALL_BUILDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k=0 allowed: at least 1"),
        ({"k": -3}, "k=-3 allowed: at least 1"),
        ({"width": 9}, "query components have width 9 but item components have width 8"),
        ({"p_q": 3}, "3 query components x 2 item components make 6 pairs"),
        ({"allowed": np.ones(49, dtype=bool)}, r"allowed has shape \(49,\); expected \(50,\) or \(1, 50\)"),
        ({"allowed": np.ones(50)}, "allowed has dtype float64; expected bool"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused_by_name(build: Build, change: dict, message: str) -> None:
    rng = np.random.default_rng(12)
    index = build(make_items(rng, 50, 4, 2, 8), make_pair_gate(rng, 8, 4))
    queries = make_queries(rng, 1, change.get("p_q", 4), 2, change.get("width", 8))
    for call in (index.search, index.first_stage):
        with pytest.raises(ValueError, match=message):
            call(queries, change.get("k", 5), change.get("allowed"))


@pytest.mark.parametrize("build", ALL_BUILDS)
def test_an_empty_index_is_refused(build: Build) -> None:
    rng = np.random.default_rng(13)
    with pytest.raises(ValueError, match="index is empty"):
        build(make_items(rng, 0, 4, 2, 8), make_pair_gate(rng, 8, 4))


def test_bad_ranks_and_pool_sizes_are_refused() -> None:
    rng = np.random.default_rng(14)
    items, gate = make_items(rng, 5, 4, 2, 8), make_pair_gate(rng, 8, 4)
    with pytest.raises(ValueError, match="5 distinct ranks"):
        BruteForce(items, gate, tie_ranks=np.zeros(5, dtype=np.int64))
    with pytest.raises(ValueError, match="pool_size=0"):
        TopKAvg(items, gate, pool_size=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_states_are_refused(bad: float) -> None:
    components = np.full((2, 1, 4), bad, dtype=np.float32)
    with pytest.raises(ValueError, match="NaN or infinite"):
        QueryStates(components=components)
    with pytest.raises(ValueError, match="NaN or infinite"):
        ItemStates(components=components)
