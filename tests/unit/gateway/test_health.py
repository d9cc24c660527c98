"""How the parts do: readiness, the minutes' ring, and dead letters."""

import asyncio

import grpc
import numpy as np
import pytest
from fakes.gateway import MemoryStreamStatus, letter_at
from freshet.v1 import gateway_pb2
from gateway_scene import Scene
from prometheus_client import CollectorRegistry

from services.gateway.adapters.probes import ProbedParts
from services.gateway.metrics import MINUTES, PARTS, Minutes
from services.platform.config import ProcessSettings
from services.platform.errors import DependencyUnavailable, InvalidRequest, NotFound
from services.platform.rpc.server import HealthState, RpcServer
from services.platform.stream.records import Position

GATEWAY = PARTS.index("gateway")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_minute_has_counts_and_percentiles_within_five_per_cent() -> None:
    clock = Clock()
    minutes, rng = Minutes(clock), np.random.default_rng(5)
    calls, times = minutes.of("gateway"), rng.lognormal(-4.0, 1.0, 5_000)
    for number, seconds in enumerate(times):
        calls.add(float(seconds), failed=number % 10 == 0)
    clock.now += 61.0
    calls_after = minutes.last(2)[2][GATEWAY]["calls"].tolist()
    assert calls_after == [5_000, 0]
    row = minutes.last(2)[2][GATEWAY][0]
    assert row["failed"] == 500
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        assert row[name] == pytest.approx(1000 * np.quantile(times, share), rel=0.05)
    assert minutes.last(1)[1] == pytest.approx(1.0)


def test_the_ring_has_the_last_day_in_less_than_two_megabytes() -> None:
    clock = Clock()
    minutes = Minutes(clock)
    assert minutes._rows.nbytes < 2 << 20
    for number in range(MINUTES + 100):
        for _ in range(number % 7):
            minutes.of("redis").add(0.001)
        clock.now += 60.0
        minutes.roll()
    first_ms, _, rows = minutes.last(MINUTES)
    found = rows[PARTS.index("redis")]["calls"].tolist()
    assert found == [number % 7 for number in range(101, MINUTES + 100)] + [0]
    assert first_ms == minutes.since_ms + 101 * 60_000
    assert [len(of_part) for of_part in minutes.last(0)[2]] == [0] * len(PARTS)


def test_a_part_was_not_ready_in_a_minute_where_one_look_found_so() -> None:
    clock = Clock()
    minutes = Minutes(clock)
    for problem, lag in (("", 3.0), ("no answer", 9.0), ("", 5.0)):
        minutes.seen({"encoder": problem}, {"encoder": lag})
        clock.now += 10.0
    clock.now += 60.0
    minutes.seen({"encoder": ""})
    rows = minutes.last(2)[2][PARTS.index("encoder")]
    assert (rows["was_ready"].tolist(), rows["lag"].tolist()) == ([False, True], [9.0, -1.0])


async def test_health_names_what_is_not_ready_and_what_does_not_work_meanwhile(scene: Scene) -> None:
    scene.parts.found["encoder"] = "no answer at here:1"
    await scene.servicer.Recommend(gateway_pb2.RecommendRequest(user_id="nobody", k=2), None)
    scene.metrics.called("Recommend", "OK", 0.01)
    scene.metrics.called("ForgetUser", "OK", 5.0)
    found = await scene.servicer.GetHealth(gateway_pb2.GetHealthRequest(minutes=5), None)
    parts = {one.name: one for one in found.parts}
    assert list(parts) == ["gateway", "kafka", "redis", "encoder", "candidates"]
    assert {name: one.ready for name, one in parts.items()} == dict.fromkeys(parts, True) | {"encoder": False}
    assert parts["encoder"].problem == "no answer at here:1"
    assert [name for name, one in parts.items() if not one.started] == ["encoder"]
    assert "states stand still" in parts["encoder"].effect
    assert (list(parts["gateway"].calls), list(parts["gateway"].degraded)) == ([1], [1])
    # One of partition 3, whose watermark is 7 and whose end is 9, and two of partition 4.
    assert (parts["encoder"].lag_unit, list(parts["encoder"].lag)) == ("records", [3.0])
    assert list(parts["encoder"].was_ready) == [False]
    assert found.first_minute == found.since
    many = await asyncio.gather(*(scene.handlers.get_health(1) for _ in range(20)))
    assert (len(many), scene.parts.looks) == (20, 1)
    with pytest.raises(InvalidRequest, match="minutes=1441 allowed: 0-1440"):
        await scene.handlers.get_health(1441)


