"""Writers: whole requests are checked before anything is written, an acknowledgement is never lost or invented."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes.gateway import MemoryUserStates
from gateway_scene import Scene

from services.contracts.topics.interactions import Interaction
from services.gateway.domain import FreshnessToken
from services.gateway.stages import Limits
from services.gateway.write import record
from services.platform import request_context
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, InvalidRequest

DOWN = DependencyUnavailable("Kafka is away")


def event(item_id: str = "a", **changes: Any) -> Interaction:
    return Interaction(**{"user_id": "ann", "item_id": item_id, "event_time_ms": 1000, **changes})


async def arriving(*interactions: Interaction) -> AsyncIterator[Interaction]:
    for interaction in interactions:
        yield interaction


async def test_a_receipt_carries_the_token_of_its_moment(scene: Scene) -> None:
    receipts = await scene.record([event("a", event_id="e1"), event("b", event_id="e2")])
    assert [receipt.event_id for receipt in receipts] == ["e1", "e2"]
    assert [receipt.token for receipt in receipts] == [FreshnessToken("epoch-1", 3, n) for n in (0, 1)]
    assert [interaction.item_id for interaction in scene.interactions.written] == ["a", "b"]


async def test_missing_event_ids_are_assigned_and_returned(scene: Scene) -> None:
    receipts = await scene.record([event(), event()])
    written = [interaction.event_id for interaction in scene.interactions.written]
    assert [receipt.event_id for receipt in receipts] == written
    assert len(set(written)) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"user_id": ""}, r"interactions\[1\].user_id"),
        ({"item_id": ""}, r"interactions\[1\].item_id"),
        ({"item_id": "x" * 129}, r"interactions\[1\].item_id='text of 129 bytes' allowed: 1-128"),
        ({"value": math.nan}, r"interactions\[1\].value=nan allowed: a finite number"),
        ({"value": math.inf}, r"interactions\[1\].value=inf"),
        ({"event_time_ms": 10**15}, r"interactions\[1\].event_time=.*at most a day in the future"),
        ({"type": "t" * 65}, r"interactions\[1\].type="),
        ({"context": {"a": "b" * 300}}, r"interactions\[1\].context="),
        ({"undoes_event_id": "e0"}, r"interactions\[1\].item_id='set' allowed: empty when undoes_event_id is set"),
    ],
)
async def test_one_invalid_interaction_refuses_the_request_before_anything_is_written(
    bad: dict[str, Any], message: str, scene: Scene
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await scene.record([event(), event(**bad)])
    assert scene.interactions.written == []


@pytest.mark.parametrize("count", [0, 1001])
async def test_batches_outside_the_limits_are_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"interactions='{count} interactions' allowed: 1-1000"):
        await Scene().record([event()] * count)


async def test_kafka_down_is_unavailable_with_a_retry_hint_and_fails_fast_after() -> None:
    scene = Scene(limits=Limits(breaker_s=30))
    scene.interactions.failure = DOWN
    for _ in range(3):
        with pytest.raises(DependencyUnavailable) as caught:
            await scene.record([event()])
        assert caught.value.retry_after_ms == 500
    assert scene.interactions.calls == 1


async def test_a_partly_acknowledged_batch_says_so(scene: Scene) -> None:
    scene.interactions.refuse_after = 2
    scene.interactions.refusal = DependencyUnavailable("away")
    with pytest.raises(DependencyUnavailable, match=r"2 of 4 were acknowledged.*same event ids"):
        await scene.record([event(event_id=str(n)) for n in range(4)])


async def test_a_silent_stream_is_unavailable_before_the_callers_deadline(scene: Scene) -> None:
    scene.interactions.delay_s = 10

    async def call(seconds: float) -> None:
        request_context.deadline.set(time.monotonic() + seconds)
        await scene.record([event()])

    with pytest.raises(DependencyUnavailable, match="no acknowledgement within") as caught:
        await asyncio.create_task(call(0.5))
    assert caught.value.retry_after_ms == 500
    with pytest.raises(DeadlineExceeded):
        await asyncio.create_task(call(0.1))


async def test_redis_down_never_costs_a_writer_the_acknowledgement(scene: Scene) -> None:
    scene.states.failure = DOWN
    (receipt,) = await scene.record([event()])
    assert receipt.token == FreshnessToken("", 3, 0)


async def test_a_bad_message_ends_a_stream_and_says_what_was_written(scene: Scene) -> None:
    with pytest.raises(InvalidRequest, match=r"stream\[1\].interaction.value=nan .*1 earlier messages were written"):
        await scene.record.stream(arriving(event(), event(value=math.nan), event()))
    assert len(scene.interactions.written) == 1


async def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 1 message"):
        await Scene().record.stream(arriving())


async def test_kafka_failing_ends_a_stream() -> None:
    scene = Scene(limits=Limits(breaker_s=30))
    scene.interactions.refuse_after = 3
    scene.interactions.refusal = DependencyUnavailable("away")
    with pytest.raises(DependencyUnavailable, match="acknowledged"):
        await scene.record.stream(arriving(*(event() for _ in range(50))))
    assert len(scene.interactions.written) == 3


async def test_a_stream_that_begins_while_kafka_comes_back_is_written_whole() -> None:
    scene = Scene(limits=Limits(breaker_s=0.01))
    scene.interactions.failure = DOWN
    with pytest.raises(DependencyUnavailable):
        await scene.record([event()])
    scene.interactions.failure = None
    await asyncio.sleep(0.02)
    receipts = await scene.record.stream(arriving(*(event(str(n)) for n in range(50))))
    assert len(receipts) == len(scene.interactions.written) == 50


async def test_a_message_that_cannot_be_read_ends_a_stream_like_a_bad_one(scene: Scene) -> None:

    async def unreadable() -> AsyncIterator[Interaction]:
        yield event()
        raise InvalidRequest.of("stream[1].interaction.event_time.nanos", -1, "0-999999999")

    with pytest.raises(InvalidRequest, match=r"nanos=-1 .*; 1 earlier messages were written"):
        await scene.record.stream(unreadable())
    assert len(scene.interactions.written) == 1


async def test_the_epoch_is_read_again_once_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_EPOCH_S", 60.0)
    states = MemoryUserStates()
    epoch = record.EpochCache(states)
    assert [await epoch.current() for _ in range(3)] == ["epoch-1"] * 3
    assert states.calls == 1
    monkeypatch.setattr(record, "_EPOCH_S", 0.0)
    states.current_epoch = "epoch-2"
    assert await epoch.current() == "epoch-2"
