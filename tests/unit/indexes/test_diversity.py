"""Maximal marginal relevance and category limits."""

import numpy as np
import pytest

from services.algorithms.rules.diversity import likeness_vectors, select

SCORES = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
# Items 0-2 are alike, 3 and 4 are not like anything.
COMPONENTS = np.array([[[1, 0, 0]], [[1, 0, 0]], [[1, 0, 0]], [[0, 1, 0]], [[0, 0, 1]]], dtype=np.float32)


def test_it_equals_the_plain_greedy_rule_on_random_pools() -> None:
    rng = np.random.default_rng(0)
    for weight in (0.1, 0.5, 0.9):
        scores = np.sort(rng.random(30))[::-1]
        vectors = likeness_vectors(rng.normal(size=(30, 2, 4)).astype(np.float32))
        chosen = [0]
        while len(chosen) < 10:
            rest = [i for i in range(30) if i not in chosen]
            value = {i: (1 - weight) * scores[i] - weight * max(vectors[i] @ vectors[j] for j in chosen) for i in rest}
            chosen.append(max(rest, key=value.__getitem__))
        components = (vectors * np.sqrt(2)).reshape(30, 2, 4)
        assert select(scores, 10, components=components, diversity=weight).tolist() == chosen


@pytest.mark.parametrize("diversity", [0.0, 0.3])
def test_category_limits_skip_and_go_on(diversity: float) -> None:
    categories = [(0,), (0, 1), (0,), (1,), (1,)]
    chosen = select(
        SCORES, 5, components=COMPONENTS, diversity=diversity, categories=categories, max_per_category=1
    ).tolist()
    assert chosen == [0, 3]


def test_an_item_without_components_is_like_nothing() -> None:
    vectors = likeness_vectors(np.zeros((2, 2, 3), dtype=np.float32))
    assert not vectors.any()


def test_an_empty_pool_makes_an_empty_choice() -> None:
    assert select(np.zeros(0), 3).tolist() == []
    assert select(np.zeros(0), 3, components=np.zeros((0, 2, 4), np.float32), diversity=0.5).tolist() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0 allowed"),
        ({"k": 1, "diversity": 1.5}, r"diversity=1\.5 allowed: 0-1"),
        ({"k": 1, "diversity": float("nan")}, "diversity=nan allowed: 0-1"),
        ({"k": 1, "diversity": 0.5}, "needs the items' components"),
        ({"k": 1, "max_per_category": 2}, "max_per_category=2 allowed"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(SCORES, **options)
