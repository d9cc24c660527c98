"""What the pool heuristics promise beyond conformance: their bounds, and the papers' bounds that are none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_scene import make_items, make_pair_gate, make_queries, unit

from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.passes import Lists, Request
from services.algorithms.indexes.pools import PooledIndex
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates


def pair_cosines(queries: QueryStates, items: ItemStates) -> np.ndarray:
    """Cosines (B, X, P) in float64."""
    found = np.einsum("bqd,xpd->bxqp", queries.components.astype(float), items.components.astype(float))
    return found.reshape(*found.shape[:2], -1)


def trained_like(seed: int, *, count: int = 3000, num_queries: int = 40) -> tuple[ItemStates, QueryStates, PairGate]:
    """Items whose components are views of one latent vector, queries near some of them, gates that matter a little."""
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(count, 16)) * np.linspace(2, 0.3, 16)
    views = [np.eye(16) + 0.5 * rng.normal(size=(16, 16)) / 4 for _ in range(5)]
    components = np.stack([latent @ views[0], latent @ views[1]], axis=1)
    wanted = latent[rng.integers(count, size=num_queries)] + 0.7 * rng.normal(size=(num_queries, 16))
    asked = np.stack([wanted @ views[2], wanted @ views[3], wanted @ views[4]], axis=1)
    items = ItemStates(components=unit(components), gate=0.7 * rng.normal(size=(count, 6)).astype(np.float32))
    queries = QueryStates(components=unit(asked), gate=rng.normal(size=(num_queries, 6)).astype(np.float32))
    return items, queries, make_pair_gate(rng, 6, 8, scale=0.3)


# Two components on each side, orthogonal between the first and the second; N = 1. The gates read the item's part only:
# items 0 and 1 lead the pairs (0, 0) and (1, 1), items 2 and 3 come second there and put their weight on the other,
# empty pair; item 4 is third in both and puts its weight on the pair in which its cosine is .8.
def counterexample() -> tuple[ItemStates, QueryStates]:
    def item(first: float, second: float) -> list[list[float]]:
        return [[first, 0, (1 - first**2) ** 0.5, 0], [0, second, 0, (1 - second**2) ** 0.5]]

    components = np.array([item(1, 0), item(0, 1), item(0.9, 0), item(0, 0.9), item(0.8, 0)], dtype=np.float32)
    # Pairs (0, 0), (0, 1), (1, 0), (1, 1); SiLU(30) = 30 against 0 makes a weight of 1.
    gate = np.array(
        [[0, 30, 0, 0], [0, 30, 0, 0], [0, 30, 0, 0], [0, 30, 0, 0], [30, 0, 0, 0]],
        dtype=np.float32,
    )
    queries = QueryStates(
        components=np.array([[[1, 0, 0, 0], [0, 1, 0, 0]]], dtype=np.float32), gate=np.ones((1, 4), dtype=np.float32)
    )
    return ItemStates(components=components, gate=gate), queries


def test_theorem_2_as_printed_is_no_bound() -> None:
    # "S = max phi(q, x) over the (N+1)-th item of each pair bounds what was left out": those two score 0, item 4 .8.
    items, queries = counterexample()
    scores = mol_scores_reference(queries, items, None).numpy()[0]
    cosines = pair_cosines(queries, items)[0]
    order = np.argsort(-cosines, axis=0, kind="stable")
    pool = set(order[0].tolist())
    printed = max(scores[order[1, pair]] for pair in range(4))
    left_out = max(scores[item] for item in range(5) if item not in pool)
    assert printed < 1e-6
    assert left_out == pytest.approx(0.8)
    # Worse, the printed theorem calls this answer exact: its S' is not above the best of the pool.
    assert printed <= max(scores[list(pool)])
    index = TopKPerEmbedding(MolScorer(items, None), pool_size=1)
    answer = index.search(queries, 1)
    assert answer.item_indices[0, 0] != 4
    assert answer.certificates[0].gap is not None
    assert answer.scores[0, 0] + answer.certificates[0].gap >= 0.8


def test_the_bound_of_the_lists_is_the_largest_threshold_where_gates_are_free() -> None:
    items, queries = counterexample()
    index = TopKPerEmbedding(MolScorer(items, None), pool_size=1)
    assert index.search(queries, 1).certificates[0].gap == pytest.approx(0.9, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p_q=st.integers(1, 4),
    p_x=st.integers(1, 3),
    size=st.integers(1, 30),
    spread=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    apart=st.sampled_from([0.0, 0.1, 3.0]),
    length=st.sampled_from([0.1, 1.0, 30.0]),
    share=st.sampled_from([0.1, 0.6, 1.0]),
    known=st.booleans(),
)
def test_no_left_out_item_reaches_above_the_average_scans_bound(
    seed: int, p_q: int, p_x: int, size: int, spread: float, apart: float, length: float, share: float, known: bool
) -> None:
    rng = np.random.default_rng(seed)
    items = make_items(rng, 90, p_q, p_x, 6, spread=spread)
    items = replace(items, components=(length * items.components).astype(np.float32))
    centre = rng.normal(size=(4, 1, 6))
    components = unit(centre + apart * rng.normal(size=(4, p_q, 6)))
    components[0, 0] = 0
    queries = QueryStates(components=components, gate=make_queries(rng, 4, p_q, p_x, 6).gate)
    cosines = pair_cosines(queries, items)
    allowed = rng.random((4, 90)) < share
    index = TopKAvg(MolScorer(items, make_pair_gate(rng, p_q * p_x, 4) if p_q * p_x > 1 else None), pool_size=size)
    depths = (size,)
    scan = index.passes.run(
        queries,
        allowed,
        None,
        lambda request: index.lists(request, depths),
        lambda request, lists: index.scanned(request, lists, depths),
    )
    kth_scores = rng.uniform(-length, length, size=4) if known else None
    bounds = scan.bounds(kth_scores)
    for query in range(4):
        left_out = allowed[query].copy()
        left_out[scan.pool(query)] = False
        if not left_out.any():
            assert bounds[query] == -np.inf
        elif not np.isnan(bounds[query]):
            # The bound covers every single cosine, hence every mixture of them.
            assert cosines[query][left_out].max() <= bounds[query]


@pytest.mark.parametrize("k", [5, 12, 40])
def test_an_average_list_of_all_allowed_items_proves_the_union(k: int) -> None:
    # 12 allowed items: the 20 best by the average are all of them, the 2 best of each pair are not.
    rng = np.random.default_rng(6)
    items, queries = make_items(rng, 90, 2, 2, 8), make_queries(rng, 6, 2, 2, 8)
    allowed = np.arange(90) % 7 == 1
    allowed[-7:] = False
    index = CombinedTopK(MolScorer(items, make_pair_gate(rng, 4, 8)), pair_pool_size=2, average_pool_size=20)
    assert {found.kind for found in index.search(queries, k, allowed).certificates} == {"exact"}


def test_equal_components_on_the_query_side_need_no_second_scan() -> None:
    # One query component and close item components: the best average left out is all there is to know.
    rng = np.random.default_rng(7)
    items, queries = make_items(rng, 500, 1, 4, 16, spread=0.001), make_queries(rng, 20, 1, 4, 16)
    index = TopKAvg(MolScorer(items, make_pair_gate(rng, 4, 8)), pool_size=100)
    answer = index.search(queries, 5)
    assert {found.kind for found in answer.certificates} == {"exact"}


def test_query_components_that_differ_are_proven_by_the_scan_of_reaches() -> None:
    rng = np.random.default_rng(8)
    items = make_items(rng, 800, 4, 3, 16, spread=0.001)
    queries = QueryStates(
        components=unit(items.components[:20, :1] + 0.05 * rng.normal(size=(20, 4, 16))),
        gate=rng.normal(size=(20, 12)).astype(np.float32),
    )
    answer = TopKAvg(MolScorer(items, make_pair_gate(rng, 12, 8)), pool_size=200).search(queries, 1)
    assert {found.kind for found in answer.certificates} == {"exact"}


def test_distant_components_make_the_average_an_estimate_and_it_says_so() -> None:
    rng = np.random.default_rng(9)
    items = ItemStates(
        components=unit(rng.normal(size=(500, 4, 16))), gate=rng.normal(size=(500, 16)).astype(np.float32)
    )
    answer = TopKAvg(MolScorer(items, make_pair_gate(rng, 16, 8)), pool_size=100).search(
        make_queries(rng, 20, 4, 4, 16), 5
    )
    assert {found.kind for found in answer.certificates} == {"estimate"}
    assert answer.certificates[0].gap is None


def test_a_union_smaller_than_k_is_deepened_until_it_has_k() -> None:
    items, queries, gate = trained_like(1)
    answer = TopKPerEmbedding(MolScorer(items, gate), pool_size=1).search(queries, 40)
    assert (answer.item_indices >= 0).all()


def pools_and_bounds(index: PooledIndex, queries: QueryStates) -> tuple[list[np.ndarray], np.ndarray]:
    depths = index.depths(1)

    def steps(request: Request) -> tuple[tuple[Lists, ...], Any]:
        lists = index.lists(request, depths)
        return lists, index.passes.pool(request, index.listed(lists, depths))

    def then(request: Request, found: tuple[tuple[Lists, ...], Any]) -> tuple[list[np.ndarray], np.ndarray]:
        return found[1], index.scanned(request, found[0], depths).bounds()

    return index.passes.run(queries, None, None, steps, then)


def test_the_combined_pool_holds_both_pools_and_proves_as_much_as_the_lists() -> None:
    items, queries, gate = trained_like(2)
    scorer = MolScorer(items, gate)
    combined, bounds = pools_and_bounds(CombinedTopK(scorer, pair_pool_size=20, average_pool_size=60), queries)
    average, _ = pools_and_bounds(TopKAvg(scorer, pool_size=60), queries)
    pairs, pair_bounds = pools_and_bounds(TopKPerEmbedding(scorer, pool_size=20), queries)
    for both, one, other in zip(combined, average, pairs, strict=True):
        np.testing.assert_array_equal(both, np.union1d(one, other))
    np.testing.assert_array_equal(bounds, pair_bounds)


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_a_first_stage_has_as_many_items_as_were_asked_for(size: int) -> None:
    items, queries, gate = trained_like(3, count=400, num_queries=10)
    scorer = MolScorer(items, gate)
    exact = mol_scores_reference(queries, items, gate).numpy()
    for index in (
        TopKAvg(scorer, pool_size=5),
        TopKPerEmbedding(scorer, pool_size=5),
        CombinedTopK(scorer, pair_pool_size=5, average_pool_size=5),
    ):
        pool = index.first_stage(queries, size)
        assert (pool.item_indices >= 0).all()
        assert pool.item_indices.shape == (10, size)
        for query in range(10):
            left_out = np.delete(exact[query], pool.item_indices[query])
            bound = pool.bound(query)
            assert bound is None or left_out.max() <= bound


def test_pool_sizes_below_1_are_refused_by_name() -> None:
    items, _, gate = trained_like(11, count=20, num_queries=1)
    with pytest.raises(ValueError, match="pool_size=0 allowed: at least 1"):
        TopKAvg(MolScorer(items, gate), pool_size=0)
    with pytest.raises(ValueError, match="pool_size=-2 allowed: at least 1"):
        TopKPerEmbedding(MolScorer(items, gate), pool_size=-2)
    with pytest.raises(ValueError, match="pair_pool_size=0 allowed: at least 1"):
        CombinedTopK(MolScorer(items, gate), pair_pool_size=0, average_pool_size=1)
    with pytest.raises(ValueError, match="average_pool_size=0 allowed: at least 1"):
        CombinedTopK(MolScorer(items, gate), pair_pool_size=1, average_pool_size=0)
