"""On a card, at the papers' shapes: kernels enclose float64, every proof is right, graphs answer as plain calls do.

`FRESHET_GPU_TESTS_ON=cpu TRITON_INTERPRET=1` tries the tests themselves without a card, at the smallest sizes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.card_passes import CardPasses
from services.algorithms.indexes.protocol import Index, take_queries
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.grouped_top_k.device import best_of_groups
from services.algorithms.ops.mol_scores.device import DeviceScorer, Precision
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import SHAPES, Scene, Shape

DEVICE = torch.device(os.environ.get("FRESHET_GPU_TESTS_ON", "cuda"))
ON_CARD = DEVICE.type == "cuda"
K = 100 if ON_CARD else 10
QUERIES = 32 if ON_CARD else 4
# Sizes that nothing divides, and a pair count that no power of two is near.
ODD = {
    shape.name: shape
    for shape in (
        Shape(
            name="3x5", num_items=0, num_query_components=3, num_item_components=5, component_width=17, gate_hidden=19
        ),
        Shape(
            name="9x2", num_items=0, num_query_components=9, num_item_components=2, component_width=33, gate_hidden=33
        ),
        Shape(
            name="1x4", num_items=0, num_query_components=1, num_item_components=4, component_width=16, gate_hidden=8
        ),
    )
}
_SCENES: dict[tuple[str, int], Scene] = {}


def scene_at(name: str, num_items: int) -> Scene:
    if (name, num_items) not in _SCENES:
        _SCENES.clear()
        shape = {**SHAPES, **ODD}[name]
        count = num_items if ON_CARD else min(num_items, 131)
        _SCENES[name, num_items] = generate(shape, num_items=count, num_queries=QUERIES, seed=0)
    return _SCENES[name, num_items]


def scorer_of(scene: Scene, *, precision: Precision = "float16") -> DeviceScorer:
    return DeviceScorer(scene.items, scene.pair_gate, device=DEVICE, precision=precision, kernels=True)


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is full of NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SIZES = [("ml-1m", 3_706), ("ml-20m", 24_186), ("nq320k", 20_001), ("books", 674_044)]


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(("name", "num_items"), [*SIZES, *((name, size) for name in ODD for size in (1, 20_003))])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_kernels_bounds_enclose_float64(name: str, num_items: int, precision: Precision) -> None:
    scene = scene_at(name, num_items)
    scorer, num_items = scorer_of(scene, precision=precision), len(scene.items)
    prepared = scorer.prepare(take_queries(scene.queries, 0, 8))
    assert prepared.fused
    rows = torch.randint(num_items, (len(prepared), 20_000 if ON_CARD else 100), device=DEVICE)
    with poisoned():
        upper, lower = scorer.bounds(prepared)
        of_rows = scorer.bounds(prepared, rows=rows)
        best = scorer.bounds(prepared, grouped=True)[1]
    assert bool(torch.isfinite(torch.cat([upper, lower, best], dim=1)).all())
    exact = scorer.scores_float64(prepared, rows)
    assert bool((lower.gather(1, rows) <= exact).all())
    assert bool((exact <= upper.gather(1, rows)).all())
    middle = (upper.double() + lower.double()).gather(1, rows) / 2
    assert float((middle - exact).abs().max()) < {"float16": 1e-3, "bfloat16": 8e-3}[precision]
    assert torch.allclose(of_rows[0], upper.gather(1, rows), rtol=0, atol=1e-5)
    padded = torch.nn.functional.pad(lower, (0, -num_items % 64), value=-torch.inf)
    assert torch.equal(best, padded.view(len(prepared), -1, 64).amax(dim=2))


@pytest.mark.parametrize(("name", "num_items"), SIZES)
def test_brute_force_is_exact_and_graphs_answer_the_same(name: str, num_items: int) -> None:
    scene = scene_at(name, num_items)
    plain = DeviceScorer(scene.items, scene.pair_gate, device=DEVICE, kernels=False)
    wanted = BruteForce(CardPasses(plain, max_graphs=0)).search(scene.queries, K)
    del plain
    fused = scorer_of(scene)
    indexes = [BruteForce(CardPasses(fused)), BruteForce(CardPasses(fused, max_graphs=0))]
    for index in indexes:
        # A graph is captured the second time and replayed from the third on, with other queries in between.
        for size in (QUERIES, 1, QUERIES, 1, 1, QUERIES):
            for start in range(0, QUERIES, 8 if size == 1 else QUERIES):
                answer = index.search(take_queries(scene.queries, start, start + size), K)
                assert np.array_equal(answer.item_indices, wanted.item_indices[start : start + size])
                assert np.abs(answer.scores - wanted.scores[start : start + size]).max() < 1e-12
                assert {found.kind for found in answer.certificates} == {"exact"}


def broken(scorer: DeviceScorer, index: Index, scene: Scene, start: int, allowed: np.ndarray | None) -> int:
    """Answers whose certificate float64 contradicts: something left out is above the K-th score and the gap."""
    group = take_queries(scene.queries, start, start + 250)
    answer = index.search(group, K, allowed)
    every = torch.arange(scorer.num_items, device=DEVICE).expand(len(group), -1)
    exact = scorer.scores_float64(scorer.prepare(group), every)
    if allowed is not None:
        exact[:, torch.from_numpy(~allowed).to(DEVICE)] = -torch.inf
    rows = torch.from_numpy(answer.item_indices).to(DEVICE)
    assert float((exact.gather(1, rows) - torch.from_numpy(answer.scores).to(DEVICE)).abs().max()) < 1e-9
    left_out = exact.scatter(1, rows, -torch.inf).amax(dim=1).cpu().numpy()
    gaps = np.array([np.inf if one.gap is None else one.gap for one in answer.certificates])
    return int((left_out > answer.scores[:, -1] + gaps + 1e-9).sum())


@pytest.mark.parametrize(("name", "count"), [("ml-1m", 10_000), ("books", 250)])
def test_no_certificate_is_broken_in_10_000_queries(name: str, count: int) -> None:
    shape, size = SHAPES[name], None if ON_CARD else 131
    scene = generate(shape, num_items=size, num_queries=count if ON_CARD else 4, seed=1)
    scorer = scorer_of(scene)
    allowed = np.random.default_rng(0).random(scorer.num_items) < 0.5
    passes = CardPasses(scorer)
    indexes: list[Index] = [
        BruteForce(passes),
        TopKAvg(passes, pool_size=2 * K),
        TopKPerEmbedding(passes, pool_size=K // 5),
    ]
    for index in indexes:
        for start in range(0, len(scene.queries), 250):
            assert broken(scorer, index, scene, start, None) == 0, (index.name, start)
        assert broken(scorer, index, scene, 0, allowed) == 0, index.name


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(
    "shape", [(32, 8, 674_044, 8, 32, 100), (32, 1, 674_044, 1, 32, 4000), (3, 2, 50_001, 3, 768, 9)]
)
def test_grouped_best_are_those_of_the_plain_path(shape: tuple[int, ...]) -> None:
    num_queries, vectors, count, groups, width, size = shape
    count, size = (count, size) if ON_CARD else (700, min(size, 9))
    generator = torch.Generator(DEVICE).manual_seed(1)
    # Integers: dot products are exact in half precision, so that both paths have the very same scores; wide enough a
    # range that few of the best are equal, so that no list may overflow.
    items = torch.randint(-64, 65, (count, groups, width), device=DEVICE, generator=generator).half()
    queries = torch.randint(-2, 3, (num_queries, vectors, width), device=DEVICE, generator=generator).half()
    queries[..., width // 2 :] *= 0.125
    with poisoned():
        found, wanted = (best_of_groups(items, queries, size, None, fused=True, plain=plain) for plain in (False, True))
    assert not bool(found.overflowed)
    assert torch.equal(found.rows, wanted.rows)
    assert torch.equal(found.scores, wanted.scores)
    assert torch.equal(found.following, wanted.following)
