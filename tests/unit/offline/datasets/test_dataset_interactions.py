"""Interactions and their splits: order, vocabularies, and no leak from future to past."""

import numpy as np
import pytest

from services.offline.datasets import Interactions, from_columns, global_time_split


def build(rows: list[tuple[str, str, int]]) -> Interactions:
    users, user_codes = np.unique([row[0] for row in rows], return_inverse=True)
    items, item_codes = np.unique([row[1] for row in rows], return_inverse=True)
    return from_columns(
        users=(user_codes, users.tolist()),
        items=(item_codes, items.tolist()),
        timestamps=np.array([row[2] for row in rows]),
        name="t",
        source="test",
    )


ROWS = [("b", "x", 5), ("a", "x", 1), ("a", "y", 2), ("b", "y", 5), ("a", "z", 9), ("b", "w", 7), ("c", "x", 8)]


def test_rows_are_sorted_by_time_and_ties_keep_their_order() -> None:
    data = build(ROWS)
    assert data.timestamps.tolist() == [1, 2, 5, 5, 7, 8, 9]
    assert [data.item_ids[item] for item in data.items[2:4]] == ["x", "y"]


def test_by_user_lists_each_history_oldest_first() -> None:
    data = build(ROWS)
    rows, offsets = data.by_user()
    histories = {
        user_id: [data.item_ids[item] for item in data.items[rows[offsets[code] : offsets[code + 1]]]]
        for code, user_id in enumerate(data.user_ids)
    }
    assert histories == {"a": ["x", "y", "z"], "b": ["x", "y", "w"], "c": ["x"]}


def test_a_selection_keeps_the_codes() -> None:
    data = build(ROWS)
    part = data.select(slice(0, 2))
    assert len(part) == 2
    assert part.item_ids == data.item_ids


def test_keep_frequent_shrinks_the_vocabularies() -> None:
    kept = build(ROWS).keep_frequent(min_per_item=2, min_per_user=2)
    assert kept.item_ids == ["x", "y"]
    assert kept.user_ids == ["a", "b"]
    assert len(kept) == 4


def test_the_fingerprint_tells_different_events_apart() -> None:
    assert build(ROWS).fingerprint() == build(ROWS).fingerprint()
    assert build(ROWS).fingerprint() != build([*ROWS[:-1], ("c", "y", 8)]).fingerprint()


def test_a_time_split_puts_no_second_on_both_sides() -> None:
    split = global_time_split(build(ROWS), fraction=0.5)
    assert split.split_time == 5
    assert split.train.timestamps.tolist() == [1, 2]
    assert split.held_out.timestamps.min() == 5
    assert len(split.train) + len(split.held_out) == len(ROWS)


def test_a_time_split_of_one_second_is_refused() -> None:
    with pytest.raises(ValueError, match="every event of t has the time 3"):
        global_time_split(build([("a", "x", 3), ("b", "y", 3)]))


def test_a_large_first_second_moves_the_split_behind_it() -> None:
    split = global_time_split(build([("a", "x", 3), ("b", "y", 3), ("a", "y", 4)]), fraction=0.5)
    assert (len(split.train), split.split_time) == (2, 4)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_a_fraction_outside_the_open_unit_interval_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction=.*allowed: between 0 and 1"):
        global_time_split(build(ROWS), fraction=fraction)


def test_unsorted_times_are_refused() -> None:
    data = build(ROWS)
    with pytest.raises(ValueError, match="timestamps decrease at row 1"):
        data.select(np.array([3, 0]))
