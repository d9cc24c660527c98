"""The baseline is the paper's formulas: its scores are the reference's, its answers those of our own algorithms."""

import numpy as np
import pytest

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import SHAPES, Scene
from services.offline.evaluation.retrieval.transcription import Transcription


@pytest.fixture(scope="module", params=["books", "nq320k"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return generate(SHAPES[request.param], num_items=700, num_queries=4, seed=5)


def test_scores_are_the_reference(scene: Scene) -> None:
    found = Transcription(scene.items, scene.pair_gate).scores(scene.queries)
    wanted = mol_scores_reference(scene.queries, scene.items, scene.pair_gate)
    assert float((found.double() - wanted).abs().max()) < 1e-5


def test_many_chunks_score_as_one(scene: Scene) -> None:
    whole = Transcription(scene.items, scene.pair_gate).scores(scene.queries)
    chunked = Transcription(scene.items, scene.pair_gate, chunk_floats=4 * 128 * 100)  # 100 items at a time
    assert np.allclose(chunked.scores(scene.queries).numpy(), whole.numpy(), atol=1e-6)


def test_answers_are_those_of_our_algorithms(scene: Scene) -> None:
    paper = Transcription(scene.items, scene.pair_gate)
    items, gate, queries = scene.items, scene.pair_gate, scene.queries
    both: list[tuple[Index, object]] = [
        (BruteForce(MolScorer(items, gate)), paper.brute_force(queries, 20)),
        (TopKAvg(MolScorer(items, gate), pool_size=60), paper.top_k_avg(queries, 20, pool_size=60)),
        (TopKPerEmbedding(MolScorer(items, gate), pool_size=5), paper.top_k_per_embedding(queries, 20, pool_size=5)),
        (
            CombinedTopK(MolScorer(items, gate), pair_pool_size=2, average_pool_size=30),
            paper.combined_top_k(queries, 20, pair_pool_size=2, average_pool_size=30),
        ),
    ]
    for ours, theirs in both:
        found = ours.search(queries, 20).item_indices
        for mine, other in zip(found, np.asarray(theirs), strict=True):
            # bfloat16 averages in our first pass may trade an item at the pool's rim.
            assert len(np.intersect1d(mine, other)) >= 19, ours.name


def test_an_ungated_dot_product_is_refused() -> None:
    scene = generate(SHAPES["nq320k"], num_items=5, num_queries=1, seed=0)
    with pytest.raises(ValueError, match="pair_gate=None"):
        Transcription(scene.items, None)