async def test_processes_give_their_own_reasons() -> None:
    health = HealthState()
    health.set_ready(False, "the disk is full")
    server = RpcServer(
        process="peers",
        settings=ProcessSettings(port=0, metrics_port=0),
        add_services=lambda _: [],
        health_state=health,
        registry=CollectorRegistry(),
    )
    await server.start()

    async def store() -> str:
        raise DependencyUnavailable("Redis is away")

    here = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(here) as there, grpc.aio.insecure_channel("127.0.0.1:1") as nowhere:
        checked = {
            "encoder": [(here, there, "")],
            "candidates": [(here, there, "freshet.v1.CandidatesService/m9")],
            "generator": [("127.0.0.1:1", nowhere, "")],
            "refresher": [],
        }
        parts = ProbedParts(checked, stream=MemoryStreamStatus(log_reachable=False), store=store, inside=["reranker"])
        found = await parts.problems(2.0)
        health.set_ready(True)
        await health.publish()
        later = await parts.problems(2.0)
    await server.drain()
    assert found["encoder"] == f"{here}: the disk is full"
    assert found["candidates"].startswith(f"{here} serves another model")
    assert found["generator"] == "no answer at 127.0.0.1:1 (UNAVAILABLE)"
    assert (found["redis"], found["reranker"]) == ("Redis is away", "")
    assert found["kafka"]
    assert "refresher" not in found
    assert later["encoder"] == ""


async def test_dead_letters_are_listed_newest_first_and_replayed_once(scene: Scene) -> None:
    scene.letters.letters += [letter_at(Position(1, offset), written_ms=offset) for offset in (9, 8, 7)]
    request = gateway_pb2.ListDeadLettersRequest(topic="interactions", max_letters=2)
    listed = await scene.servicer.ListDeadLetters(request, None)
    assert [(one.position.partition, one.position.offset) for one in listed.letters] == [(1, 9), (1, 8)]
    assert (listed.has_older, listed.letters[0].written_time.ToMilliseconds()) == (True, 9)
    replay = gateway_pb2.ReplayDeadLetterRequest(topic="interactions", position=listed.letters[0].position)
    replay.preview = True
    before = await scene.servicer.ReplayDeadLetter(replay, None)
    assert (before.left_out, before.event_id, before.HasField("written_to")) == ("", "e-1", False)
    replay.preview = False
    assert (await scene.servicer.ReplayDeadLetter(replay, None)).written_to.offset == 99
    again = await scene.servicer.ReplayDeadLetter(replay, None)
    assert (again.left_out, again.HasField("written_to")) == ("it was replayed before", False)
    listed = await scene.servicer.ListDeadLetters(request, None)
    assert [one.HasField("replayed_to") for one in listed.letters] == [True, False]
    replay.position.offset = 1
    with pytest.raises(NotFound):
        await scene.servicer.ReplayDeadLetter(replay, None)


@pytest.mark.parametrize(
    ("call", "request_", "message"),
    [
        ("ListDeadLetters", gateway_pb2.ListDeadLettersRequest(topic="x"), "topic='x' allowed: "),
        ("ListDeadLetters", gateway_pb2.ListDeadLettersRequest(max_letters=201), "max_letters=201 allowed: 0-200"),
        ("ReplayDeadLetter", gateway_pb2.ReplayDeadLetterRequest(), "topic='' allowed: interactions"),
        (
            "ReplayDeadLetter",
            gateway_pb2.ReplayDeadLetterRequest(topic="items", position={"offset": -1}),
            "position='0:-1' allowed: as ListDeadLetters has it",
        ),
    ],
)
async def test_bad_requests_for_dead_letters_are_refused_by_name(call: str, request_: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await getattr(Scene().servicer, call)(request_, None)
