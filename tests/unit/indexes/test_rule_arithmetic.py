"""Rules on arrays: bounds that hold for whatever was left out, pins, caps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.rules.diversity import select
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule, added, bound_with_boosts

NOTHING = ItemFilter()


def rule(**effect: float) -> Rule:
    return Rule(name="r", which=NOTHING, **effect)  # type: ignore[arg-type]


@given(
    st.lists(st.integers(-20, 20), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(1, 15), st.sets(st.integers(0, 29)), st.integers(0, 6)), max_size=4),
    st.integers(0, 10),
)
def test_nothing_left_out_scores_above_the_bound(
    scores: list[int], boosts: list[tuple[int, set[int], int]], pool_size: int
) -> None:
    rows = range(len(scores))
    best = sorted(rows, key=lambda row: -scores[row])
    pooled = set(best[:pool_size])
    bound = scores[best[pool_size]] if pool_size < len(best) else -math.inf
    own: list[tuple[float, float | None]] = []
    for boost, named, size in boosts:
        mine = [row for row in best if row in named]
        pooled |= set(mine[:size])
        own.append((boost, scores[mine[size]] if size < len(mine) else -math.inf))
    found = bound_with_boosts(bound, own)
    assert found is not None
    for row in rows:
        if row not in pooled:
            assert scores[row] + sum(boost for boost, named, _ in boosts if row in named) <= found + 1e-9


def test_without_a_proof_of_one_search_there_is_none() -> None:
    assert bound_with_boosts(None, []) is None
    assert bound_with_boosts(0.5, [(0.1, None)]) is None
    assert bound_with_boosts(0.5, []) == 0.5
    assert bound_with_boosts(-math.inf, [(3.0, -math.inf)]) == -math.inf


def test_boosts_and_buries_add_up() -> None:
    masks = [np.array([True, False, True]), np.array([False, False, True])]
    assert added([rule(boost=0.5), rule(boost=-2.0)], masks).tolist() == [0.5, 0.0, -1.5]


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({}, [0, 1, 2]),
        ({1: 9}, [9, 0, 1]),
        ({2: 1}, [0, 1, 2]),
        ({1: 2, 2: 0}, [2, 0, 1]),
        ({8: 1}, [0, 2, 3]),
        ({3: 9}, [0, 1, 9]),
    ],
)
def test_pinned_rows_stand_at_their_positions(pins: dict[int, int], expected: list[int]) -> None:
    named = [(np.arange(10) == row, position) for position, row in pins.items()]
    assert select(-np.arange(10, dtype=np.float64), 3, pins=named).tolist() == expected


def test_a_position_behind_the_end_is_the_end() -> None:
    assert select(-np.arange(3, dtype=np.float64), 5, pins=[(np.arange(3) == 0, 9)]).tolist() == [1, 2, 0]


def test_a_pin_takes_the_best_that_no_earlier_rule_took() -> None:
    named, nothing = np.array([False, True, True]), np.zeros(3, dtype=bool)
    scores = -np.arange(3, dtype=np.float64)
    assert select(scores, 3, pins=[(named, 1), (named, 2), (named, 2), (nothing, 3)]).tolist() == [1, 2, 0]


def test_limits_count_what_is_pinned_first_and_a_pin_takes_the_best_that_they_admit() -> None:
    scores, named = -np.arange(4, dtype=np.float64), np.array([False, False, True, True])
    categories = [(0,), (1,), (0,), (1,)]
    limited = {"categories": categories, "max_per_category": 1}
    assert select(scores, 4, pins=[(named, 1)], **limited).tolist() == [2, 1]
    assert select(scores, 4, pins=[(named, 1), (named, 3)], **limited).tolist() == [2, 3]
    assert select(scores, 4, pins=[(named, 1)], caps=[(named, 1)]).tolist() == [2, 0, 1]
    assert select(scores, 4, pins=[(named, 1), (named, 2)], caps=[(named, 1)]).tolist() == [2, 0, 1]
    components = np.array([[[1, 0]], [[1, 0]], [[1, 0]], [[0, 1]]], dtype=np.float32)
    pinned = select(scores, 2, pins=[(np.array([True, False, False, False]), 2)], components=components, diversity=0.9)
    assert pinned.tolist() == [3, 0]  # unlike what is pinned


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 20))
def test_a_cap_leaves_the_best_of_what_it_names(named: list[bool], cap: int, k: int) -> None:
    chosen = select(-np.arange(len(named), dtype=np.float64), k, caps=[(np.array(named), cap)]).tolist()
    expected: list[int] = []
    for row, is_named in enumerate(named):
        if len(expected) < k and (not is_named or sum(named[one] for one in expected) < cap):
            expected.append(row)
    assert chosen == expected
