"""A tangent has the mixture's own value and slope at a point, and several order the best items better than averages."""

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.quantized.tangents import QuantizedTangents, Slopes
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates

SHAPES = [(1, 1, 6), (2, 3, 5), (4, 2, 8)]


def scene(shape: tuple[int, int, int], gates: str, count: int = 40) -> tuple[ItemStates, QueryStates, PairGate | None]:
    p_q, p_x, d = shape
    rng = np.random.default_rng([p_q, p_x, d])
    items, queries = make_items(rng, count, p_q, p_x, d), make_queries(rng, 1, p_q, p_x, d)
    network = make_pair_gate(rng, p_q * p_x, 16) if p_q * p_x > 1 and gates != "items alone" else None
    if gates == "network alone":
        items, queries = ItemStates(components=items.components), QueryStates(components=queries.components)
    return items, queries, network


def moved_by(items: ItemStates, size: float, rng: np.random.Generator) -> ItemStates:
    """Each item a random step away, in float32 as items are."""

    def step(values: np.ndarray) -> np.ndarray:
        return (values + size * rng.normal(size=values.shape)).astype(np.float32)

    return ItemStates(components=step(items.components), gate=None if items.gate is None else step(items.gate))


@pytest.mark.parametrize("gates", ["both", "items alone", "network alone"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tangent_has_the_mixtures_value_and_slope_where_it_touches(shape: tuple[int, int, int], gates: str) -> None:
    """At one item, and one thousandth of a step from it in every coordinate: off by the square of the step."""
    items, queries, network = scene(shape, gates)
    rng = np.random.default_rng(5)
    slopes = Slopes(MolScorer(items, network))
    for row in range(6):
        vectors, heights = slopes.at(queries, np.array([row]))
        assert vectors.shape == (1, slopes.width)
        steps = []
        for size in (0.0, 1e-3):
            near = moved_by(items.take([row] * 32), size, rng)
            moved = np.empty((32, slopes.width), dtype=np.float32)
            slopes.write(near, moved)
            exact = mol_scores_reference(queries, near, network).numpy()[0]
            steps.append(np.abs(moved.astype(np.float64) @ vectors[0] + heights[0] - exact).max())
        assert steps[0] < 1e-6
        assert steps[1] < 2e-5


def test_tangents_find_what_averages_miss() -> None:
    """Items that are alike for the best query component and whose others are anything: the mixture's own ground."""
    rng = np.random.default_rng(3)
    count = 20_000
    items, queries = make_items(rng, count, 4, 2, 16), make_queries(rng, 24, 4, 2, 16)
    network = make_pair_gate(rng, 8, 32)
    scorer = MolScorer(items, network)
    wanted = BruteForce(scorer).search(queries, 50).item_indices
    found = [kind(scorer, pool_size=1_000).search(queries, 50).item_indices for kind in (QuantizedTangents, TopKAvg)]
    tangents, averages = (
        np.mean([len(set(row) & set(best)) / 50 for row, best in zip(rows, wanted, strict=True)]) for rows in found
    )
    assert tangents > 0.97
    assert tangents > averages + 0.1


def test_a_filter_and_a_deep_answer_are_filled() -> None:
    rng = np.random.default_rng(4)
    items, queries, network = make_items(rng, 500, 4, 2, 8), make_queries(rng, 3, 4, 2, 8), make_pair_gate(rng, 8, 16)
    index = QuantizedTangents(MolScorer(items, network), pool_size=8)
    allowed = rng.random(500) < 0.2
    answer = index.search(queries, 60, allowed)
    assert (answer.item_indices >= 0).all()
    assert allowed[answer.item_indices].all()
    assert [one.kind for one in index.search(queries, 500).certificates] == ["exact"] * 3
