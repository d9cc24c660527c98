"""Rules on arrays: bounds that hold for whatever was left out, pins, caps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.diversity import select
from services.algorithms.filters import ItemFilter
from services.algorithms.rules import Rule, added, bound_with_boosts, pinned_first, with_pins

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
        ({}, [4, 3, 2]),
        ({0: 9}, [9, 4, 3]),
        ({1: 3}, [4, 3, 2]),
        ({0: 2, 1: 4}, [2, 4, 3]),
        ({7: 1}, [4, 3, 2]),
        ({2: 0}, [4, 3, 0]),
    ],
)
def test_pinned_rows_stand_at_their_positions(pins: dict[int, int], expected: list[int]) -> None:
    assert with_pins([4, 3, 2], pins, 3) == expected


def test_a_pin_takes_the_best_that_no_earlier_rule_took() -> None:
    named = np.array([False, True, True])
    rules, masks = [rule(pin=1), rule(pin=2), rule(pin=2), rule(pin=4)], [named, named, named, ~named & False]
    assert pinned_first(rules, masks) == {0: 1, 1: 2}


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 20))
def test_a_cap_leaves_the_best_of_what_it_names(named: list[bool], cap: int, k: int) -> None:
    chosen = select(-np.arange(len(named), dtype=np.float64), k, caps=[(np.array(named), cap)]).tolist()
    expected: list[int] = []
    for row, is_named in enumerate(named):
        if len(expected) < k and (not is_named or sum(named[one] for one in expected) < cap):
            expected.append(row)
    assert chosen == expected
