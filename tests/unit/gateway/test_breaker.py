"""The memory of failure: short, one probe at a time, and fair."""

import asyncio
import time

import pytest
from structlog.testing import capture_logs

from services.gateway.dependencies import AcknowledgedLag, Breaker, LoopStalls
from services.platform.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    FreshetError,
    Overloaded,
    PreconditionFailed,
)
from services.platform.stream.records import Position


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Dependency:
    def __init__(self) -> None:
        self.failure: FreshetError | None = None
        self.calls = 0
        self.hold: asyncio.Event | None = None

    async def __call__(self) -> str:
        self.calls += 1
        if self.hold is not None:
            await self.hold.wait()
        if self.failure is not None:
            raise self.failure
        return "ok"


async def test_open_after_a_failure_then_one_probe_then_closed() -> None:
    clock, dependency = Clock(), Dependency()
    breaker = Breaker("it", open_seconds=0.5, clock=clock)
    dependency.failure = DependencyUnavailable("gone")
    assert await breaker.attempt(dependency) is None
    with pytest.raises(DependencyUnavailable, match="it failed a moment ago: gone"):
        await breaker.run(dependency)
    assert (dependency.calls, breaker.closed) == (1, False)
    clock.now += 0.6
    dependency.failure, dependency.hold = None, asyncio.Event()
    probe = asyncio.create_task(breaker.attempt(dependency))
    await asyncio.sleep(0)
    assert await breaker.attempt(dependency) is None
    assert dependency.calls == 2
    dependency.hold.set()
    assert await probe == "ok"
    assert breaker.closed


