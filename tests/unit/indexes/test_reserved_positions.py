"""Reserved positions: as many as the share says, each slot's chance as drawing again and again finds it."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.rules.reserved_positions import MAX_POSITIONS, draw_slots


@pytest.mark.parametrize(("k", "num_new", "share"), [(5, 3, 0.3), (4, 1, 0.5), (6, 9, 0.5), (3, 2, 1.0)])
def test_chances_are_those_of_drawing_often(k: int, num_new: int, share: float) -> None:
    rng, often = Random(0), 40_000
    found: Counter[tuple[int, int]] = Counter()
    said: dict[tuple[int, int], float] = {}
    for _ in range(often):
        slots = draw_slots(k, num_new, share, rng)
        for position, (row, chance) in enumerate(zip(slots.rows, slots.propensities, strict=True)):
            found[position, row] += 1
            assert said.setdefault((position, row), chance) == chance
    for slot, chance in said.items():
        assert found[slot] / often == pytest.approx(chance, abs=5 * (chance * (1 - chance) / often) ** 0.5 + 1e-12)


@given(st.integers(0, 150), st.integers(0, 200), st.floats(0, 1), st.integers())
def test_every_position_is_filled_once(k: int, num_new: int, share: float, seed: int) -> None:
    slots = draw_slots(k, num_new, share, Random(seed))
    assert len(slots.rows) == len(set(slots.rows)) == k
    ordinary = [row for row in slots.rows if row >= 0]
    assert ordinary == list(range(len(ordinary)))
    reserved = k - len(ordinary)
    assert reserved <= min(num_new, share * min(k, MAX_POSITIONS) + 1)
    assert all(0 < chance <= 1 + 1e-9 for chance in slots.propensities)
    assert all(row >= 0 for row in slots.rows[MAX_POSITIONS:])


def test_without_a_share_or_new_items_nothing_changes() -> None:
    for share, num_new in ((0.0, 5), (0.5, 0)):
        slots = draw_slots(10, num_new, share, Random(0))
        assert list(slots.rows) == list(range(10))
        assert list(slots.propensities) == [1.0] * 10
