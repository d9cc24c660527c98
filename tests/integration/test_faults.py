"""Each part killed once (SIGKILL) while events stream, then started again.

What must hold every time: recommendations go on in the way of the design's table "When something fails", every
acknowledged event is applied exactly once, and the answers are whole again afterwards.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
from freshet.v1 import gateway_pb2
from traffic import Answer, Traffic

from services.algorithms.bundles.model_bundle import load_bundle
from services.stack import Stack
from services.stack.components.process import Process

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

QUIET_S = 2.0
DEAD_S = 4.0
# From the kill until the gateway has noticed: its probes and breakers work in half seconds.
NOTICED_S = 1.5


def traffic_for(stack: Stack, prefix: str) -> Traffic:
    items = load_bundle(stack.bundle).item_ids[:200]
    return Traffic(stack.address("gateway"), stack.redis_url, list(items), f"{prefix}-{time.time_ns()}")


async def kill_while_streaming(stack: Stack, traffic: Traffic, part: str) -> list[Answer]:
    """Stream, kill `part`, go on, start it again, finish. The answers asked while it was known to be dead."""
    await traffic.all_well(for_s=QUIET_S, within_s=60)
    killed = time.monotonic()
    stack.kill(part)
    try:
        await asyncio.sleep(DEAD_S)
        back = time.monotonic()
    finally:
        await asyncio.to_thread(stack.start, part)
    await asyncio.sleep(QUIET_S)
    await traffic.stop_writing()
    return traffic.asked_between(killed + NOTICED_S, back - 0.1)


async def counts_add_up(traffic: Traffic, *, within_s: float = 60.0) -> None:
    """Distinct acknowledged event ids = applied; a retried write that had landed is a duplicate, never applied."""
    counts = await traffic.applied(within_s=within_s)
    assert len(traffic.acknowledged) > 100
    assert counts["dead_lettered"] == 0
    assert counts["applied"] == len(traffic.acknowledged)


def all_served(answers: list[Answer]) -> None:
    assert len(answers) > 10
    assert {answer.status for answer in answers} == {grpc.StatusCode.OK}
    assert all(answer.items == 10 for answer in answers)


def all_marked(answers: list[Answer], *kinds: str) -> None:
    """Every answer carries at least one of the degradations."""
    wanted = {gateway_pb2.Degradation.Value(f"DEGRADATION_{kind}") for kind in kinds}
    bare = [answer for answer in answers if not answer.degradations & wanted]
    assert not bare, bare[:3]


@pytest.fixture
def asking_stack(stack: Stack) -> Iterator[Stack]:
    """The stack with an encoder that asks the inference server, as it does on a machine with a GPU."""
    own = stack.components["encoder"]
    assert isinstance(own, Process)
    environment = {**own.service.environment, "FRESHET_ENCODER_ENGINE": "inference-server"}
    stack.components["encoder"] = Process(replace(own.service, environment=environment))
    stack.stop("encoder")
    stack.start("encoder")
    yield stack
    stack.components["encoder"] = own
    stack.stop("encoder")


async def test_killed_inference_server_serves_stored_states_and_catches_up(asking_stack: Stack) -> None:
    stack = asking_stack
    async with traffic_for(stack, "inference-server") as traffic:
        answers = await kill_while_streaming(stack, traffic, "inference-server")
        all_served(answers)
        all_marked(answers, "STALE_STATE", "NOT_FRESH", "POPULAR_FALLBACK")
        assert any(answer.source == "stored" for answer in answers)
        assert not traffic.write_errors
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_killed_encoder_serves_stored_states_and_catches_up(stack: Stack) -> None:
    async with traffic_for(stack, "encoder") as traffic:
        answers = await kill_while_streaming(stack, traffic, "encoder")
        all_served(answers)
        all_marked(answers, "STALE_STATE", "POPULAR_FALLBACK")
        assert any(answer.source == "stored" for answer in answers)
        assert not traffic.write_errors
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_killed_redis_serves_popular_items_and_loses_nothing(stack: Stack) -> None:
    async with traffic_for(stack, "redis") as traffic:
        answers = await kill_while_streaming(stack, traffic, "redis")
        all_served(answers)
        all_marked(answers, "STATE_STORE_DOWN")
        assert not traffic.write_errors
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_killed_kafka_refuses_writes_and_serves_reads(stack: Stack) -> None:
    async with traffic_for(stack, "kafka") as traffic:
        answers = await kill_while_streaming(stack, traffic, "kafka")
        all_served(answers)
        all_marked(answers, "NOT_FRESH")
        assert set(traffic.write_errors) & {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_killed_candidates_serves_popular_items(stack: Stack) -> None:
    async with traffic_for(stack, "candidates") as traffic:
        answers = await kill_while_streaming(stack, traffic, "candidates")
        all_served(answers)
        all_marked(answers, "POPULAR_FALLBACK")
        assert not traffic.write_errors
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_killed_reranker_serves_the_first_stage_order_where_it_is_needed(stack: Stack) -> None:
    async with traffic_for(stack, "reranker") as traffic:
        answers = await kill_while_streaming(stack, traffic, "reranker")
        all_served(answers)
        all_marked([answer for answer in answers if answer.is_diverse], "FIRST_STAGE_ORDER", "POPULAR_FALLBACK")
        plain = [answer for answer in answers if not answer.is_diverse]
        assert plain
        assert not any(gateway_pb2.DEGRADATION_FIRST_STAGE_ORDER in answer.degradations for answer in plain)
        assert any(answer.source == "stored" for answer in answers)
        assert not traffic.write_errors
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_killed_gateway_refuses_at_once_and_retried_writes_count_once(stack: Stack) -> None:
    async with traffic_for(stack, "gateway") as traffic:
        answers = await kill_while_streaming(stack, traffic, "gateway")
        assert answers
        assert {answer.status for answer in answers} <= {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        }
        assert set(traffic.write_errors) & {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_wiped_redis_is_rebuilt_from_the_stream(stack: Stack) -> None:
    """Redis comes back empty: a new epoch, the topic read from its beginning, the same counts."""
    import redis.asyncio

    async with traffic_for(stack, "wiped") as traffic:
        await asyncio.sleep(QUIET_S)
        async with redis.asyncio.from_url(stack.redis_url) as client:
            old_epoch = await client.get("stream:epoch")
            await client.flushall()
        await asyncio.sleep(QUIET_S)
        await traffic.stop_writing()
        await counts_add_up(traffic)
        async with redis.asyncio.from_url(stack.redis_url) as client:
            assert await client.get("stream:epoch") not in (None, old_epoch)
