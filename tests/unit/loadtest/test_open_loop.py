"""The open loop: arrivals at the asked rate, work when it is due, a bound, and progress by the clock."""

import time

import numpy as np
import pytest

from loadtest.open_loop import OpenLoop, arrivals


@pytest.mark.parametrize("kind", ["poisson", "uniform"])
def test_the_rate_is_met_inside_the_run(kind: str) -> None:
    due = arrivals(kind, rate_per_s=200, seconds=100, rng=np.random.default_rng(0))
    assert len(due) == pytest.approx(20_000, rel=0.03)
    assert due.min() >= 0
    assert due.max() < 100
    assert np.all(np.diff(due) >= 0)


def test_uniform_gaps_are_equal_and_poisson_gaps_are_exponential() -> None:
    rng = np.random.default_rng(0)
    even = np.diff(arrivals("uniform", rate_per_s=50, seconds=100, rng=rng))
    assert np.ptp(even) < 1e-9
    random = np.diff(arrivals("poisson", rate_per_s=50, seconds=400, rng=rng))
    # An exponential's deviation equals its mean.
    assert np.std(random) == pytest.approx(np.mean(random), rel=0.05)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="arrivals='bursty'; allowed: poisson, uniform"):
        arrivals("bursty", rate_per_s=1, seconds=1, rng=np.random.default_rng(0))


def drive(loop: OpenLoop[str]) -> list[float]:
    waited = []
    for wait_s in loop.waits():
        waited.append(wait_s)
        time.sleep(wait_s)
    return waited


def test_work_begins_when_it_is_due_and_latency_counts_from_then() -> None:
    begun: list[tuple[str, float]] = []

    def start(due_s: float, work: str) -> None:
        begun.append((work, loop.latency_ms(due_s)))
        time.sleep(0.05 if work == "slow" else 0.0)

    loop = OpenLoop(
        [(0.03, "late"), (0.02, "slow")], start=start, refuse=start, in_flight=[], max_in_flight=1,
        report=lambda due_s, work: None, report_every_s=9.0,
    )  # fmt: skip
    waited = drive(loop)
    assert [work for work, _ in begun] == ["slow", "late"]
    # The second was due while the first kept the loop: no wait, and 40 ms of latency before it began.
    assert waited[1] == 0.0
    assert begun[1][1] >= 39


def test_work_beyond_the_bound_is_refused_and_progress_is_reported_by_the_clock() -> None:
    open_work: list[str] = []
    refused: list[str] = []
    reported: list[float] = []
    loop = OpenLoop(
        [(row / 100, str(row)) for row in range(6)],
        start=lambda due_s, work: open_work.append(work), refuse=lambda due_s, work: refused.append(work),
        in_flight=open_work, max_in_flight=4, report=lambda due_s, work: reported.append(due_s), report_every_s=0.02,
    )  # fmt: skip
    drive(loop)
    assert (open_work, refused, loop.peak_in_flight) == (["0", "1", "2", "3"], ["4", "5"], 4)
    assert reported == [0.02, 0.04]
