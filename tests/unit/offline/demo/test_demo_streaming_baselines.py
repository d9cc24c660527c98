"""Item-kNN and recent popularity know the past, learn from every event, and nothing of what comes after it."""

import numpy as np

from services.offline.datasets import Interactions
from services.offline.datasets.interactions import from_columns
from services.offline.demo import baselines
from services.offline.demo.baselines import ITEM_KNN, RECENT_POPULARITY, streaming_answers
from services.offline.demo.plan import ReplayEvent
from services.offline.evaluation.engine.metrics import top_rows

ITEMS = ["a", "b", "c", "d", "e"]
USERS = ["u", "v", "w", "x"]


def past_of(pairs: list[tuple[str, str]]) -> Interactions:
    """What happened before the split, in the vocabularies of the whole data."""
    whole = from_columns(
        users=(np.array([USERS.index(user) for user, _ in pairs] + [0, 1, 2, 3, 3]), USERS),
        items=(np.array([ITEMS.index(item) for _, item in pairs] + [0, 1, 2, 3, 4]), ITEMS),
        timestamps=np.arange(len(pairs) + 5),
        name="tiny",
        source="a test",
    )
    return whole.select(slice(0, len(pairs)))


def events_of(pairs: list[tuple[str, str]], *, predicted: list[bool] | None = None) -> list[ReplayEvent]:
    return [
        ReplayEvent(
            event_id=f"e{position}",
            user_id=user,
            item_id=item,
            type="rating",
            value=1.0,
            time_s=1_000 + position,
            predicted=predicted is None or predicted[position],
            previous=-1,
            known=True,
        )
        for position, (user, item) in enumerate(pairs)
    ]


PAST = [("u", "a"), ("u", "b"), ("v", "a"), ("v", "b"), ("w", "c"), ("w", "d"), ("x", "e"), ("x", "c")]


def test_a_neighbour_of_the_last_item_comes_first() -> None:
    answers = streaming_answers(past_of(PAST), events_of([("x", "d")]), {"x": {"e", "c"}})
    assert answers[ITEM_KNN][0][0] == "d"


def test_what_the_user_has_had_is_left_out_also_what_the_replay_brought() -> None:
    events = events_of([("w", "a"), ("w", "b")])
    answers = streaming_answers(past_of(PAST), events, {"w": {"c", "d"}})
    for name in (ITEM_KNN, RECENT_POPULARITY):
        assert not {"c", "d"} & set(answers[name][0])
        assert not {"a", "c", "d"} & set(answers[name][1])


def test_nothing_later_is_known() -> None:
    asked = [("w", "a"), ("x", "d")]
    short = streaming_answers(past_of(PAST), events_of(asked), {})
    long = streaming_answers(past_of(PAST), events_of([*asked, ("u", "e"), ("v", "e"), ("u", "d")]), {})
    for name in (ITEM_KNN, RECENT_POPULARITY):
        assert long[name][:2] == short[name]


def test_the_predicted_event_is_not_known_yet_and_the_next_answer_knows_it() -> None:
    train = past_of(PAST[:6])
    events = events_of([("u", "e"), ("v", "d")])
    answers = streaming_answers(train, events, {"v": {"a", "b"}})
    assert "e" not in answers[RECENT_POPULARITY][0]
    assert "e" in answers[RECENT_POPULARITY][1]
    assert answers[ITEM_KNN][1][0] == "e"  # u had a, b, then e; v's last are a and b


def test_events_between_predictions_are_learnt_from() -> None:
    events = events_of([("u", "e"), ("v", "d")], predicted=[False, True])
    answers = streaming_answers(past_of(PAST[:6]), events, {"v": {"a", "b"}})
    assert len(answers[ITEM_KNN]) == 1
    assert answers[ITEM_KNN][0][0] == "e"


def test_batches_change_no_answer(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    pairs = [(USERS[rng.integers(4)], ITEMS[rng.integers(5)]) for _ in range(60)]
    whole = streaming_answers(past_of(PAST), events_of(pairs), {})
    monkeypatch.setattr(baselines, "_BATCH_EVENTS", 7)
    assert streaming_answers(past_of(PAST), events_of(pairs), {}) == whole


def test_above_the_most_items_item_knn_is_left_out(monkeypatch) -> None:
    monkeypatch.setattr(baselines, "MOST_ITEMS", 3)
    assert set(streaming_answers(past_of(PAST), events_of([("x", "d")]), {})) == {RECENT_POPULARITY}


def test_the_best_come_first_equals_by_their_order_and_minus_infinity_is_no_answer() -> None:
    scores = np.array([1.0, 3.0, 3.0, 2.0, -np.inf, 3.0])
    assert top_rows(scores, np.array([], dtype=np.int64), k=3).tolist() == [1, 2, 5]
    assert top_rows(scores, np.array([1]), k=3).tolist() == [2, 5, 3]
    assert top_rows(scores, np.array([1]), k=10).tolist() == [2, 5, 3, 0]
