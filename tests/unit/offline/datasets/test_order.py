"""The shuffle test finds an order that is there, and none where there is none."""

import numpy as np
import pytest

from services.offline.datasets import Interactions, from_columns
from services.offline.datasets.order import order_test


def build(sequences: list[list[int]]) -> Interactions:
    users = np.repeat(np.arange(len(sequences)), [len(sequence) for sequence in sequences])
    items = np.concatenate([np.array(sequence) for sequence in sequences])
    return from_columns(
        users=(users, [f"u{user}" for user in range(len(sequences))]),
        items=(items, [str(item) for item in range(int(items.max()) + 1)]),
        timestamps=np.concatenate([np.arange(len(sequence)) for sequence in sequences]),
        name="made",
        source="made for tests",
        has_times=False,
    )


def walks(num_users: int = 120, length: int = 12, num_items: int = 60) -> list[list[int]]:
    """Everybody walks along one ring of items, whose numbers say nothing, from a random start."""
    rng = np.random.default_rng(0)
    ring = rng.permutation(num_items)
    starts = rng.integers(0, num_items, num_users)
    return [[int(ring[(start + step) % num_items]) for step in range(length)] for start in starts]


def shuffled(sequences: list[list[int]]) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [[int(item) for item in rng.permutation(sequence)] for sequence in sequences]


def test_a_walk_is_ordered() -> None:
    result = order_test(build(walks()))
    assert result.verdict == "ordered"
    assert result.hit_rate == pytest.approx(1.0)
    assert result.lift > 1.5


def test_the_same_walk_shuffled_has_no_order() -> None:
    result = order_test(build(shuffled(walks())))
    assert result.verdict == "no order found"
    assert abs(result.z) < 4


def test_a_set_listed_by_item_is_not_called_ordered() -> None:
    assert order_test(build([sorted(sequence) for sequence in walks()])).verdict == "sorted by item"
    two_parts = [sorted(sequence[::2]) + sorted(sequence[1::2]) for sequence in walks(length=24)]
    assert order_test(build(two_parts)).verdict == "sorted by item"
    falling = [sorted(sequence, reverse=True) for sequence in walks()]
    assert order_test(build(falling)).verdict == "sorted by item"


def test_equal_counts_share_the_places_that_are_left() -> None:
    # Item 0 was followed once by each of 1 .. 20, so a held-out follower is among ten of twenty: one half.
    sequences = [[0, follower] for follower in range(1, 21)] * 40
    assert order_test(build(sequences)).hit_rate == pytest.approx(0.5, abs=0.1)


def test_equal_data_give_equal_results() -> None:
    data = build(walks())
    assert order_test(data) == order_test(data)


def test_data_that_allow_no_test_are_refused() -> None:
    with pytest.raises(ValueError, match=r"made has too few users"):
        order_test(build([[1], [2], [0]]))
