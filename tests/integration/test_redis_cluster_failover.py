"""Masters of a Redis Cluster die under load: contents end as the log has them, answers are marked, and none fails.

Two clients at once: a trial of tests/chaos, whose checker compares histories and seen items with a replay of Kafka, and
one that asks twenty times a second and notes what each answer says.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import gateway_pb2
from traffic import Answer, Traffic

from services.algorithms.bundles.model_bundle import load_bundle
from services.platform.stream.topic import NUM_PARTITIONS
from services.user_state.reader import StateReader

sys.path.append(str(Path(__file__).parents[1] / "chaos"))

pytestmark = [pytest.mark.integration, pytest.mark.cluster, pytest.mark.timeout(600)]

KILL, TAIL = "SIGKILL a master of Redis", "a master of Redis loses its tail"


@pytest.fixture
def clustered(tmp_path: Path, small_bundle: Path) -> Iterator[Any]:
    from engines import Clustered

    stack = Clustered(tmp_path / "clustered")
    stack.use_bundle(small_bundle)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


async def test_masters_that_die_under_load_cost_marks_and_nothing_else(clustered: Any) -> None:
    from real import RealTrial

    trial = RealTrial(clustered, 0, [KILL, TAIL, KILL])
    found: dict[str, Any] = {}
    doing = threading.Thread(target=lambda: found.update(trial.run()), daemon=True)
    items = list(load_bundle(clustered.bundle).item_ids[:40])
    target = clustered.address("gateway")
    async with Traffic(target=target, redis_url=clustered.redis_url, item_ids=items, prefix="asking") as traffic:
        doing.start()
        await asyncio.to_thread(doing.join)
        await traffic.stop_writing()
        await traffic.applied(within_s=60)
        answers = traffic.answers
        await whole(clustered, [*trial.users, *map(traffic.user, range(traffic.users))])
    down = outages(answers)
    sys.stderr.write(f"{found}\n{len(answers)} answers; marked for {down} s\n")
    assert found["violations"] == []
    assert [fault["kind"] for fault in found["faults"]] == [KILL, TAIL, KILL]
    assert len(answers) > 100
    assert {answer.status for answer in answers} == {grpc.StatusCode.OK}
    assert all(answer.items == 10 for answer in answers)
    assert down


async def whole(stack: Any, users: list[str]) -> None:
    """Every user's state reflects her whole history, and nobody is lost."""
    model = load_bundle(stack.bundle).model_version
    reader, deadline = StateReader(stack.redis_url, timeout_s=2), time.monotonic() + 60
    try:
        assert len((await reader.read_progress())[1]) == NUM_PARTITIONS
        for user in users:
            while True:
                view = await reader.read_user(user, model)
                if not view.is_lost and (view.reaches_history or not view.has_history):
                    break
                assert time.monotonic() < deadline, (user, view)
                await asyncio.sleep(0.1)
    finally:
        await reader.close()


def outages(answers: list[Answer]) -> list[float]:
    """Seconds of each time in which answers said that the store was down; two seconds without one end it."""
    marked = [one.at for one in answers if gateway_pb2.DEGRADATION_STATE_STORE_DOWN in one.degradations]
    found: list[list[float]] = []
    for at in marked:
        if not found or at > found[-1][1] + 2.0:
            found.append([at, at])
        found[-1][1] = at
    return [round(last - first, 2) for first, last in found]
