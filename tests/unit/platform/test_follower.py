"""The loop that follows topics: what it says of turns that fail or hang, to its log, to health, and in its lag."""

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from services.platform.errors import DependencyUnavailable
from services.platform.rpc.server import HealthState
from services.platform.stream.follower import Follower, TurnClock

SERVICES = Path(__file__).parents[3] / "services"


class Loop(Follower):
    """Turns that raise `error`, or wait for `goes_on`; what became known of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__("loop", lag_every_s=0.0, backoff_s=0.001, max_backoff_s=0.004, **options)
        self.error: Exception | None = None
        self.goes_on, self.hangs = threading.Event(), threading.Event()
        self.goes_on.set()
        self.lags: list[bool] = []
        self.finished = False

    def turn(self) -> int:
        if not self.goes_on.is_set():
            self.hangs.set()
            self.goes_on.wait(20)
        if self.error is not None:
            raise self.error
        self.ready()
        time.sleep(0.001)
        return 0

    def report_lag(self, *, asks: bool) -> None:
        self.lags.append(asks)

    def finish(self) -> None:
        self.finished = True


def test_it_complains_once_of_each_kind_says_a_stall_and_exports_the_lag_meanwhile() -> None:
    said: list[str] = []
    loop = Loop(on_ready=lambda: said.append("ready"), on_stall=lambda: said.append("stalled"))
    with capture_logs() as logs:
        loop.step()
        for error in (DependencyUnavailable("a"), DependencyUnavailable("b"), ValueError("c"), ValueError("d")):
            loop.fail(error)
        assert loop.bugs == 2
        loop.step()
    assert said == ["ready", "stalled", "ready"]
    assert [entry["error"] for entry in logs if entry["event"] == "follower_waits"] == [
        "DependencyUnavailable",
        "ValueError",
    ]
    assert [entry["after"] for entry in logs if entry["event"] == "follower_recovered"] == ["ValueError"]
    assert loop.lags == [False, True, True, True, True, False]
    assert loop.bugs == 0


def test_what_fails_before_it_was_ready_is_no_stall() -> None:
    said: list[str] = []
    loop = Loop(on_ready=lambda: said.append("ready"), on_stall=lambda: said.append("stalled"))
    for _ in range(3):
        loop.fail(DependencyUnavailable("not yet"))
    loop.step()
    assert said == ["ready"]


class Servicer:
    """What the health service is told."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[int] = asyncio.Queue()

    async def set(self, service: str, status: int) -> None:
        self._told.put_nowait(status)

    async def until(self, status: int) -> None:
        async with asyncio.timeout(20):
            while await self._told.get() != status:
                pass


async def test_a_turn_that_hangs_makes_the_process_not_serving_until_it_goes_on() -> None:
    now_s, kinds = [0.0], health_pb2.HealthCheckResponse
    health, servicer = HealthState(look_every_s=0.001), Servicer()
    loop = Loop(on_ready=lambda: health.set_ready(True), turns=TurnClock(stuck_s=60.0, clock=lambda: now_s[0]))
    health.watch("loop", loop.turns)
    await health.attach(servicer, [])  # type: ignore[arg-type]
    loop.start()
    try:
        await servicer.until(kinds.SERVING)
        loop.goes_on.clear()
        assert await asyncio.to_thread(loop.hangs.wait, 20)
        now_s[0] += 61
        await servicer.until(kinds.NOT_SERVING)
        loop.goes_on.set()
        await servicer.until(kinds.SERVING)
    finally:
        loop.goes_on.set()
        await asyncio.to_thread(loop.stop)
        await health.drain()
    assert loop.finished


@pytest.mark.parametrize("process", ["gateway", "encoder", "candidates", "reranker", "refresher", "generator"])
def test_every_follower_of_a_process_is_watched_by_its_health(process: str) -> None:
    text = (SERVICES / process / "bootstrap.py").read_text()
    followers = re.findall(r"(\w+) = (?:CatalogueFollower|ClicksFollower|Consumer|Refresher)\(", text)
    assert followers
    for name in followers:
        assert f", {name}.turns)" in "".join(re.findall(r"health\.watch\(.*\)", text))
