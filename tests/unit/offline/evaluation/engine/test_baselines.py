"""What the models are compared with: small cases by hand, and nothing learnt or read from the event to predict."""

from dataclasses import replace

import numpy as np
import pytest

from services.offline.datasets import Interactions, from_columns
from services.offline.datasets.splits import leave_one_out_split, time_split
from services.offline.evaluation.engine.baselines import (
    GRIDS,
    Baseline,
    Ease,
    ImplicitAls,
    Popularity,
    RecentPopularity,
    SessionNeighbours,
    make_baseline,
)
from services.offline.training.sequences import Histories

DAY = 86_400


def build(rows: list[tuple[str, int, int]], *, has_times: bool = True) -> Interactions:
    """Events (user, item, second); items are numbers from 0 without a gap."""
    users = sorted({row[0] for row in rows})
    return from_columns(
        users=(np.array([users.index(row[0]) for row in rows]), users),
        items=(np.array([row[1] for row in rows]), [str(item) for item in range(max(row[1] for row in rows) + 1)]),
        timestamps=np.array([row[2] for row in rows]),
        name="small",
        source="made for tests",
        has_times=has_times,
    )


def random_events(*, has_times: bool = True, num_users: int = 60, num_items: int = 40) -> Interactions:
    rng = np.random.default_rng(0)
    rows = []
    for user in range(num_users):
        count = int(rng.integers(3, 25))
        seconds = np.sort(rng.integers(0, 200 * DAY, count)) if has_times else np.arange(count)
        rows += [(f"u{user:02}", int(rng.integers(0, num_items)), int(second)) for second in seconds]
    return build(rows, has_times=has_times)


def requests(data: Interactions, rows: np.ndarray) -> tuple[Histories, np.ndarray, np.ndarray]:
    """Histories, and place and user of the events in `rows`."""
    order, _ = data.by_user()
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return Histories.of(data), place[rows], data.users[rows].astype(np.int64)


def fitted(name: str, train: Interactions, settings: dict[str, float] | None = None) -> Baseline:
    if name in ("item-knn", "als", "ease"):
        pytest.importorskip("implicit", reason="the bench extra is not installed")
    small = {"als": {"factors": 8, "iterations": 3}, "ease": {"penalty": 5.0}}
    baseline = make_baseline(name, settings or small.get(name))
    baseline.fit(train)
    return baseline


def answer(baseline: Baseline, data: Interactions, user: str) -> np.ndarray:
    """Scores for the last event of `user`, (X,)."""
    last = np.flatnonzero(data.users == data.user_ids.index(user))[-1:]
    histories, events, users = requests(data, last)
    return baseline.scores(histories, events, users)[0]


# Four sessions, oldest first, and a user of whom nothing is learnt; the last event is the one to predict.
SESSIONS = [("a", 0, 100), ("a", 1, 101), ("b", 1, 200), ("b", 2, 201), ("c", 0, 300), ("c", 1, 301), ("c", 3, 302)]
SESSIONS += [("d", 4, 400), ("d", 2, 401)]
ASKING = [("x", 0, 500), ("x", 1, 501), ("x", 4, 502)]


def session_votes(**settings: int) -> np.ndarray:
    data = build(SESSIONS + ASKING)
    baseline = SessionNeighbours(**settings)  # type: ignore[arg-type]
    baseline.fit(data.select(slice(0, len(SESSIONS))))
    return answer(baseline, data, "x")


def test_sessions_vote_as_in_the_paper() -> None:
    # x had 0, then 1. Weights: 1 for item 1, 1/2 for item 0. So r = 1.5, 1, 1.5 of a, b, c, and all share the newest
    # item: factor 0.9. Of four sessions 2 hold item 0, 3 hold item 1, 2 hold item 2, 1 holds item 3.
    votes = session_votes()
    assert votes[0] == pytest.approx(0.9 * (1.5 + 1.5) * np.log(4 / 2))
    assert votes[1] == pytest.approx(0.9 * (1.5 + 1.0 + 1.5) * np.log(4 / 3))
    assert votes[2] == pytest.approx(0.9 * 1.0 * np.log(4 / 2))
    assert votes[3] == pytest.approx(0.9 * 1.5 * np.log(4 / 1))
    assert votes[4] < 0  # No voter holds it: its popularity alone.


def test_only_the_most_recent_sessions_are_asked() -> None:
    votes = session_votes(recent_sessions=1)
    assert votes[3] == pytest.approx(0.9 * 1.5 * np.log(4))
    assert votes[2] < 0  # Session b is older than c.


def test_only_the_nearest_sessions_vote_and_the_more_recent_of_equals() -> None:
    votes = session_votes(neighbours=1)
    assert votes[0] == pytest.approx(0.9 * 1.5 * np.log(2))
    assert votes[3] == pytest.approx(0.9 * 1.5 * np.log(4))
    assert votes[2] < 0


