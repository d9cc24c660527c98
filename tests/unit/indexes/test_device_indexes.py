"""What the device algorithms promise beside conformance: names, shared states, memory, room, concurrent searches."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import Algorithm, make_card_index
from services.algorithms.indexes.card_passes import CardPasses
from services.algorithms.indexes.protocol import take_queries
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.device import DeviceScorer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "sizes", "made"),
    [
        ("brute_force", (), "brute_force"),
        ("exact", (), "brute_force"),
        ("top_k_avg", (30,), "top_k_avg"),
        ("top_k_per_embedding", (5,), "top_k_per_embedding"),
        ("combined_top_k", (5, 30), "combined_top_k"),
    ],
)
def test_algorithms_are_made_by_name_over_shared_states(name: str, sizes: tuple[int, ...], made: str) -> None:
    rng = np.random.default_rng(0)
    items, gate = make_items(rng, 60, 4, 2, 8), make_pair_gate(rng, 8, 16)
    scorer = DeviceScorer(items, gate, device=CPU)
    index = make_card_index(Algorithm(name, sizes), CardPasses(scorer))
    assert index.name == made
    assert index.scorer is scorer
    assert index.search(make_queries(rng, 2, 4, 2, 8), 3).item_indices.shape == (2, 3)


def test_an_algorithm_that_a_card_does_not_serve_is_refused_by_name() -> None:
    rng = np.random.default_rng(0)
    scorer = DeviceScorer(make_items(rng, 5, 4, 2, 8), make_pair_gate(rng, 8, 4), device=CPU)
    with pytest.raises(ValueError, match="'quantized' is not served from a card; allowed: brute_force, exact"):
        make_card_index(Algorithm("quantized", ()), CardPasses(scorer))


def test_memory_on_the_device_is_counted() -> None:
    rng = np.random.default_rng(1)
    items, gate = make_items(rng, 100, 4, 2, 8), make_pair_gate(rng, 8, 16)
    states = items.components.nbytes + items.gate.nbytes
    scorer = DeviceScorer(items, gate, device=CPU)
    assert scorer.nbytes == states
    assert BruteForce(CardPasses(scorer)).nbytes == states
    averages = 4 * 100 * (8 + 1)
    assert TopKAvg(CardPasses(scorer), pool_size=9).nbytes == states + averages


def test_a_search_that_needs_more_room_for_float64_gets_it() -> None:
    rng = np.random.default_rng(2)
    items, gate = make_items(rng, 1, 4, 2, 8), make_pair_gate(rng, 8, 16)
    items = type(items)(components=items.components.repeat(300, 0), gate=items.gate.repeat(300, 0))
    index = BruteForce(CardPasses(DeviceScorer(items, gate, device=CPU)))
    answer = index.search(make_queries(rng, 2, 4, 2, 8), 5)
    assert answer.item_indices.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert answer.passes[-1].touched.tolist() == [300, 300]


def test_searches_from_several_threads_answer_as_one_would() -> None:
    rng = np.random.default_rng(3)
    items, gate, queries = make_items(rng, 400, 4, 2, 8), make_pair_gate(rng, 8, 16), make_queries(rng, 24, 4, 2, 8)
    index = BruteForce(CardPasses(DeviceScorer(items, gate, device=CPU)))
    wanted = BruteForce(MolScorer(items, gate)).search(queries, 6)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda b: index.search(take_queries(queries, b, b + 2), 6), range(0, 24, 2)))
    assert np.array_equal(np.concatenate([one.item_indices for one in found]), wanted.item_indices)
