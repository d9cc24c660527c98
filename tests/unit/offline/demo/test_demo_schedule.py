"""The replay protocol's invariants, on real-looking and on any generated streams."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.offline.demo.schedule import Schedule, replay_schedule


def some_stream(num_users: int = 500, num_events: int = 20_000, seed: int = 0) -> np.ndarray:
    """Users of events in time order, bursty and unequal as people are."""
    rng = np.random.default_rng(seed)
    weights = rng.pareto(1.2, num_users) + 0.05
    return rng.choice(num_users, size=num_events, p=weights / weights.sum())


def check_order(users: np.ndarray, schedule: Schedule) -> None:
    """Each user's rows are sent in their own order, from the first one on, none twice."""
    for user in np.unique(users[schedule.rows]):
        sent = schedule.rows[users[schedule.rows] == user]
        assert sent.tolist() == np.flatnonzero(users == user)[: len(sent)].tolist()


def test_each_users_order_is_exact() -> None:
    users = some_stream()
    check_order(users, replay_schedule(users, num_events=10_000))


def test_about_200_users_are_active_and_take_turns() -> None:
    users = np.random.default_rng(1).integers(0, 500, size=20_000)
    schedule = replay_schedule(users, num_events=8_000)
    assert (schedule.num_active == 200).all()
    for turn in range(0, 8_000, 200):
        assert len(set(users[schedule.rows[turn : turn + 200]].tolist())) == 200


def test_users_enter_in_the_order_of_their_first_event() -> None:
    users = some_stream()
    schedule = replay_schedule(users, num_events=10_000)
    _, first = np.unique(users, return_index=True)
    wanted = users[np.sort(first)].tolist()
    entered = list(dict.fromkeys(users[schedule.rows].tolist()))
    assert entered == wanted[: len(entered)]


def test_one_event_in_five_is_predicted_and_everybody_gets_predicted() -> None:
    users = some_stream()
    schedule = replay_schedule(users, num_events=12_000)
    assert schedule.predicted.reshape(-1, 5).sum(axis=1).tolist() == [1] * 2400
    long_enough = [u for u in np.unique(users[schedule.rows]) if (users[schedule.rows] == u).sum() >= 10]
    for user in long_enough:
        assert schedule.predicted[users[schedule.rows] == user].any()


def test_previous_is_the_same_users_event_before() -> None:
    users = some_stream(num_users=40, num_events=500)
    schedule = replay_schedule(users, num_events=500, num_active=10)
    last: dict[int, int] = {}
    for position, user in enumerate(users[schedule.rows].tolist()):
        assert schedule.previous[position] == last.get(user, -1)
        last[user] = position


@given(
    users=st.lists(st.integers(0, 12), max_size=120),
    num_events=st.integers(1, 150),
    num_active=st.integers(1, 15),
    every=st.integers(1, 7),
)
def test_any_stream_is_sent_completely_and_in_order(
    users: list[int], num_events: int, num_active: int, every: int
) -> None:
    stream = np.array(users, dtype=np.int64)
    schedule = replay_schedule(stream, num_events=num_events, num_active=num_active, predict_every=every)
    assert len(schedule) == min(len(users), num_events)
    assert len(set(schedule.rows.tolist())) == len(schedule)
    assert (schedule.num_active <= num_active).all()
    assert abs(int(schedule.predicted.sum()) - len(schedule) / every) <= 1
    check_order(stream, schedule)


@pytest.mark.parametrize("wrong", ["num_events", "num_active", "predict_every"])
def test_a_number_that_is_not_positive_is_named(wrong: str) -> None:
    numbers = {"num_events": 5, "num_active": 5, "predict_every": 5} | {wrong: 0}
    with pytest.raises(ValueError, match=f"{wrong}=0"):
        replay_schedule(np.array([1, 2, 3]), **numbers)
