"""The algorithms with their kernels, against float64: proofs hold, pools are what the plain path finds."""

import numpy as np
import pytest
import torch
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.card_passes import CardPasses
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores.device import DeviceScorer, Precision
from services.algorithms.ops.mol_scores.reference import mol_scores_reference

K = 7


def indexes(scorer: DeviceScorer) -> list[Index]:
    passes = CardPasses(scorer)
    return [
        BruteForce(passes),
        TopKAvg(passes, pool_size=12),
        TopKPerEmbedding(passes, pool_size=3),
        CombinedTopK(passes, pair_pool_size=2, average_pool_size=9),
    ]


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("p_q", [1, 3])
@pytest.mark.parametrize("share", [None, 0.4])
def test_answers_hold_what_their_certificates_say(
    precision: Precision, p_q: int, share: float | None, kernel_device: torch.device
) -> None:
    rng = np.random.default_rng(p_q)
    p_x = 1 if p_q == 1 else 2
    queries, items = make_queries(rng, 3, p_q, p_x, 20), make_items(rng, 1100, p_q, p_x, 20, spread=0.3)
    gate = None if p_q == 1 else make_pair_gate(rng, p_q * p_x, 16, scale=0.3)
    allowed = None if share is None else rng.random((3, 1100)) < share
    exact = mol_scores_reference(queries, items, gate).numpy()
    mask = np.ones_like(exact, dtype=bool) if allowed is None else allowed
    scorer = DeviceScorer(items, gate, device=kernel_device, precision=precision, kernels=True)
    for index in indexes(scorer):
        answer = index.search(queries, K, allowed)
        for query in range(3):
            wanted = np.sort(exact[query][mask[query]])[::-1][:K]
            rows, scores = answer.item_indices[query], answer.scores[query]
            assert mask[query][rows].all()
            assert len(set(rows.tolist())) == K
            assert np.abs(scores - exact[query][rows]).max() < 1e-12
            gap = answer.certificates[query].gap
            if gap is not None:
                assert wanted[0] <= scores[0] + gap + 1e-12
                left_out = mask[query].copy()
                left_out[rows] = False
                assert exact[query][left_out].max() <= scores[-1] + gap + 1e-12
            if isinstance(index, BruteForce):
                assert gap == 0
                assert np.abs(scores - wanted).max() < 1e-12


def test_a_catalogue_of_equal_items_overflows_every_list_and_is_still_answered(kernel_device: torch.device) -> None:
    rng = np.random.default_rng(5)
    items = make_items(rng, 1, 2, 2, 8)
    items = type(items)(components=items.components.repeat(1500, 0), gate=np.repeat(items.gate, 1500, 0))
    scorer = DeviceScorer(items, make_pair_gate(rng, 4, 8), device=kernel_device, kernels=True)
    queries = make_queries(rng, 2, 2, 2, 8)
    passes = CardPasses(scorer)
    for index in (BruteForce(passes), TopKAvg(passes, pool_size=8)):
        answer = index.search(queries, K)
        assert answer.item_indices.tolist() == [list(range(K))] * 2
