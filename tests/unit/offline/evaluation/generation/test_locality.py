"""The order in which the phrases of one shortlist are adjacent."""

import numpy as np

from services.offline.evaluation.generation.world import locality_order


def test_the_order_of_phrases_is_an_order_that_keeps_padding_and_puts_sets_together() -> None:
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(6, 5)).astype(np.float32)
    sets = np.stack([np.arange(10 * number, 10 * number + 10) for number in range(6)]).astype(np.int32)
    shuffled = rng.permutation(100).astype(np.int32)
    places = locality_order(centers, shuffled[sets], num_tokens=100)
    assert sorted(places.tolist()) == list(range(100))
    assert places[0] == 0
    for row in shuffled[sets]:
        rows = np.sort(places[row[row > 0]])
        assert rows[-1] - rows[0] == len(rows) - 1
    assert places[row[row > 0]].tolist() == rows.tolist()
