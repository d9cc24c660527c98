"""TopKAvg where the answer to "how good is it" is known: close components prove it exact, distant ones do not."""

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries, unit

from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.scoring.states import ItemStates


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


def test_a_pool_size_below_one_is_refused() -> None:
    rng = np.random.default_rng(14)
    with pytest.raises(ValueError, match="pool_size=0"):
        TopKAvg(make_items(rng, 5, 4, 2, 8), make_pair_gate(rng, 8, 4), pool_size=0)
