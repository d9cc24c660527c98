"""The demo's baselines know the past, leave out what the user has had, and nothing that comes after an event."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.algorithms.scoring.states import ItemStates, QueryStates
from services.offline.datasets import Interactions
from services.offline.datasets.interactions import from_columns
from services.offline.demo import baselines
from services.offline.demo.baselines import ITEM_KNN, RECENT_POPULARITY, baseline_ranks
from services.offline.demo.plan import ReplayEvent
from services.offline.evaluation.engine.metrics import top_rows

ITEMS = ["a", "b", "c", "d", "e"]
USERS = ["u", "v", "w", "x"]
MISS = len(ITEMS)
PAST = [("u", "a"), ("u", "b"), ("v", "a"), ("v", "b"), ("w", "c"), ("w", "d"), ("x", "e"), ("x", "c")]


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
    shared: dict[str, Any] = {"type": "rating", "value": 1.0, "time_s": 0, "previous": -1, "known": True}
    return [
        ReplayEvent(
            event_id=f"e{row}", user_id=user, item_id=item, predicted=predicted is None or predicted[row], **shared
        )
        for row, (user, item) in enumerate(pairs)
    ]


def ranks(
    past: list[tuple[str, str]],
    events: list[tuple[str, str]],
    *,
    predicted: list[bool] | None = None,
    frozen: dict[str, QueryStates] | None = None,
) -> dict[str, list[int]]:
    train = past_of(past)
    bundle: Any = SimpleNamespace(
        item_ids=ITEMS,
        counts=train.item_counts(),
        item_states=ItemStates(components=np.eye(5, dtype=np.float32)[:, None, :]),
        pair_gate=None,
    )
    found = baseline_ranks(bundle, frozen or {}, train, events_of(events, predicted=predicted))
    return {name: of.tolist() for name, of in found.items()}


def state(*weights: float) -> QueryStates:
    components = np.array([[weights]], dtype=np.float32)
    return QueryStates(components=components / np.linalg.norm(components))


def test_popularity_is_of_the_past_and_equal_counts_are_in_the_order_of_ids() -> None:
    # w may still be answered with a, b (2 each), e (1): the counts do not change with the stream.
    events = [("w", "e"), ("w", "a"), ("w", "b")]
    assert ranks(PAST, events)["popularity"] == [2, 0, 0]


def test_frozen_states_rank_by_the_model_and_users_without_one_get_popular_items() -> None:
    events = [("w", "e"), ("w", "b"), ("x", "b")]
    frozen = {"w": state(1, 2, 9, 9, 3)}
    assert ranks(PAST, events, frozen=frozen)["frozen_state"] == [0, 0, 1]


def test_what_the_user_has_had_is_no_answer_also_what_the_replay_brought() -> None:
    for name, found in ranks(PAST, [("w", "c"), ("w", "a"), ("w", "a"), ("w", "b")]).items():
        assert (name, found[0], found[2], found[3]) == (name, MISS, MISS, 0)


def test_a_neighbour_of_the_last_item_comes_first() -> None:
    assert ranks(PAST, [("x", "d")])[ITEM_KNN] == [0]


def test_nothing_later_is_known() -> None:
    asked = [("w", "a"), ("x", "d")]
    short, long = ranks(PAST, asked), ranks(PAST, [*asked, ("u", "e"), ("v", "e"), ("u", "d")])
    assert {name: found[:2] for name, found in long.items()} == short


def test_the_predicted_event_is_not_known_yet_and_the_next_answer_knows_it() -> None:
    found = ranks(PAST[:6], [("u", "e"), ("v", "e")])
    assert found[RECENT_POPULARITY] == [MISS, 0]
    assert found[ITEM_KNN] == [MISS, 0]  # u had a, b, then e; v's last are a and b


def test_events_between_predictions_are_learnt_from() -> None:
    assert ranks(PAST[:6], [("u", "e"), ("v", "e")], predicted=[False, True])[ITEM_KNN] == [0]


def test_above_the_most_items_item_knn_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MOST_ITEMS", 3)
    assert ITEM_KNN not in ranks(PAST, [("x", "d")])


def test_the_best_come_first_equals_by_their_order_and_minus_infinity_is_no_answer() -> None:
    scores = np.array([1.0, 3.0, 3.0, 2.0, -np.inf, 3.0])
    assert top_rows(scores, np.array([], dtype=np.int64), k=3).tolist() == [1, 2, 5]
    assert top_rows(scores, np.array([1]), k=3).tolist() == [2, 5, 3]
    assert top_rows(scores, np.array([1]), k=10).tolist() == [2, 5, 3, 0]
