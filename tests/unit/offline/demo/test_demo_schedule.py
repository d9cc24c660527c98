"""The replay protocol's invariants, on real-looking and on any generated streams."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.offline.datasets import Interactions, from_columns
from services.offline.demo.schedule import planned_events, scheduled_rows


def some_stream(num_users: int = 500, num_events: int = 20_000, seed: int = 0) -> np.ndarray:
    """Users of events in time order, bursty and unequal as people are."""
    rng = np.random.default_rng(seed)
    weights = rng.pareto(1.2, num_users) + 0.05
    return rng.choice(num_users, size=num_events, p=weights / weights.sum())


def held_out_of(users: np.ndarray) -> Interactions:
    """Events of these users, each of another item, 10 s apart."""
    events = np.arange(len(users))
    return from_columns(
        users=(users, [f"u{user}" for user in range(int(users.max()) + 1)]),
        items=(events, [f"i{event}" for event in events]),
        timestamps=1_000 + 10 * events,
        values=events % 5,
        name="held-out",
        source="",
    )


def check_order(users: np.ndarray, rows: np.ndarray) -> None:
    """Each user's rows are sent in their own order, from the first one on, none twice."""
    for user in np.unique(users[rows]):
        sent = rows[users[rows] == user]
        assert sent.tolist() == np.flatnonzero(users == user)[: len(sent)].tolist()


def test_each_users_order_is_exact() -> None:
    users = some_stream()
    check_order(users, np.array(scheduled_rows(users, num_events=10_000)))


def test_about_200_users_are_active_and_take_turns() -> None:
    users = np.random.default_rng(1).integers(0, 500, size=20_000)
    rows = scheduled_rows(users, num_events=8_000)
    for turn in range(0, 8_000, 200):
        assert len(set(users[rows[turn : turn + 200]].tolist())) == 200


def test_users_enter_in_the_order_of_their_first_event() -> None:
    users = some_stream()
    rows = scheduled_rows(users, num_events=10_000)
    _, first = np.unique(users, return_index=True)
    wanted = users[np.sort(first)].tolist()
    entered = list(dict.fromkeys(users[rows].tolist()))
    assert entered == wanted[: len(entered)]


def test_one_event_in_five_is_predicted_and_everybody_gets_predicted() -> None:
    users = some_stream()
    events = planned_events(held_out_of(users), scheduled_rows(users, num_events=12_000), known=set(), run_id="r")
    predicted = np.array([event.predicted for event in events])
    assert predicted.reshape(-1, 5).sum(axis=1).tolist() == [1] * 2400
    owners = np.array([event.user_id for event in events])
    for user, count in zip(*np.unique(owners, return_counts=True), strict=True):
        assert count < 10 or predicted[owners == user].any()


def test_an_event_is_its_row_and_names_the_same_users_event_before() -> None:
    users = some_stream(num_users=40, num_events=500)
    held_out = held_out_of(users)
    rows = scheduled_rows(users, num_events=500, num_active=10)
    last: dict[str, int] = {}
    for position, event in enumerate(planned_events(held_out, rows, known={"i7"}, run_id="r")):
        row = rows[position]
        assert (event.event_id, event.item_id, event.user_id) == (f"r-{position}", f"i{row}", f"u{users[row]}")
        assert (event.time_s, event.value, event.type) == (1_000 + 10 * row, row % 5, "interaction")
        assert event.known == (row == 7)
        assert event.previous == last.get(event.user_id, -1)
        last[event.user_id] = position


@given(users=st.lists(st.integers(0, 12), max_size=120), num_events=st.integers(1, 150), num_active=st.integers(1, 15))
def test_any_stream_is_sent_completely_and_in_order(users: list[int], num_events: int, num_active: int) -> None:
    stream = np.array(users, dtype=np.int64)
    rows = scheduled_rows(stream, num_events=num_events, num_active=num_active)
    assert len(rows) == len(set(rows)) == min(len(users), num_events)
    check_order(stream, np.array(rows, dtype=np.int64))
