"""Conditions as people write them: what each means, what is refused, and the same on the wire."""

from datetime import UTC, datetime

import pytest
from freshet.v1 import common_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.rules.attributes import Condition
from services.contracts.attributes import ParsedCondition, condition_message, parse_condition, parse_value
from services.contracts.wire import conditions_of
from services.platform.errors import InvalidRequest

DAY_MS = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("price<=20", ("price", "at most", (20.0,))),
        (" price  >= -1.5e3 ", ("price", "at least", (-1500.0,))),
        ("price<.5", ("price", "below", (0.5,))),
        ("released > 2026-01-01", ("released", "above", (DAY_MS,))),
        ("released >= 2026-01-01T02:00:00+02:00", ("released", "at least", (DAY_MS,))),
        ("maker=x", ("maker", "one of", ("x",))),
        ('maker="7"', ("maker", "one of", ("7",))),
        ("language in en, de", ("language", "one of", ("en", "de"))),
        ('language not in "a,b",c', ("language", "none of", ("a,b", "c"))),
        ("has price", ("price", "present", ())),
        ("has no price", ("price", "absent", ())),
        ("has = x", ("has", "one of", ("x",))),
    ],
)
def test_a_condition_means_what_it_says(text: str, said: ParsedCondition) -> None:
    assert parse_condition(text) == said
    assert conditions_of([condition_message(*said)]) == (Condition(*said),)


@pytest.mark.parametrize(
    "text", ["", "price", "price==", "price==7", "price in", "7<=8", "price in a,", "maker in a,,b", "pri-ce=3"]
)
def test_what_is_no_condition_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^condition=.* allowed: e\.g\. price<=20"):
        parse_condition(text)


def test_a_day_that_no_calendar_has_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^time='2026-02-30' allowed: a date of the calendar"):
        parse_condition("released>=2026-02-30")


@given(st.text())
def test_any_text_is_a_value_or_is_refused(text: str) -> None:
    try:
        assert isinstance(parse_value(text), float | int | str)
    except InvalidRequest as error:
        assert error.message.startswith("time=")  # noqa: PT017


def condition(comparison: int, *values: dict[str, object]) -> common_pb2.AttributeCondition:
    return common_pb2.AttributeCondition(name="p", comparison=comparison, values=values)


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (condition(0), r"comparison=0"),
        (condition(9), r"comparison=9"),
        (condition(1, {}), r"values\[0\]='no value'"),
        (condition(1, {"number": float("nan")}), r"values\[0\]=nan allowed: a finite number"),
        (condition(5, {"tag": "x"}, {"tag": ""}), r"values\[1\]='text of 0 bytes'"),
    ],
)
def test_a_malformed_condition_on_the_wire_is_refused_by_field(message: object, names: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^filter\.where\[0\]\.{names}"):
        conditions_of([message])
