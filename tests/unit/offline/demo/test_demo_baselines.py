"""Popularity and frozen states leave out what the user has had, by the same rule as the system."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from services.offline.demo.baselines import baseline_answers, popularity_order, seen_before, top_k


def test_most_popular_first_and_ties_by_item_id() -> None:
    assert popularity_order(["b", "a", "c"], np.array([5, 5, 9])) == ["c", "a", "b"]


def test_top_k_leaves_out_seen_items_and_is_filled_up() -> None:
    assert top_k(["a", "b", "c", "d"], {"b"}, k=2) == ["a", "c"]
    assert top_k(["a"], {"a"}, k=2) == []


def test_seen_grows_with_every_event_and_starts_with_the_past() -> None:
    seen = seen_before({"u": {"p"}}, ["u", "v", "u", "u"], ["a", "b", "c", "d"], np.array([True, False, True, True]))
    assert [(position, set(known)) for position, known in seen] == [(0, {"p"}), (2, {"p", "a"}), (3, {"p", "a", "c"})]


def test_the_predicted_event_is_not_seen_yet() -> None:
    [(position, known)] = [
        (position, set(known)) for position, known in seen_before({}, ["u", "u"], ["a", "b"], np.array([False, True]))
    ]
    assert (position, known) == (1, {"a"})


def test_a_user_without_a_frozen_state_gets_popular_items() -> None:
    bundle: Any = SimpleNamespace(item_ids=["a", "b", "c"], counts=np.array([1, 3, 2]))
    answers = baseline_answers(
        bundle=bundle,
        past={"known": {"c"}},
        frozen={"known": np.array([2, 0, 1])},
        users=["known", "new"],
        items=["a", "b"],
        predicted=np.array([True, True]),
    )
    assert answers.frozen_state == [["a", "b"], ["b", "c", "a"]]
    assert answers.popularity == [["b", "a"], ["b", "c", "a"]]
