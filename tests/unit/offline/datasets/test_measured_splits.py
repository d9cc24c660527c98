"""The splits for comparing models: disjoint parts, nothing of the future in what may be learnt from."""

import numpy as np
import pytest

from services.offline.datasets import Interactions, from_columns
from services.offline.datasets.splits import SPLITS, leave_one_out_split, reverse_ties, time_split


def build(rows: list[tuple[str, str, int]], *, has_times: bool = True) -> Interactions:
    """Events (user, item, second)."""
    users, items = sorted({row[0] for row in rows}), sorted({row[1] for row in rows})
    return from_columns(
        users=(np.array([users.index(row[0]) for row in rows]), users),
        items=(np.array([items.index(row[1]) for row in rows]), items),
        timestamps=np.array([row[2] for row in rows]),
        name="small",
        source="made for tests",
        has_times=has_times,
    )


def random_events(count: int = 3_000, *, seed: int = 0) -> Interactions:
    rng = np.random.default_rng(seed)
    return from_columns(
        users=(rng.integers(0, 80, count), [f"u{user}" for user in range(80)]),
        items=(rng.integers(0, 50, count), [f"i{item}" for item in range(50)]),
        timestamps=rng.integers(0, count // 2, count),
        name="random",
        source="made for tests",
    )


def ids(data: Interactions, rows: np.ndarray) -> list[str]:
    return [f"{data.user_ids[data.users[row]]}:{data.item_ids[data.items[row]]}" for row in rows]


# User a's last two events share a second; b's first two do.
TIES = [("a", "x", 1), ("a", "y", 5), ("a", "z", 5), ("b", "x", 2), ("b", "y", 2), ("b", "z", 9), ("c", "x", 3)]


def test_leave_one_out_takes_the_last_in_the_order_of_the_file() -> None:
    split = leave_one_out_split(build(TIES))
    assert (split.name, ids(split.interactions, split.test_rows)) == ("leave-one-out", ["a:z", "b:z"])
    assert sorted(ids(split.interactions, split.valid_rows)) == ["a:y", "b:y"]
    assert sorted(ids(split.interactions, split.train_rows)) == ["a:x", "b:x", "c:x"]


def test_reversed_ties_turn_round_only_what_shares_a_second() -> None:
    split = SPLITS["leave-one-out, reversed ties"](build(TIES))
    assert split.name == "leave-one-out, reversed ties"
    assert sorted(ids(split.interactions, split.test_rows)) == ["a:y", "b:z"]
    assert sorted(ids(split.interactions, split.valid_rows)) == ["a:z", "b:x"]
    assert sorted(ids(split.interactions, split.train_rows)) == ["a:x", "b:y", "c:x"]


def test_reversing_twice_gives_the_same_events_back() -> None:
    data = random_events()
    assert reverse_ties(reverse_ties(data)).fingerprint() == data.fingerprint() != reverse_ties(data).fingerprint()


def test_refit_rows_of_leave_one_out_add_the_validation_events() -> None:
    split = leave_one_out_split(random_events())
    assert split.refit_rows.tolist() == sorted([*split.train_rows, *split.valid_rows])
    assert len(split.refit_rows) == len(split.train) + len(split.valid_rows)


def test_time_split_cuts_at_two_moments() -> None:
    data = random_events()
    split = time_split(data, max_events=10**9)
    times = data.timestamps
    assert times[split.train_rows].max() < times[split.valid_rows].min()
    assert times[split.refit_rows].max() < times[split.test_rows].min()
    assert len(split.train_rows) == pytest.approx(0.8 * len(data), abs=10)
    assert len(split.refit_rows) == pytest.approx(0.9 * len(data), abs=10)
    assert len(split.train_rows) + len(split.valid_rows) <= len(split.refit_rows)


def test_every_predicted_event_has_an_earlier_one_of_its_user() -> None:
    rows = [("a", str(second), second) for second in range(80)]
    rows += [(f"once-{second}", "x", second) for second in range(80, 99)]
    rows += [("new", "x", 85), ("a", "late", 86), ("new", "y", 95), ("a", "last", 99)]
    data = build(rows)
    split = time_split(data)
    assert ids(data, split.valid_rows) == ["a:late"]
    assert ids(data, split.test_rows) == ["new:y", "a:last"]


def test_predicted_events_are_evenly_spread_over_each_part() -> None:
    data = random_events()
    every, some = time_split(data, max_events=10**9), time_split(data, max_events=20)
    for whole, chosen in ((every.valid_rows, some.valid_rows), (every.test_rows, some.test_rows)):
        places = np.searchsorted(whole, chosen)
        assert len(chosen) == 20
        assert whole[places].tolist() == chosen.tolist()
        assert np.diff(places).min() >= len(whole) // 20
        assert np.diff(places).max() <= len(whole) // 20 + 1
    assert some.train_rows.tolist() == every.train_rows.tolist()


@pytest.mark.parametrize("name", SPLITS)
def test_the_parts_share_no_row(name: str) -> None:
    split = SPLITS[name](random_events())
    assert split.name == name
    joined = np.concatenate([split.train_rows, split.valid_rows, split.test_rows])
    assert len(np.unique(joined)) == len(joined)
    assert not np.intersect1d(split.refit_rows, split.test_rows).size
    for rows in (split.train_rows, split.valid_rows, split.test_rows, split.refit_rows):
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()


def test_data_without_times_are_refused_by_name() -> None:
    data = build([("a", "x", 0), ("a", "y", 1), ("a", "z", 2)], has_times=False)
    with pytest.raises(ValueError, match=r"^small has no timestamps; allowed: leave-one-out$"):
        time_split(data)
    with pytest.raises(ValueError, match=r"^small has no timestamps, so no ties"):
        reverse_ties(data)
    assert leave_one_out_split(data).test_rows.tolist() == [2]


def test_a_number_of_events_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_events=0; allowed: 1 and more"):
        time_split(random_events(), max_events=0)


def test_too_few_events_are_refused() -> None:
    with pytest.raises(ValueError, match=r"small \(3 events\) leaves no training or no validation event"):
        time_split(build([("a", "x", 3), ("b", "y", 3), ("a", "y", 3)]))
