"""On a card, at the papers' shapes: kernels enclose float64, every proof is right, graphs answer as plain calls do."""

import numpy as np
import pytest
import torch

from services.algorithms.indexes.gpu.index import DeviceBruteForce, DeviceIndex, DeviceTopKAvg, DeviceTopKPerEmbedding
from services.algorithms.indexes.protocol import take_queries
from services.algorithms.ops.grouped_top_k.device import best_of_groups
from services.algorithms.ops.mol_scores.device import DeviceScorer, Precision
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import SHAPES, Scene

_SCENES: dict[tuple[str, int], Scene] = {}


def scene_at(name: str, num_items: int) -> Scene:
    if (name, num_items) not in _SCENES:
        _SCENES.clear()
        _SCENES[name, num_items] = generate(SHAPES[name], num_items=num_items, num_queries=32, seed=0)
    return _SCENES[name, num_items]


SIZES = [("ml-1m", 3_706), ("ml-20m", 24_186), ("nq320k", 20_001), ("books", 674_044)]


@pytest.mark.parametrize(("name", "num_items"), SIZES)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_kernels_bounds_enclose_float64(name: str, num_items: int, precision: Precision) -> None:
    scene = scene_at(name, num_items)
    scorer = DeviceScorer(scene.items, scene.pair_gate, device=torch.device("cuda"), precision=precision)
    prepared = scorer.prepare(take_queries(scene.queries, 0, 8))
    assert prepared.fused
    upper, lower = scorer.bounds(prepared)
    rows = torch.randint(num_items, (8, 20_000), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    exact = scorer.scores_float64(prepared, rows)
    assert bool((lower.gather(1, rows) <= exact).all())
    assert bool((exact <= upper.gather(1, rows)).all())
    middle = (upper.double() + lower.double()).gather(1, rows) / 2
    assert float((middle - exact).abs().max()) < {"float16": 1e-3, "bfloat16": 8e-3}[precision]
    of_rows = scorer.bounds(prepared, rows=rows)
    assert torch.allclose(of_rows[0], upper.gather(1, rows), rtol=0, atol=1e-5)
    best = scorer.bounds(prepared, grouped=True)[1]
    padded = torch.nn.functional.pad(lower, (0, -num_items % 64), value=-torch.inf)
    assert torch.equal(best, padded.view(8, -1, 64).amax(dim=2))


@pytest.mark.parametrize(("name", "num_items"), SIZES)
def test_brute_force_is_exact_and_graphs_answer_the_same(name: str, num_items: int) -> None:
    scene = scene_at(name, num_items)
    plain = DeviceScorer(scene.items, scene.pair_gate, device=torch.device("cuda"), kernels=False)
    wanted = DeviceBruteForce(plain, max_graphs=0).search(scene.queries, 100)
    del plain
    fused = DeviceScorer(scene.items, scene.pair_gate, device=torch.device("cuda"))
    indexes: list[DeviceIndex] = [DeviceBruteForce(fused), DeviceBruteForce(fused, max_graphs=0)]
    for index in indexes:
        # A graph is captured the second time and replayed from the third on, with other queries in between.
        for size in (32, 1, 32, 1, 1, 32):
            for start in range(0, 32, 8 if size == 1 else 32):
                answer = index.search(take_queries(scene.queries, start, start + size), 100)
                assert np.array_equal(answer.item_indices, wanted.item_indices[start : start + size])
                assert np.abs(answer.scores - wanted.scores[start : start + size]).max() < 1e-12
                assert {found.kind for found in answer.certificates} == {"exact"}


def test_heuristics_certify_the_truth_at_the_books_shape() -> None:
    scene = scene_at("books", 674_044)
    scorer = DeviceScorer(scene.items, scene.pair_gate, device=torch.device("cuda"))
    exact = DeviceBruteForce(scorer).search(scene.queries, 100)
    allowed = np.random.default_rng(0).random(674_044) < 0.5
    filtered = DeviceBruteForce(scorer).search(scene.queries, 100, allowed)
    for index in (DeviceTopKAvg(scorer, pool_size=4000), DeviceTopKPerEmbedding(scorer, pool_size=100)):
        for mask, wanted in ((None, exact), (allowed, filtered), (None, exact), (None, exact)):
            answer = index.search(scene.queries, 100, mask)
            assert mask is None or mask[answer.item_indices].all()
            found = [len(np.intersect1d(a, b)) for a, b in zip(answer.item_indices, wanted.item_indices, strict=True)]
            assert np.mean(found) > 80
            for query, certificate in enumerate(answer.certificates):
                missing = np.setdiff1d(wanted.item_indices[query], answer.item_indices[query])
                if certificate.gap is not None and len(missing):
                    best = wanted.scores[query][np.isin(wanted.item_indices[query], missing)].max()
                    assert best <= answer.scores[query][-1] + certificate.gap


@pytest.mark.parametrize(
    "shape", [(32, 8, 674_044, 8, 32, 100), (32, 1, 674_044, 1, 32, 4000), (3, 2, 50_001, 3, 768, 9)]
)
def test_grouped_best_are_those_of_the_plain_path(shape: tuple[int, ...]) -> None:
    num_queries, vectors, count, groups, width, size = shape
    generator = torch.Generator("cuda").manual_seed(1)
    # Integers: dot products are exact in half precision, so that both paths have the very same scores; wide enough a
    # range that few of the best are equal, so that no list may overflow.
    items = torch.randint(-64, 65, (count, groups, width), device="cuda", generator=generator).half()
    queries = torch.randint(-2, 3, (num_queries, vectors, width), device="cuda", generator=generator).half()
    queries[..., width // 2 :] *= 0.125
    ranks = torch.randperm(count, device="cuda", generator=generator)
    found, wanted = (
        best_of_groups(items, queries, ranks, torch.argsort(ranks), size, None, fused=True, plain=plain)
        for plain in (False, True)
    )
    assert not bool(found.overflowed)
    assert torch.equal(found.rows, wanted.rows)
    assert torch.equal(found.scores, wanted.scores)
    assert torch.equal(found.following, wanted.following)