async def test_a_cancelled_probe_lets_the_next_one_through() -> None:
    clock, dependency = Clock(), Dependency()
    breaker = Breaker("it", open_seconds=0.5, clock=clock)
    dependency.failure = DependencyUnavailable("gone")
    await breaker.attempt(dependency)
    clock.now += 0.6
    dependency.failure, dependency.hold = None, asyncio.Event()
    probe = asyncio.create_task(breaker.attempt(dependency))
    await asyncio.sleep(0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    dependency.hold = None
    assert await breaker.attempt(dependency) == "ok"


async def test_time_outs_open_it_from_three_on_and_only_patient_ones() -> None:
    dependency = Dependency()
    breaker = Breaker("it", clock=Clock())
    late = DeadlineExceeded("slow")
    for failure, patient in [(late, True), (late, True), (late, False), (None, True)]:
        dependency.failure = failure
        await breaker.attempt(dependency, patient=patient)
    assert breaker.closed
    dependency.failure = late
    await breaker.attempt(dependency)
    assert not breaker.closed


async def test_a_few_failures_among_many_answers_are_no_outage() -> None:
    clock, dependency = Clock(), Dependency()
    breaker = Breaker("it", clock=clock)
    for number in range(200):
        clock.now += 0.01
        dependency.failure = DependencyUnavailable("reset") if number % 4 == 0 and number else None
        await breaker.attempt(dependency)
        assert breaker.closed
    dependency.failure = DependencyUnavailable("gone")
    for _ in range(20):
        await breaker.attempt(dependency)
    assert not breaker.closed
    assert dependency.calls < 220


@pytest.mark.parametrize("failure", [DependencyUnavailable("no answer"), DeadlineExceeded("slow")])
async def test_what_fails_while_our_own_loop_stands_still_is_no_outage(failure: FreshetError) -> None:
    clock, stalled_s = Clock(), 0.3
    breaker = Breaker("it", clock=clock, stalled_s=lambda since: stalled_s)

    async def call() -> None:
        clock.now += 0.4
        raise failure

    for _ in range(5):
        await breaker.attempt(call)
    assert breaker.closed
    stalled_s = 0.01
    for _ in range(5):
        await breaker.attempt(call)
    assert not breaker.closed


async def test_a_loop_that_stands_still_is_seen() -> None:
    stalls, began = LoopStalls(), time.monotonic()
    stalls.watch(10.0)
    await asyncio.sleep(0.05)
    blocked = time.monotonic()
    time.sleep(0.2)  # noqa: ASYNC251 - what is tested
    await asyncio.sleep(0.05)
    assert stalls.since(began) >= 0.15
    assert stalls.since(blocked) >= 0.15
    assert stalls.since(time.monotonic()) == 0.0
    stalls.stop()


async def test_a_busy_dependency_is_not_a_dead_one() -> None:
    dependency = Dependency()
    breaker = Breaker("it", clock=Clock())
    dependency.failure = Overloaded("full")
    assert await breaker.attempt(dependency) is None
    assert breaker.closed


async def test_a_replica_of_another_model_is_no_outage_and_is_named_in_the_log_now_and_then() -> None:
    clock, dependency = Clock(), Dependency()
    breaker = Breaker("it", clock=clock)
    dependency.failure = PreconditionFailed("holds model m2")
    with capture_logs() as logs:
        for _ in range(5):
            assert await breaker.attempt(dependency) is None
            clock.now += 4
    assert (breaker.closed, dependency.calls) == (True, 5)
    assert [line["reason"] for line in logs if line["event"] == "dependency_refused"] == ["holds model m2"] * 2


async def test_after_an_outage_a_refusal_for_another_model_shows_that_it_is_over() -> None:
    clock, dependency = Clock(), Dependency()
    breaker = Breaker("it", open_seconds=0.5, clock=clock)
    dependency.failure = DependencyUnavailable("gone")
    await breaker.attempt(dependency)
    clock.now += 0.6
    dependency.failure = PreconditionFailed("holds model m2")
    await breaker.attempt(dependency)
    assert breaker.closed


def test_lag_shows_after_the_grace_and_ends_with_the_watermark() -> None:
    clock = Clock()
    lag = AcknowledgedLag(grace_seconds=2.0, clock=clock)
    assert not lag.behind(0, None)
    lag.acknowledged(Position(0, 5))
    clock.now += 1.9
    assert not lag.behind(0, 4)
    clock.now += 0.2
    assert lag.behind(0, 4)
    assert lag.behind(0, None)
    assert not lag.behind(1, None)
    assert not lag.behind(0, 5)


def test_answers_stand_back_before_they_are_behind_while_events_are_applied() -> None:
    clock = Clock()
    lag = AcknowledgedLag(grace_seconds=2.0, clock=clock)
    lag.acknowledged(Position(0, 5))
    assert not lag.reads_yield(0, 1)
    clock.now += 0.6
    assert lag.reads_yield(0, 2)
    assert not lag.writes_yield(0)
    assert not lag.behind(0, 2)
    clock.now += 0.5
    assert lag.reads_yield(0, 3)
    assert lag.writes_yield(0)
    assert not lag.reads_yield(0, 5)
    assert not lag.writes_yield(0)
    lag.acknowledged(Position(0, 9))
    clock.now += 0.6
    # The last of before was applied within the last second.
    assert lag.reads_yield(0, 5)
    clock.now += 0.6
    # Nothing moves: fewer calls would help nobody.
    assert lag._behind_s(0, 5) > 1
    assert not lag.reads_yield(0, 5)
    assert not lag.writes_yield(0)
    assert not lag.writes_yield(1)


def test_lag_of_a_long_outage_is_remembered_within_bounds() -> None:
    clock = Clock()
    lag = AcknowledgedLag(grace_seconds=2.0, clock=clock)
    for offset in range(10_000):
        clock.now += 0.01
        lag.acknowledged(Position(0, offset))
    assert lag.behind(0, 0)
    assert not lag.behind(0, 9_999)


def test_lag_of_the_last_event_of_a_burst_shows_too() -> None:
    clock = Clock()
    lag = AcknowledgedLag(grace_seconds=2.0, clock=clock)
    for offset in range(3):
        lag.acknowledged(Position(0, offset))
        clock.now += 0.01
    clock.now += 3
    assert lag.behind(0, 1)
    assert not lag.behind(0, 2)