def test_a_match_further_back_counts_less() -> None:
    data = build([*SESSIONS, ("x", 2, 500), ("x", 3, 501), ("x", 4, 502)])
    baseline = SessionNeighbours()
    baseline.fit(data.select(slice(0, len(SESSIONS))))
    # Item 4 is held by d alone, which shares only item 2, one place back: r = 1/2, factor 0.8.
    assert answer(baseline, data, "x")[4] == pytest.approx(0.8 * 0.5 * np.log(4))


def test_the_evolving_session_is_the_last_events_alone() -> None:
    # With a window of one the session is item 1; b votes as much as a and c.
    votes = session_votes(window=1)
    assert votes[2] == pytest.approx(0.9 * 1.0 * np.log(2))
    assert votes[3] == pytest.approx(0.9 * 1.0 * np.log(4))


def test_a_pause_or_the_length_ends_a_session() -> None:
    asking = [("x", 0, 30 * DAY), ("x", 1, 30 * DAY)]
    data = build([("a", 0, 0), ("a", 1, 1), ("a", 2, 2 * DAY), ("b", 3, 3 * DAY), *asking])
    one, cut = SessionNeighbours(pause_hours=100), SessionNeighbours(session_events=1, pause_hours=100)
    paused = SessionNeighbours(pause_hours=24)
    for baseline in (one, cut, paused):
        baseline.fit(data.select(slice(0, 4)))
    assert (answer(one, data, "x") > 0).tolist() == [True, True, True, False]
    assert (answer(paused, data, "x") > 0).tolist() == [True, True, False, False]
    assert (answer(cut, data, "x") > 0).tolist() == [True, False, False, False]


def test_popularity_of_the_last_days_ends_at_the_request() -> None:
    rows = [("a", 0, 0), ("b", 0, DAY), ("a", 1, 10 * DAY), ("b", 2, 11 * DAY), ("c", 2, 12 * DAY), ("a", 0, 20 * DAY)]
    asking = [("x", 0, 5 * DAY), ("x", 1, 12 * DAY + 1)]
    data = build(rows + asking)
    train = data.select(data.users != data.user_ids.index("x"))
    baseline = RecentPopularity(days=3)
    baseline.fit(train)
    # Days 9 to 12: item 1 once, item 2 twice; item 0 only by its three training events, of at most three.
    assert answer(baseline, data, "x") == pytest.approx([0 + 3 / 4, 1 + 1 / 4, 2 + 2 / 4])


def test_a_request_after_the_training_sees_its_last_days() -> None:
    rows = [("a", 0, 0), ("b", 0, DAY), ("a", 1, 10 * DAY), ("b", 2, 12 * DAY)]
    data = build([*rows, ("x", 0, 90 * DAY), ("x", 1, 99 * DAY)])
    baseline = RecentPopularity(days=3)
    baseline.fit(data.select(slice(0, 4)))
    assert answer(baseline, data, "x") == pytest.approx([0 + 2 / 3, 1 + 1 / 3, 1 + 1 / 3])


def test_without_times_the_last_events_of_each_user_count() -> None:
    rows = [("a", 0, 0), ("a", 1, 1), ("a", 2, 2), ("b", 0, 0), ("b", 2, 1), ("b", 0, 2)]
    data = build([*rows, ("x", 0, 0), ("x", 1, 1)], has_times=False)
    baseline = RecentPopularity(events=2)
    baseline.fit(data.select(data.users != data.user_ids.index("x")))
    assert answer(baseline, data, "x") == pytest.approx([1 + 3 / 4, 1 + 1 / 4, 2 + 2 / 4])


def test_popularity_counts_training_events() -> None:
    data = build([("a", 0, 0), ("b", 0, 1), ("b", 1, 2), ("x", 1, 3), ("x", 1, 4)])
    baseline = Popularity()
    baseline.fit(data.select(slice(0, 3)))
    assert answer(baseline, data, "x").tolist() == [2, 1]


def test_ease_is_the_closed_form() -> None:
    data = random_events()
    split = leave_one_out_split(data)
    scores = answer(fitted("ease", split.train, {"penalty": 3.0}), data, "u07")
    taken = np.zeros((data.num_users, data.num_items))
    taken[split.train.users, split.train.items] = 1
    inverse = np.linalg.inv(taken.T @ taken + 3.0 * np.eye(data.num_items))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    history = np.zeros(data.num_items)
    history[data.items[data.users == data.user_ids.index("u07")][:-1]] = 1
    assert scores == pytest.approx(history @ weights, abs=1e-5)


