"""Every bad field of a Recommend is refused with field, value and allowed range, before any work."""

import math
import time
from typing import Any

import pytest
from gateway_scene import Scene
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.rules.attributes import Comparison, Condition
from services.algorithms.rules.filters import ItemFilter
from services.gateway.domain import FreshnessToken, HistoryEvent, NotAgain, RecommendQuery
from services.gateway.validation import check_query, with_times
from services.platform.errors import InvalidRequest

TOMORROW_AND_MORE = int(time.time() * 1000) + 25 * 3600 * 1000
LONG = "x" * 129
CHEAP = Condition("price", Comparison.AT_MOST, (20.0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "k=0 allowed: 1-1000"),
        ({"k": 1001}, "k=1001 allowed: 1-1000"),
        ({"k": 10**6}, "k=1000000 allowed: 1-1000"),
        ({"user_id": ""}, "user_id='' allowed: 1-128 bytes of UTF-8, or empty with a history"),
        ({"user_id": LONG}, "user_id='text of 129 bytes' allowed: 1-128"),
        ({"user_id": "é" * 65}, "user_id='text of 130 bytes' allowed: 1-128"),
        ({"user_id": "a\0b"}, "user_id='text with control characters'"),
        ({"max_gap": math.nan}, "max_gap=nan allowed: a finite number, at least 0"),
        ({"max_gap": -1e-9}, "max_gap=-1e-09 allowed: a finite number, at least 0"),
        ({"max_gap": math.inf}, "max_gap=inf allowed: a finite number, at least 0"),
        ({"diversity": math.nan}, "diversity=nan allowed: 0-1"),
        ({"diversity": -0.1}, "diversity=-0.1 allowed: 0-1"),
        ({"diversity": 1.1}, "diversity=1.1 allowed: 0-1"),
        ({"diversity": math.inf}, "diversity=inf allowed: 0-1"),
        ({"history": (HistoryEvent("a"),) * 1001}, "history='1001 events' allowed: at most 1000 events"),
        ({"history": (HistoryEvent("a"), HistoryEvent(""))}, r"history\[1\].item_id='text of 0 bytes' allowed: 1-128"),
        ({"history": (HistoryEvent(LONG),)}, r"history\[0\].item_id='text of 129 bytes'"),
        ({"history": (HistoryEvent("a", value=math.nan),)}, r"history\[0\].value=nan allowed: a finite number"),
        ({"history": (HistoryEvent("a", value=-math.inf),)}, r"history\[0\].value=-inf"),
        ({"history": (HistoryEvent("a", type="t" * 65),)}, r"history\[0\].type="),
        (
            {"history": (HistoryEvent("a", TOMORROW_AND_MORE),)},
            r"history\[0\].event_time=.*at most a day in the future",
        ),
        ({"history": (HistoryEvent("a", -1),)}, r"history\[0\].event_time="),
        ({"history": (HistoryEvent("a", 2), HistoryEvent("b", 1))}, r"history\[1\].event_time=.*oldest first"),
        ({"context": {str(n): "" for n in range(33)}}, "context='33 entries' allowed: at most 32"),
        ({"context": {"a": "x" * 257}}, "context='an entry of 257 bytes' allowed: at most 256"),
        ({"token": FreshnessToken("e", -1, 0)}, "freshness_token.partition=-1 allowed: 0 or more"),
        ({"token": FreshnessToken("e", 0, -1)}, "freshness_token.offset=-1 allowed: 0 or more"),
        ({"token": FreshnessToken(LONG, 0, 0)}, "freshness_token.epoch="),
        (
            {"user_id": "", "history": (HistoryEvent("a"),), "token": FreshnessToken("e", 0, 0)},
            "freshness_token='set' allowed: only together with user_id",
        ),
        ({"page_depth": 9}, "page_depth=9 allowed: 0, or 10 \\(k\\) to 1000"),
        ({"page_depth": 1001}, "page_depth=1001 allowed"),
        ({"not_again": NotAgain(51, 0)}, r"not_again\.answers=51 allowed: 0-50"),
        ({"not_again": NotAgain(1, 1441)}, r"not_again\.minutes=1441 allowed: 0-1440"),
        ({"not_again": NotAgain()}, "not_again='neither answers nor minutes' allowed: at least one of them"),
        (
            {"user_id": "", "history": (HistoryEvent("a"),), "page_depth": 20},
            "page_depth='set' allowed: only together with user_id",
        ),
        ({"filter": ItemFilter(deny_item_ids=("a",) * 10_001)}, "filter.deny_item_ids='10001 entries' allowed"),
        ({"filter": ItemFilter(allow_item_ids=("a", ""))}, r"filter.allow_item_ids\[1\]='text of 0 bytes'"),
        ({"filter": ItemFilter(allow_categories=("a",) * 1001)}, "filter.allow_categories='1001 entries'"),
        ({"filter": ItemFilter(deny_categories=(LONG,))}, r"filter.deny_categories\[0\]='text of 129 bytes'"),
        ({"filter": ItemFilter(where=(CHEAP,) * 33)}, "filter.where='33 conditions' allowed: at most 32"),
        (
            {"filter": ItemFilter(where=(CHEAP, Condition("colour", Comparison.PRESENT)))},
            r"filter\.where\[1\]: name='colour' allowed: price \(number\), maker \(tag\)",
        ),
        (
            {"filter": ItemFilter(where=(Condition("price", Comparison.ONE_OF, ("9",)),))},
            r"filter\.where\[0\]: 'price' one of '9': a tag; allowed: a number",
        ),
    ],
)
async def test_a_bad_field_is_refused_before_any_work(changes: dict[str, Any], message: str, scene: Scene) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await scene.recommend(RecommendQuery(**{"user_id": "ann", "k": 10, **changes}))
    assert scene.states.calls == scene.encoder.calls == scene.candidates.calls == 0


@pytest.mark.parametrize("k", [1, 1000])
@pytest.mark.parametrize("diversity", [0.0, 1.0])
def test_the_edges_of_the_ranges_are_allowed(k: int, diversity: float) -> None:
    history = (HistoryEvent("a", 0),) * 1000
    check_query(RecommendQuery(user_id="é" * 64, k=k, diversity=diversity, history=history), now_ms=0, kinds={})


@given(st.lists(st.one_of(st.none(), st.integers(0, 10**12)), max_size=20))
def test_missing_times_are_filled_without_breaking_the_order(times: list[int | None]) -> None:
    given_times = [time for time in times if time is not None]
    ordered = iter(sorted(given_times))
    history = tuple(HistoryEvent("a", None if time is None else next(ordered)) for time in times)
    filled = [event.event_time_ms for event in with_times(history, now_ms=10**12)]
    assert None not in filled
    assert filled == sorted(filled)  # type: ignore[type-var]
    assert len(filled) == len(times)
