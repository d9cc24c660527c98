"""Quantized over dot products and under Mixtures of Logits: recall, filters, certificates and what is refused.

The conformance suite holds for all of these too; here are the claims that only quantized indexes make.
"""

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.quantized.dot_products import Quantized
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import Cells, CellScan, Visit
from services.algorithms.scoring.states import ItemStates, QueryStates

COUNT, WIDTH = 4_000, 24


def clumps(seed: int, count: int) -> np.ndarray:
    """Vectors of norms 0.5 to 2 around 30 centres that all seeds share."""
    centres = np.random.default_rng(99).normal(size=(30, WIDTH))
    rng = np.random.default_rng(seed)
    vectors = centres[rng.integers(30, size=count)] + 0.5 * rng.normal(size=(count, WIDTH))
    return (vectors * rng.uniform(0.1, 0.4, size=(count, 1))).astype(np.float32)


ITEMS = ItemStates(components=clumps(0, COUNT)[:, None])
SCORER = MolScorer(ITEMS, None)
QUERIES = QueryStates(components=clumps(1, 40)[:, None])
EXACT = QUERIES.components[:, 0].astype(np.float64) @ ITEMS.components[:, 0].T.astype(np.float64)
VECTORS = ITEMS.components[:, 0]
CELLS = {bits: CellScan(Cells(num_cells=60, bits=bits).coded(VECTORS, seed=0), vectors=VECTORS) for bits in (4, 8)}


def recall(found: np.ndarray, k: int) -> float:
    wanted = np.argsort(-EXACT, axis=1)[:, :k]
    return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(found.tolist(), wanted.tolist(), strict=True)]))


@pytest.mark.parametrize("bits", [4, 8])
def test_without_a_visit_the_answer_is_proven_exact(bits: int) -> None:
    answer = Quantized(SCORER, cells=CELLS[bits]).search(QUERIES, 50)
    wanted = BruteForce(SCORER).search(QUERIES, 50)
    assert answer.item_indices.tolist() == wanted.item_indices.tolist()
    assert {found.kind for found in answer.certificates} == {"exact"}


def test_proving_leaves_cells_and_almost_all_products_out() -> None:
    answer = CELLS[8].proven(QUERIES.components[:, 0], 20)
    assert answer.touched[:, 0].mean() < 0.8 * COUNT
    assert answer.touched[:, 1].mean() < 100


@pytest.mark.parametrize("bits", [4, 8])
def test_a_third_of_the_cells_holds_nearly_all_of_the_best(bits: int) -> None:
    index = Quantized(SCORER, pool_size=200, visit=Visit(probes=20), cells=CELLS[bits])
    answer = index.search(QUERIES, 50)
    assert recall(answer.item_indices, 50) > 0.98
    assert answer.passes[0].touched.mean() < 0.6 * COUNT


def test_certificates_say_how_far_off_an_answer_can_be() -> None:
    answer = Quantized(SCORER, pool_size=60, visit=Visit(probes=15), cells=CELLS[8]).search(QUERIES, 50)
    kinds = {found.kind for found in answer.certificates}
    assert "bounded" in kinds
    for query, certificate in enumerate(answer.certificates):
        left_out = np.delete(EXACT[query], answer.item_indices[query])
        if certificate.gap is not None:
            assert left_out.max() <= answer.scores[query, -1] + certificate.gap


@pytest.mark.parametrize("share", [0.5, 0.02, 0.004])
@pytest.mark.parametrize("visit", [None, Visit(probes=12), Visit(probes=60, reach=1.0)], ids=str)
def test_a_filter_acts_inside_the_scan_and_starves_no_answer(share: float, visit: Visit | None) -> None:
    allowed = np.random.default_rng(2).random((len(QUERIES), COUNT)) < share
    answer = Quantized(SCORER, pool_size=40, visit=visit, cells=CELLS[8]).search(QUERIES, 10, allowed)
    assert (answer.item_indices >= 0).sum(axis=1).tolist() == np.minimum(10, allowed.sum(axis=1)).tolist()
    for query, rows in enumerate(answer.item_indices):
        assert allowed[query][rows[rows >= 0]].all()
    if visit is None:
        assert answer.item_indices.tolist() == BruteForce(SCORER).search(QUERIES, 10, allowed).item_indices.tolist()


def test_more_than_one_pair_and_foreign_cells_are_refused_by_name() -> None:
    rng = np.random.default_rng(9)
    with pytest.raises(ValueError, match="items make 8 pairs; allowed: 1, a plain dot product"):
        Quantized(MolScorer(make_items(rng, 50, 4, 2, 8), make_pair_gate(rng, 8, 4)))
    with pytest.raises(ValueError, match="cells hold 4000 items; the index has 9"):
        Quantized(MolScorer(ITEMS.take(slice(9)), None), cells=CELLS[8])
    with pytest.raises(ValueError, match="pool_size=0 allowed: at least 1"):
        Quantized(SCORER, pool_size=0, cells=CELLS[8])
