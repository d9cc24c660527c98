"""The summary counts what was measured, and its caveats say when not to trust it."""

import json
from pathlib import Path

import pytest

from loadtest.open_loop import NOT_SENT
from loadtest.report import write_report
from loadtest.results import OK, Call, Outcome, RunResults, caveats, summarise


def call(due_s: float, latency_ms: float, status: str = OK, outcome: Outcome | None = None) -> Call:
    return Call(due_s=due_s, sent_s=due_s + 0.001, latency_ms=latency_ms, status=status, outcome=outcome)


def results(calls: list[Call], **changes: object) -> RunResults:
    return RunResults(seconds=12.0, warmup_s=2.0, calls={"recommend": calls}, **changes)  # type: ignore[arg-type]


def test_percentiles_are_of_successful_calls_and_errors_stand_beside() -> None:
    calls = [call(3.0, float(row)) for row in range(1, 101)]
    calls += [call(4.0, 1_000.0, "DEADLINE_EXCEEDED"), call(5.0, 0.0, NOT_SENT)]
    summary = summarise(results(calls))["calls"]["recommend"]
    assert summary["latency_ms"] == {"p50": 50.5, "p95": 95.05, "p99": 99.01, "max": 100.0}
    assert summary["errors"] == {"DEADLINE_EXCEEDED": 1}
    assert (summary["not_sent"], summary["sent"], summary["ok"]) == (1, 101, 100)


def test_stages_and_degradations_are_gathered() -> None:
    outcome = Outcome(stages_ms={"rerank": 2.0}, degradations=["NOT_FRESH"], counts=["state_stored"])
    summary = summarise(results([call(3.0, 5.0, outcome=outcome), call(4.0, 5.0, outcome=outcome)]))
    assert summary["stages_ms"]["rerank"]["p50"] == 2.0
    assert summary["degradations"] == {"NOT_FRESH": 2}
    assert summary["counts"] == {"state_stored": 2}


def test_caveats_name_a_late_generator_and_few_calls() -> None:
    late = Call(due_s=3.0, sent_s=3.1, latency_ms=120.0, status=OK)
    found = caveats(summarise(results([late], interrupted=True)), timeout_ms=1_000)
    text = " ".join(found)
    assert "sent late (p99 100.0 ms)" in text
    assert "p99 rests on 1 calls" in text
    assert "interrupted" in text


def test_the_page_stands_alone_and_escapes_what_it_shows(tmp_path: Path) -> None:
    measured = results([call(3.0, 5.0), call(4.0, 7.0, "UNAVAILABLE")])
    summary = {
        "scenario": "<steady>",
        "target": "127.0.0.1:1",
        "started_at": "now",
        **summarise(measured),
        "claims": [],
        "command": "freshet loadtest steady",
        "commit": "abc",
        "hardware": {"cpu": "x", "cores": 2, "python": "3"},
        "caveats": ["a < b"],
    }
    page = write_report(tmp_path / "new", measured, summary).read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "<steady>" not in page
    assert "a &lt; b" in page
    assert json.loads((tmp_path / "new" / "summary.json").read_text())["scenario"] == "<steady>"


def test_warm_up_calls_are_left_out() -> None:
    summary = summarise(results([call(1.0, 900.0), call(3.0, 10.0)]))
    assert summary["calls"]["recommend"]["latency_ms"]["max"] == 10.0
    assert summary["calls"]["recommend"]["sent"] == 1


def test_rates_are_over_the_measured_seconds() -> None:
    summary = summarise(results([call(2.0 + row / 10, 5.0) for row in range(100)]))
    assert summary["calls"]["recommend"]["offered_per_s"] == pytest.approx(10.0)
    assert summary["calls"]["recommend"]["achieved_per_s"] == pytest.approx(10.0)
