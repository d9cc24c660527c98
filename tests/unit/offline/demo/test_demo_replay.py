"""The replay process against an in-memory gateway (a real gRPC server) and an in-memory log."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc
from google.protobuf.message import DecodeError

from services.offline.demo.outside_producer import OnAcknowledged
from services.offline.demo.plan import ReplayEvent, ReplayPlan, ReplayResult
from services.offline.demo.replay import Replay, with_key

EPOCH = "ab12"


class LookedUp(dict[str, tuple[int, int]]):
    """Positions by event id that remember who was looked up, and what was found."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, int] | None]] = []

    def get(self, event_id: str) -> tuple[int, int] | None:  # type: ignore[override]
        self.found.append((event_id, super().get(event_id)))
        return self.found[-1][1]


class MemoryLog:
    """One partition that acknowledges from a thread of its own, as the real producer does."""

    def __init__(self, on_acknowledged: OnAcknowledged, records: list[tuple[float, str, bytes]]) -> None:
        self._on_acknowledged = on_acknowledged
        self.records = records
        self.positions = LookedUp()
        self.last_offsets: dict[int, int] = {}
        self.acknowledge_ms: list[float] = []
        self.errors: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def send(self, event_id: str, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]] = ()) -> None:
        offset = len(self.records)
        self.records.append((time.monotonic(), event_id, value))
        thread = threading.Thread(target=self._acknowledge, args=(event_id, offset))
        thread.start()
        self._threads.append(thread)

    def _acknowledge(self, event_id: str, offset: int) -> None:
        time.sleep(0.002)
        self.last_offsets[0] = max(self.last_offsets.get(0, -1), offset)
        if event_id not in self.positions:
            self.positions[event_id] = (0, offset)
            self._on_acknowledged(event_id, 0, offset, time.monotonic())

    def wait(self, timeout_s: float) -> bool:
        for thread in self._threads:
            thread.join(timeout_s)
        return True

    def close(self) -> None:
        self.wait(5)


class FollowingGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers from the log: a user's position is their newest record; slow for the users named."""

    def __init__(self, records: list[tuple[float, str, bytes]], slow_users: frozenset[str], secret: str) -> None:
        self._records = records
        self._secret = secret
        self._slow_users = slow_users
        self.asked: list[tuple[float, gateway_pb2.RecommendRequest]] = []

    async def Recommend(self, request, context):
        if self._secret and ("authorization", f"Bearer {self._secret}") not in context.invocation_metadata():
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no API key")
        if request.k > 1 and request.user_id in self._slow_users:
            await asyncio.sleep(0.3)
        self.asked.append((time.monotonic(), request))
        answer = gateway_pb2.RecommendResponse(state_source="stored", token_honoured=True)
        answer.items.add(item_id="i1", score=0.5, source="mol")
        for offset, (_, _, value) in enumerate(self._records):
            try:
                own = events_pb2.Interaction.FromString(value).user_id == request.user_id
            except DecodeError:
                continue
            if own:
                answer.state_position.offset = offset
        return answer


def plan_of(num_events: int, num_users: int, **settings: Any) -> ReplayPlan:
    events = [
        ReplayEvent(
            event_id=f"e{position}",
            user_id=f"u{position % num_users}",
            item_id="i1",
            type="rating",
            value=4.0,
            time_s=1000 + position,
            predicted=position % 5 == 0,
            previous=position - num_users if position >= num_users else -1,
            known=True,
        )
        for position in range(num_events)
    ]
    defaults: dict[str, Any] = {"rate_per_s": 200.0, "warm_up_calls": 3}
    defaults |= {"lead_ms": 40.0, "freshness_every": 20, "freshness_poll_ms": 5.0}
    defaults |= {"timeout_ms": 60_000.0, "freshness_timeout_ms": 60_000.0}  # a slow machine fails no test
    return ReplayPlan(gateway="", bootstrap="", topic="", epoch=EPOCH, events=events, **{**defaults, **settings})


async def replayed(
    plan: ReplayPlan, slow_users: frozenset[str] = frozenset(), secret: str = ""
) -> tuple[ReplayResult, MemoryLog, FollowingGateway]:
    records: list[tuple[float, str, bytes]] = []
    logs: list[MemoryLog] = []

    def make_log(on_acknowledged: OnAcknowledged) -> Any:
        logs.append(MemoryLog(on_acknowledged, records))
        return logs[0]

    gateway = FollowingGateway(records, slow_users, secret)
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            result = await Replay(plan, with_key(channel), make_log).run()
    finally:
        await server.stop(grace=None)
    return result, logs[0], gateway


async def test_every_event_is_sent_once_in_each_users_order() -> None:
    plan = plan_of(200, 20, duplicate_every=1000, malformed_every=1000)
    result, log, _ = await replayed(plan)
    assert sorted(result.acknowledged) == sorted(event.event_id for event in plan.events)
    assert result.unacknowledged == []
    for user in range(20):
        sent = [int(event_id[1:]) for _, event_id, _ in log.records if int(event_id[1:]) % 20 == user]
        assert sent == sorted(sent)


