"""Popularity and frozen states leave out what the user has had, by the same rule as the system."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from services.offline.demo.baselines import baseline_answers, popularity_order, seen_before, top_k
from services.offline.demo.plan import ReplayEvent


def test_most_popular_first_and_ties_by_item_id() -> None:
    assert popularity_order(["b", "a", "c"], np.array([5, 5, 9])) == ["c", "a", "b"]


def test_top_k_leaves_out_seen_items_and_is_filled_up() -> None:
    assert top_k(["a", "b", "c", "d"], {"b"}, k=2) == ["a", "c"]
    assert top_k(["a"], {"a"}, k=2) == []


def events_of(*rows: tuple[str, str, bool]) -> list[ReplayEvent]:
    shared: dict[str, Any] = {"type": "rating", "value": 1.0, "time_s": 0, "previous": -1, "known": True}
    return [
        ReplayEvent(event_id=f"e{row}", user_id=user, item_id=item, predicted=predicted, **shared)
        for row, (user, item, predicted) in enumerate(rows)
    ]


def test_seen_grows_with_every_event_and_starts_with_the_past() -> None:
    events = events_of(("u", "a", True), ("v", "b", False), ("u", "c", True), ("u", "d", True))
    seen = [(event.item_id, set(known)) for event, known in seen_before({"u": {"p"}}, events)]
    assert seen == [("a", {"p"}), ("c", {"p", "a"}), ("d", {"p", "a", "c"})]


def test_the_predicted_event_is_not_seen_yet() -> None:
    [(event, known)] = [
        (event, set(known)) for event, known in seen_before({}, events_of(("u", "a", False), ("u", "b", True)))
    ]
    assert (event.item_id, known) == ("b", {"a"})


def test_a_user_without_a_frozen_state_gets_popular_items() -> None:
    bundle: Any = SimpleNamespace(item_ids=["a", "b", "c"], counts=np.array([1, 3, 2]))
    events = events_of(("known", "a", True), ("new", "b", True))
    answers = baseline_answers(bundle, {"known": {"c"}}, {"known": np.array([2, 0, 1])}, events)
    assert answers["frozen_state"] == [["a", "b"], ["b", "c", "a"]]
    assert answers["popularity"] == [["b", "a"], ["b", "c", "a"]]
