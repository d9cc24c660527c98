"""Hits are counted by how long ago the user's previous event was, and every prediction is in one kind."""

import io

import numpy as np
import pytest
from rich.console import Console

from services.offline.datasets.interactions import from_columns
from services.offline.demo.display import figures
from services.offline.demo.plan import ReplayEvent
from services.offline.demo.sittings import (
    FIRST,
    KINDS,
    LATER_DAY,
    SAME_DAY,
    SAME_SITTING,
    hit_rates_by_kind,
    kind_of,
    kinds_of_predictions,
    last_times,
)
from services.offline.demo.summary import hit_rates, over_best_baseline

DAY = 86_400
NOON = 10 * DAY + DAY // 2


def event(user: str, time_s: int, *, predicted: bool = True) -> ReplayEvent:
    return ReplayEvent(
        event_id=f"{user}{time_s}",
        user_id=user,
        item_id="a",
        type="rating",
        value=1.0,
        time_s=time_s,
        predicted=predicted,
        previous=-1,
        known=True,
    )


@pytest.mark.parametrize(
    ("time_s", "previous_s", "kind"),
    [
        (NOON, None, FIRST),
        (NOON, NOON, SAME_SITTING),
        (NOON + 3_599, NOON, SAME_SITTING),
        (NOON + 3_600, NOON, SAME_DAY),
        (NOON + DAY, NOON, LATER_DAY),
        # Past midnight, but one sitting.
        (11 * DAY + 60, 11 * DAY - 60, SAME_SITTING),
        (11 * DAY + 3_600, 11 * DAY - 60, LATER_DAY),
    ],
)
def test_the_kind_is_of_the_time_since_the_previous_event(time_s: int, previous_s: int | None, kind: str) -> None:
    assert kind_of(time_s, previous_s) == kind


def test_the_previous_event_may_lie_before_the_split_and_need_not_be_predicted() -> None:
    events = [event("u", NOON), event("u", NOON + 60, predicted=False), event("u", NOON + 120), event("v", NOON)]
    assert kinds_of_predictions(events, {"u": NOON - DAY}).tolist() == [LATER_DAY, SAME_SITTING, FIRST]


def test_last_times_are_of_users_with_events_alone() -> None:
    whole = from_columns(
        users=(np.array([0, 1, 0, 2]), ["u", "v", "w"]),
        items=(np.array([0, 0, 1, 1]), ["a", "b"]),
        timestamps=np.array([5, 6, 7, 8]),
        name="tiny",
        source="a test",
    )
    assert last_times(whole.select(slice(0, 3))) == {"u": 7, "v": 6}


def test_every_kind_has_its_number_of_events_and_rates_of_nothing_are_none() -> None:
    kinds = np.array([SAME_SITTING, LATER_DAY, SAME_SITTING])
    found = hit_rates_by_kind(kinds, {"model": np.array([True, False, False])})
    assert tuple(found) == KINDS
    assert found[SAME_SITTING] == {"events": 2, "model": 0.5}
    assert found[LATER_DAY] == {"events": 1, "model": 0.0}
    assert found[FIRST] == {"events": 0, "model": None}


def test_the_factor_is_over_the_best_baseline() -> None:
    rates = {"model": 0.3, "item_knn": 0.2, "recent_popularity": 0.1, "popularity": 0.05}
    assert over_best_baseline(rates) == {"baseline": "item_knn", "factor": 1.5}
    assert over_best_baseline(rates | {"recent_popularity": 0.25})["baseline"] == "recent_popularity"
    assert over_best_baseline({"model": 0.3, "popularity": 0.0}) == {"baseline": None, "factor": None}


def test_the_table_fits_80_columns_and_says_what_a_sitting_is() -> None:
    names = ("model", "model_with_token", "frozen_state", "item_knn", "recent_popularity", "popularity")
    kinds = np.array([SAME_SITTING, LATER_DAY, SAME_SITTING, FIRST])
    rates, hit = hit_rates({name: np.array([0, 10, 0, 10]) for name in names})
    summary = {
        "hit_rate_at_10": rates,
        "hit_rate_at_10_by_sitting": hit_rates_by_kind(kinds, hit),
        "over_best_baseline": over_best_baseline(rates),
        "rates_per_s": {"recommend": 40.0, "events": 200.0},
        "answers": {"state_sources": {"stored": 4}, "degradations": {"DEGRADATION_POPULAR_FALLBACK": 1}, "errors": {}},
        "recommend_ms": {},
        "recommend_with_token_ms": {},
        "freshness_ms": {},
        "acknowledge_ms": {},
        "stages_ms": {},
        "stages_p99_ms": {},
        "events": {"sent": 1, "applied": 1, "dead_lettered": 0, "duplicates": 0, "adds_up": True},
        "components": {},
    }
    out = io.StringIO()
    Console(file=out, width=80).print(figures(summary))
    said = out.getvalue()
    assert "× item-kNN" in said
    (line,) = [line for line in said.splitlines() if line.startswith("item-kNN")]
    assert line.split()[-3:] == ["0.5000", "1.0000", "0.0000"]
    (line,) = [line for line in said.splitlines() if line.startswith("the model,")]
    assert line.split()[-4:] == ["0.5000", "1.0000", "0.0000", "1.00"]
    assert "less than 60 minutes after the user's previous event" in " ".join(said.split())
    assert "1 first events of new users" in " ".join(said.split())
    assert "too busy" not in said
    summary["answers"] |= {"degradations": {"DEGRADATION_BUSY": 3}, "errors": {"DEADLINE_EXCEEDED": 2}}
    Console(file=out, width=80).print(figures(summary))
    said = " ".join(out.getvalue().split())
    assert "too busy for 200 events a second: 3 of 4 answers are marked BUSY, 2 calls failed" in said
    assert "try --rate 100" in said