async def test_the_gateway_is_shown_the_key_and_one_that_refuses_ends_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(40, 8)
    with pytest.raises(RuntimeError, match="refuses the demo: no API key"):
        await replayed(plan, secret="open")
    monkeypatch.setenv("FRESHET_API_KEY", "open")
    result, _, _ = await replayed(plan, secret="open")
    assert len(result.predictions) == 8
    assert {found.error for found in result.predictions} == {""}


async def test_each_predicted_event_is_asked_twice_and_before_it_is_sent() -> None:
    plan = plan_of(200, 20)
    result, log, gateway = await replayed(plan)
    assert [p.position for p in sorted(result.predictions, key=lambda p: p.position)] == list(range(0, 200, 5))
    assert len(result.predictions_with_token) == 40
    sent = {event_id: when for when, event_id, _ in log.records}
    asked: dict[str, list[float]] = {}
    for when, request in gateway.asked[plan.warm_up_calls :]:
        if request.k > 1:
            asked.setdefault(request.user_id, []).append(when)
    for user, moments in asked.items():
        predicted = [e for e in plan.events if e.user_id == user and e.predicted]
        for event, first in zip(predicted, range(0, len(moments), 2), strict=True):
            assert max(moments[first : first + 2]) <= sent[event.event_id]


async def test_a_prediction_is_asked_as_of_its_events_time() -> None:
    plan = plan_of(60, 10)
    _, _, gateway = await replayed(plan)
    asked = [(r.user_id, r.as_of.ToSeconds()) for _, r in gateway.asked[plan.warm_up_calls :] if r.k > 1]
    wanted = [(event.user_id, event.time_s) for event in plan.events if event.predicted]
    assert sorted(asked) == sorted(2 * wanted)


async def test_the_token_is_that_of_the_users_event_before() -> None:
    # 200 ms from one event of a user to the next: on a quiet machine each acknowledgement is there in time.
    plan = plan_of(100, 10, rate_per_s=50.0, duplicate_every=1000, malformed_every=1000)
    result, log, gateway = await replayed(plan)
    before = {plan.events[e.previous].event_id for e in plan.events if e.predicted and e.previous >= 0}
    assert len(before) == 18  # 20 predicted events, two of them the first of their user
    looked_up = [(event_id, found) for event_id, found in log.positions.found if event_id in before]
    assert sorted(event_id for event_id, _ in looked_up) == sorted(before)
    tokens = [request.freshness_token for _, request in gateway.asked if request.HasField("freshness_token")]
    assert {token.epoch for token in tokens} == {EPOCH}
    known = [found for _, found in looked_up if found is not None]
    assert sorted((token.partition, token.offset) for token in tokens) == sorted(known)
    assert all(found == tuple(result.acknowledged[event_id]) for event_id, found in looked_up if found is not None)


async def test_an_event_waits_for_its_late_prediction_and_nobody_elses_does() -> None:
    plan = plan_of(100, 20, duplicate_every=1000, malformed_every=1000)
    result, log, _ = await replayed(plan, slow_users=frozenset({"u0"}))
    assert result.late_sends >= 1
    started = log.records[0][0]
    on_time = [when - started for when, event_id, _ in log.records if event_id == "e19"]
    held = [when - started for when, event_id, _ in log.records if event_id == "e0"]
    assert on_time[0] < held[0]
    own = [int(event_id[1:]) for _, event_id, _ in log.records if int(event_id[1:]) % 20 == 0]
    assert own == sorted(own)
    slow = [p.latency_ms for p in result.predictions if plan.events[p.position].user_id == "u0"]
    assert min(slow) >= 300


async def test_freshness_is_measured_from_the_acknowledgement_until_an_answer_reflects_it() -> None:
    plan = plan_of(200, 20)
    result, _, _ = await replayed(plan)
    assert len(result.freshness_ms) == 10
    assert result.unreflected == 0
    assert all(value > 0 for value in result.freshness_ms)


async def test_broken_and_repeated_records_are_sent_and_counted() -> None:
    plan = plan_of(600, 60, rate_per_s=1000.0, duplicate_every=100, malformed_every=200)
    result, log, _ = await replayed(plan)
    assert result.malformed_sent == 3
    assert result.duplicates_sent == 2  # of events 400 positions earlier: at 500 and 600
    assert len(log.records) == 600 + 3 + 2
    assert len(result.acknowledged) == 600 + 3
    broken = [value for _, event_id, value in log.records if event_id.startswith("malformed")]
    for value in broken:
        with pytest.raises(DecodeError):
            events_pb2.Interaction.FromString(value)
    assert result.last_offsets == {0: 604}
