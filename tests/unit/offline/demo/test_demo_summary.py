"""The summary's keys are a contract with everybody who reads it, and its figures mean what they say."""

import io
import math

import numpy as np
from rich.console import Console

from services.offline.demo.display import Display
from services.offline.demo.plan import Prediction, ReplayEvent, ReplayPlan, ReplayResult, answered_ranks
from services.offline.demo.replay import timeline
from services.offline.demo.summary import event_counts, hit_rates, in_order, stream_figures
from services.stack.lag import quantile_ms


def answered(position: int, latency_ms: float, *, error: str = "") -> Prediction:
    stages = dict.fromkeys(("queue", "encode", "first_stage", "transport", "total"), latency_ms / 10)
    return Prediction(
        position=position,
        item_ids=["a"],
        latency_ms=latency_ms,
        stages_ms=stages,
        state_source="stored",
        degradations=[],
        certificate="KIND_EXACT",
        token_honoured=True,
        error=error,
    )


def event(position: int, *, user: str = "u", predicted: bool = True) -> ReplayEvent:
    return ReplayEvent(
        event_id=f"e{position}",
        user_id=user,
        item_id="a",
        type="rating",
        value=5.0,
        time_s=1000 + position,
        predicted=predicted,
        previous=-1,
        known=True,
    )


def plan_of(events: list[ReplayEvent], **settings: float) -> ReplayPlan:
    settings = {"rate_per_s": 100.0, **settings}
    return ReplayPlan(gateway="g", bootstrap="b", topic="t", epoch="e", events=events, **settings)  # type: ignore[arg-type]


def test_an_empty_stream_has_no_figures_rather_than_zeros() -> None:
    figures = stream_figures(plan_of([]), ReplayResult(), {})
    assert figures["recommend_ms"]["p99"] is None
    assert figures["freshness_ms"]["p50"] is None


def test_a_failed_call_counts_its_latency_and_not_its_stages() -> None:
    failed = answered(1, 2000.0, error="DEADLINE_EXCEEDED")
    failed.stages_ms = dict.fromkeys(failed.stages_ms, math.nan)
    figures = stream_figures(plan_of([]), ReplayResult(predictions=[answered(0, 10.0), failed]), {})
    assert figures["recommend_ms"]["p99"] == 2000.0
    assert figures["stages_p99_ms"]["first_stage"] == 1.0
    assert figures["answers"]["errors"] == {"DEADLINE_EXCEEDED": 1}


def test_sent_is_the_distinct_acknowledged_event_ids_and_adds_up() -> None:
    result = ReplayResult(acknowledged={f"e{n}": [0, n] for n in range(12)}, duplicates_sent=3, malformed_sent=2)
    before = {"applied": 100, "dead_lettered": 5, "duplicates": 1}
    after = {"applied": 110, "dead_lettered": 7, "duplicates": 4}
    counts = event_counts(result, before, after)
    assert (counts["sent"], counts["applied"], counts["dead_lettered"], counts["duplicates"]) == (12, 10, 2, 3)
    assert counts["adds_up"]


def test_a_lost_event_does_not_add_up() -> None:
    result = ReplayResult(acknowledged={"e0": [0, 0]}, unacknowledged=["e1"])
    assert not event_counts(result, {}, {"applied": 1})["adds_up"]


def test_hit_rates_are_in_the_order_of_the_events_not_of_the_answers() -> None:
    predictions = in_order([answered(7, 1.0), answered(2, 1.0)])
    assert [prediction.position for prediction in predictions] == [2, 7]
    rates, hit = hit_rates({"model": answered_ranks([p.item_ids for p in predictions], ["a", "b"])})
    assert rates == {"model": 0.5}
    assert hit["model"].tolist() == [True, False]


def test_predictions_come_before_their_event_and_on_the_clock() -> None:
    events = [event(n, predicted=n % 5 == 0) for n in range(50)]
    actions = timeline(plan_of(events, rate_per_s=200.0, lead_ms=100.0))
    due = {(position, action): at for at, (action, position) in actions}
    assert len(actions) == 50 + 2 * 10
    asked = np.array([due[position, "ask"] for position in range(0, 50, 5)])
    np.testing.assert_allclose(np.diff(asked), 0.025)
    for position in range(0, 50, 5):
        assert due[position, "ask"] < due[position, "ask_with_token"] < due[position, "send"]


def test_a_histograms_quantile_is_that_of_what_came_between_two_reads() -> None:
    before = {0.01: 100.0, 0.1: 100.0, math.inf: 100.0}
    after = {0.01: 100.0, 0.1: 110.0, math.inf: 110.0}
    assert quantile_ms(before, after, 0.5) == 55.0
    assert quantile_ms(before, before, 0.5) is None
    assert quantile_ms({}, {0.01: 1.0, math.inf: 10.0}, 0.99) is None


def test_each_step_says_how_long_the_rest_takes() -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=200))
    display.expect({"stream": 240.0, "training": 0.0})
    for name in ("components", "stream", "evaluation"):
        display.step(name, "it runs")
    assert [line.partition("it runs ")[2] for line in written.getvalue().splitlines()] == [
        "(about 5 min left)",
        "(about 4 min left)",
        "(less than a minute left)",
    ]