def test_ease_refuses_a_catalogue_beyond_its_memory() -> None:
    with pytest.raises(ValueError, match=r"EASE of 40 items needs 0\.0 GiB .*allowed: memory_limit_gib=1e-06"):
        Ease(memory_limit_gib=1e-6).fit(random_events())


def test_als_solves_the_user_from_the_history() -> None:
    data = random_events()
    baseline = fitted("als", leave_one_out_split(data).train, {"factors": 4, "alpha": 7.0, "regularization": 0.5})
    assert isinstance(baseline, ImplicitAls)
    vectors = baseline._model.item_factors.astype(np.float64)
    had = vectors[np.unique(data.items[data.users == data.user_ids.index("u05")][:-1])]
    normal = vectors.T @ vectors + 6.0 * had.T @ had + 0.5 * np.eye(4)
    expected = vectors @ np.linalg.solve(normal, 7.0 * had.sum(axis=0))
    known = expected != 0
    assert answer(baseline, data, "u05")[known] == pytest.approx(expected[known], abs=1e-4)


def test_item_neighbours_sum_similarities_and_fade_with_the_place() -> None:
    data = build([("a", 0, 0), ("a", 1, 1), ("b", 1, 2), ("b", 2, 3), ("x", 0, 4), ("x", 2, 5), ("x", 1, 6)])
    train = data.select(slice(0, 4))
    even = answer(fitted("item-knn", train, {"weights": "cosine"}), data, "x")  # type: ignore[dict-item]
    fading = answer(fitted("item-knn", train, {"weights": "cosine", "recency": 0.5}), data, "x")  # type: ignore[dict-item]
    assert even == pytest.approx([1, 2 / np.sqrt(2), 1])
    assert fading == pytest.approx([0.5, 1.5 / np.sqrt(2), 1])


@pytest.mark.parametrize("has_times", [True, False])
@pytest.mark.parametrize("name", GRIDS)
def test_the_test_event_changes_nothing(name: str, has_times: bool) -> None:
    data = random_events(has_times=has_times)
    split = leave_one_out_split(data)
    before = fitted(name, split.train).scores(*requests(data, split.test_rows))
    other = data.items.copy()
    other[split.test_rows] = (other[split.test_rows] + 17) % data.num_items
    changed = leave_one_out_split(replace(data, items=other))
    after = fitted(name, changed.train).scores(*requests(changed.interactions, changed.test_rows))
    assert before.shape == (len(split.test_rows), data.num_items)
    assert np.isfinite(before).all()
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("name", GRIDS)
def test_nothing_from_the_test_on_changes_a_split_by_time(name: str) -> None:
    data = random_events()
    split = time_split(data)
    first_test = split.test_rows[:1]
    before = fitted(name, split.train).scores(*requests(data, first_test))
    other = data.items.copy()
    later = slice(int(first_test[0]), None)
    other[later] = (other[later] + 17) % data.num_items
    changed = replace(data, items=other)
    after = fitted(name, time_split(changed).train).scores(*requests(changed, first_test))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("name", ["item-knn", "session-knn", "ease", "als"])
def test_what_happened_just_before_does_change_the_answer(name: str) -> None:
    data = random_events()
    split = leave_one_out_split(data)
    baseline = fitted(name, split.train)
    histories, events, users = requests(data, split.test_rows)
    items = histories.items.copy()
    items[events - 1] = (items[events - 1] + 17) % data.num_items
    changed = Histories(items=items, times=histories.times, offsets=histories.offsets)
    assert not np.array_equal(baseline.scores(histories, events, users), baseline.scores(changed, events, users))


@pytest.mark.parametrize("name", GRIDS)
def test_equal_data_give_equal_scores_whatever_the_batch(name: str) -> None:
    data = random_events()
    split = leave_one_out_split(data)
    histories, events, users = requests(data, split.test_rows)
    whole = fitted(name, split.train).scores(histories, events, users)
    again = fitted(name, split.train)
    parts = [again.scores(histories, events[part], users[part]) for part in (slice(0, 7), slice(7, None))]
    np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["item-knn", "session-knn", "ease", "als"])
def test_a_history_nobody_shares_gets_popular_items(name: str) -> None:
    rows = [("a", 0, 0), ("a", 1, 1), ("b", 1, 2), ("b", 2, 3), ("c", 1, 4), ("x", 3, 5), ("x", 0, 6)]
    data = build(rows)
    scores = answer(fitted(name, data.select(slice(0, 5))), data, "x")
    assert int(np.argmax(scores[:3])) == 1
    assert scores[3] < scores[:3].min()


def test_grids_are_small_and_every_setting_is_taken() -> None:
    for name, grid in GRIDS.items():
        assert 1 <= len(grid) <= 6
        for settings in grid:
            assert vars(make_baseline(name, settings)).items() >= settings.items()
