"""A search that names no algorithm gets the first that is done in time, by what searches cost."""

import pytest

from services.candidates.bootstrap import algorithms_for
from services.candidates.handlers import Choice


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("text", "num_items", "num_pairs", "expected"),
    [
        ("auto", 99_999, 8, ["exact"]),
        ("auto", 100_000, 8, ["exact", "quantized_tangents(2000)"]),
        ("auto", 10_000_000, 8, ["exact", "quantized_tangents(4000)"]),
        ("auto", 10_000_000, 1, ["quantized(200)", "exact"]),
        ("top_k_avg(7) exact", 10_000_000, 8, ["top_k_avg(7)", "exact"]),
    ],
)
def test_auto_is_exact_and_codes_beside_it_where_the_catalogue_is_large(
    text: str, num_items: int, num_pairs: int, expected: list[str]
) -> None:
    assert [one.text for one in algorithms_for(text, num_items=num_items, num_pairs=num_pairs)] == expected


def test_the_first_that_fits_into_a_tenth_of_the_time_left_is_chosen_else_the_cheapest() -> None:
    clock = Clock()
    choice = Choice(["exact", "codes"], clock=clock)
    choice.took("exact", 0.030)
    choice.took("codes", 0.002)
    assert choice.of(None, 1) == "exact"
    assert choice.of(clock.now + 0.4, 1) == "exact"
    assert choice.of(clock.now + 0.2, 1) == "codes"
    # Two together have twice the cost.
    assert choice.of(clock.now + 0.4, 2) == "codes"
    assert choice.of(clock.now - 1, 1) == "codes"


def test_what_was_dear_once_is_tried_again_though_not_where_it_would_break_a_deadline() -> None:
    clock = Clock()
    choice = Choice(["exact", "codes"], clock=clock)
    choice.took("exact", 0.15)
    choice.took("codes", 0.001)
    assert choice.of(clock.now + 0.4, 1) == "codes"
    clock.now += 61
    assert choice.of(clock.now + 0.4, 1) == "exact"
    assert choice.of(clock.now + 0.2, 1) == "codes"
    choice.took("exact", 0.002)
    for _ in range(20):
        choice.took("exact", 0.002)
    assert choice.of(clock.now + 0.2, 1) == "exact"


def test_a_gap_is_asked_of_what_proves_it_for_least_as_far_as_half_of_the_time_goes() -> None:
    clock = Clock()
    choice = Choice(["exact", "lists", "codes"], clock=clock)
    for name, seconds in (("exact", 0.030), ("lists", 0.010), ("codes", 0.002)):
        choice.took(name, seconds)
    assert choice.proving(0.0, None, 1) == "codes"
    assert choice.proving(0.0, None, 1, ["codes"]) == "lists"
    assert choice.proving(0.0, None, 1, ["codes", "lists"]) == "exact"
    assert choice.proving(0.0, None, 1, ["codes", "lists", "exact"]) is None
    for _ in range(30):
        choice.proved("codes", 0.05, False)
        choice.proved("codes", 0.0, False)
        choice.proved("lists", 0.0, False)
        choice.proved("lists", 0.05, True)
    assert choice.proving(0.05, None, 1) == "lists"
    assert choice.proving(0.0, None, 1) == "exact"
    assert choice.proving(0.0, clock.now + 0.061, 1) == "exact"
    assert choice.proving(0.0, clock.now + 0.059, 1, ["codes"]) == "lists"
    assert choice.proving(0.0, clock.now + 0.061, 2, ["codes"]) == "lists"
    assert choice.proving(0.0, clock.now - 1, 1) is None
