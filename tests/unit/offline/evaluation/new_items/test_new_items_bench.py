"""Titles as states of withheld items: worth something where titles say something, and judged beside the mean."""

from collections.abc import Sequence

import numpy as np
import pytest

from services.algorithms.scoring.states import ItemStates, QueryStates
from services.offline.evaluation.catalogues.scene import Scene
from services.offline.evaluation.new_items.rows import withheld_rows

ONCE = np.ones(400, dtype=np.int64)


class KnownVectors:
    """A text encoder that has a vector for each title."""

    def __init__(self, vectors: np.ndarray) -> None:
        self._vectors = vectors

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return self._vectors[[int(text.split()[1]) for text in texts]]


def scene(*, num_items: int = 400, num_queries: int = 100) -> Scene:
    rng = np.random.default_rng(0)
    components = rng.normal(size=(num_items, 1, 8)) + 0.2
    components /= np.linalg.norm(components, axis=-1, keepdims=True)
    labels = rng.integers(0, num_items, num_queries)
    queries = components[labels] + 0.1 * rng.normal(size=(num_queries, 1, 8))
    return Scene(
        name="generated",
        items=ItemStates(components=components.astype(np.float32)),
        queries=QueryStates(components=queries.astype(np.float32)),
        pair_gate=None,
        label_draws=labels[:, None],
    )


def hit_rates(vectors: np.ndarray, made: Scene) -> dict[str, float]:
    titles = [f"title {row}" for row in range(len(made.items))]
    found = withheld_rows(
        made, KnownVectors(vectors), titles=titles, categories=[()] * len(titles), counts=ONCE, seed=1
    )
    assert {row["withheld"] for row in found} == {40}
    assert found[0]["cosine_to_trained"] == pytest.approx(1.0, abs=1e-6)
    assert found[-1]["state"] == "none"
    assert (found[-1]["next_hits"], found[-1]["near_hits"], found[-1]["next_rank"]) == (0, 0, len(made.items))
    # What is not there takes nobody's place.
    assert found[-1]["known_hits"] == max(row["known_hits"] for row in found)
    for row in found[:-1]:
        assert 1 <= row["near_rank"] <= len(made.items)
    return {row["state"]: row["next_hits"] for row in found}


def test_titles_that_tell_the_state_serve_almost_as_well_as_training() -> None:
    made = scene()
    rates = hit_rates(
        made.items.components[:, 0] @ np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32), made
    )
    assert rates["trained"] == 1.0
    assert rates["from the text"] >= 0.9
    assert rates["from the text"] > rates["mean of the others"] + 0.5


def test_titles_that_tell_nothing_are_worth_little() -> None:
    made = scene()
    rates = hit_rates(np.random.default_rng(3).normal(size=(400, 8)).astype(np.float32), made)
    assert rates["from the text"] < 0.5


def test_a_scene_that_asks_for_no_withheld_item_is_refused() -> None:
    made = scene(num_queries=1)
    titles = [f"title {row}" for row in range(400)]
    encoder = KnownVectors(np.eye(400, 8, dtype=np.float32))
    with pytest.raises(ValueError, match="none of 1 queries has a withheld item next"):
        withheld_rows(made, encoder, titles=titles, categories=[()] * 400, counts=ONCE, seed=0)
