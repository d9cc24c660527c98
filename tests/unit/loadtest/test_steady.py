"""`python -m loadtest steady` against a real gRPC server: rates, latency from the schedule, and what it writes down."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.loadtest.running import loadtest, summary_of


def steady(port: int, items: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return loadtest("steady", port, items, "--warmup", "0.5", *more)


def test_both_rates_are_met_and_written_down(small_gateway: Any, items: Path) -> None:
    finished = steady(
        small_gateway.port, items, "--seconds", "3.5", "--recommend-rate", "40", "--event-rate", "100",
        "--arrivals", "uniform", "--num-users", "5", "--with-token", "1",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    summary = summary_of(finished)
    calls = summary["calls"]
    assert calls["recommend"]["achieved_per_s"] == pytest.approx(40, rel=0.02)
    assert calls["record"]["achieved_per_s"] == pytest.approx(100, rel=0.02)
    assert 0 < calls["recommend"]["latency_ms"]["p50"] < 200
    assert calls["recommend"]["errors"] == {}
    assert summary["stages_ms"]["rerank"]["p50"] == 2.0
    assert set(summary["stages_ms"]) == {"queue", "encode", "first_stage", "rerank", "transport"}
    assert summary["degradations"] == {"NOT_FRESH": calls["recommend"]["ok"]}
    assert summary["counts"]["token_honoured"] == summary["counts"]["token_sent"] > 0
    # The server agrees: what was counted was really asked and written, each event under an id of its own.
    assert len(small_gateway.recommended) == 140
    written = [request.interactions[0] for request in small_gateway.recorded]
    assert len({interaction.event_id for interaction in written}) == len(written) == 350
    assert {interaction.user_id for interaction in written} == {f"loadtest-{row}" for row in range(5)}
    assert all(interaction.item_id.startswith("item-") for interaction in written)
    output = items.parent / "out"
    assert json.loads((output / "summary.json").read_text()) == summary
    assert (output / "report.html").read_text().count("data:image/png;base64,") == 4
    assert "recommend" in (output / "locust.html").read_text()


def test_a_stall_shows_in_every_call_that_was_due_meanwhile(small_gateway: Any, items: Path) -> None:
    small_gateway.stall_after_calls, small_gateway.stall_s = 60, 0.6
    finished = steady(
        small_gateway.port, items, "--seconds", "3.5", "--recommend-rate", "50", "--event-rate", "0",
        "--arrivals", "uniform",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    call = summary_of(finished)["calls"]["recommend"]
    # 30 of 150 calls fall due in the stall; a closed loop would have shown one slow call.
    assert call["achieved_per_s"] == pytest.approx(50, rel=0.03)
    assert call["latency_ms"]["p50"] < 200
    assert call["latency_ms"]["p95"] > 350
    assert call["latency_ms"]["max"] > 550


def test_failed_calls_are_counted_by_code_and_fail_the_run(small_gateway: Any, items: Path) -> None:
    small_gateway.fail_every = 4
    finished = steady(small_gateway.port, items, "--seconds", "2", "--recommend-rate", "40", "--event-rate", "0")
    assert finished.returncode == 1
    errors = summary_of(finished)["calls"]["recommend"]["errors"]
    assert set(errors) == {"RESOURCE_EXHAUSTED"}
    assert "of the calls failed; allowed: 1.0%" in finished.stderr


def test_a_bound_on_calls_in_flight_is_counted_not_hidden(small_gateway: Any, items: Path) -> None:
    small_gateway.stall_after_calls, small_gateway.stall_s = 40, 0.5
    finished = steady(
        small_gateway.port, items, "--seconds", "2", "--recommend-rate", "50", "--event-rate", "0",
        "--arrivals", "uniform", "--max-in-flight", "5",
    )  # fmt: skip
    summary = summary_of(finished)
    assert finished.returncode == 1
    assert summary["calls"]["recommend"]["not_sent"] > 5
    assert summary["peak_in_flight"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "example.org:50050"), "is another machine; load it only with --allow-remote"),
        (("--target", "nowhere"), "allowed: host:port"),
        (("--seconds", "1e9"), "--seconds=1e+09; allowed: 0.1 to 3600"),
        (("--recommend-rate", "1e6"), "--recommend-rate=1e+06; allowed: 0 to 5000"),
        (("--items", "missing.parquet"), "missing.parquet is not there"),
        (("--k", "0"), "--k=0; allowed: 1 to 1000"),
    ],
)
def test_wrong_options_are_refused_by_name(items: Path, options: tuple[str, str], message: str) -> None:
    finished = steady(1, items, *options)
    assert finished.returncode == 2
    assert message in finished.stderr


def test_ctrl_c_ends_a_run_that_still_reports_what_it_measured(small_gateway: Any, items: Path) -> None:
    """A terminal sends SIGINT to the command and to the load test that it started, at once."""
    command = [sys.executable, "-m", "services.cli", "loadtest", "steady", "--seconds", "60", "--warmup", "0", "--json"]
    command += ["--target", f"127.0.0.1:{small_gateway.port}", "--items", str(items)]
    command += ["--output", str(items.parent / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while len(small_gateway.recorded) < 100 and time.monotonic() < deadline:
            time.sleep(0.02)
        had = len(small_gateway.recorded)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    summary = json.loads(stdout.splitlines()[-1])
    assert summary["interrupted"]
    assert summary["seconds"] < 30
    # Of those that the gateway had recorded, the calls in flight at the interrupt have no answer.
    assert had - summary["peak_in_flight"] <= summary["calls"]["record"]["ok"] <= len(small_gateway.recorded)
    assert summary["calls"]["record"]["ok"] > 0
    assert "NO_ANSWER" not in summary["calls"]["record"]["errors"]


def test_a_silent_target_is_named(items: Path) -> None:
    finished = steady(1, items, "--seconds", "1")
    assert finished.returncode == 1
    assert "nothing answers at 127.0.0.1:1" in finished.stderr
