"""Each part killed once (SIGKILL) while events stream, then started again.

What must hold every time: recommendations go on in the way of the design's table "When something fails", every
acknowledged event is applied exactly once, and the answers are whole again afterwards.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest
from freshet.v1 import gateway_pb2
from traffic import Answer, Traffic

from services.algorithms.bundles.model_bundle import load_bundle
from services.stack import Stack
from services.stack.components.process import Process

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

QUIET_S = 0.5
DEAD_S = 2.0


def traffic_for(stack: Stack, prefix: str) -> Traffic:
    items = load_bundle(stack.bundle).item_ids[:200]
    return Traffic(stack.address("gateway"), stack.redis_url, list(items), f"{prefix}-{time.time_ns()}")


async def kill_while_streaming(
    stack: Stack, traffic: Traffic, part: str, notices: Callable[[Answer], bool]
) -> list[Answer]:
    """Stream, kill `part`, go on, start it again, finish. The answers asked while it was known to be dead, which is
    once all answers of half a second notice it."""
    await traffic.until_all(is_ok, for_s=QUIET_S, within_s=60)
    stack.kill(part)
    try:
        await traffic.until_all(notices, for_s=0.5, within_s=10)
        noticed = time.monotonic()
        await asyncio.sleep(DEAD_S)
        back = time.monotonic()
    finally:
        await asyncio.to_thread(stack.start, part)
    await asyncio.sleep(QUIET_S)
    await traffic.stop_writing()
    return traffic.asked_between(noticed, back - 0.1)


async def counts_add_up(traffic: Traffic, *, within_s: float = 60.0) -> None:
    """Distinct acknowledged event ids = applied; a retried write that had landed is a duplicate, never applied."""
    counts = await traffic.applied(within_s=within_s)
    assert len(traffic.acknowledged) > 20
    assert counts["dead_lettered"] == 0
    assert counts["applied"] == len(traffic.acknowledged)


def all_served(answers: list[Answer]) -> None:
    assert len(answers) > 10
    assert {answer.status for answer in answers} == {grpc.StatusCode.OK}
    assert all(answer.items == 10 for answer in answers)


def is_ok(answer: Answer) -> bool:
    return answer.status == grpc.StatusCode.OK


def marked(*kinds: str) -> Callable[[Answer], bool]:
    """Whether an answer carries at least one of the degradations."""
    wanted = {gateway_pb2.Degradation.Value(f"DEGRADATION_{kind}") for kind in kinds}
    return lambda answer: is_ok(answer) and bool(answer.degradations & wanted)


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


@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        ("inference-server", ("STALE_STATE", "NOT_FRESH", "POPULAR_FALLBACK")),
        ("encoder", ("STALE_STATE", "POPULAR_FALLBACK")),
        ("redis", ("STATE_STORE_DOWN",)),
        ("kafka", ("NOT_FRESH",)),
        ("candidates", ("POPULAR_FALLBACK",)),
    ],
)
async def test_a_killed_part_is_named_in_answers_and_loses_no_event(
    part: str, kinds: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """Only without Kafka are writes refused; without an encoder stored states are served."""
    stack = request.getfixturevalue("asking_stack" if part == "inference-server" else "stack")
    async with traffic_for(stack, part) as traffic:
        is_marked = marked(*kinds)
        answers = await kill_while_streaming(stack, traffic, part, is_marked)
        all_served(answers)
        assert all(map(is_marked, answers))
        if part in ("inference-server", "encoder"):
            assert any(answer.source == "stored" for answer in answers)
        refused = set(traffic.write_errors)
        assert refused & {"UNAVAILABLE", "DEADLINE_EXCEEDED"} if part == "kafka" else not refused
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_killed_reranker_serves_the_first_stage_order_where_it_is_needed(stack: Stack) -> None:
    async with traffic_for(stack, "reranker") as traffic:
        is_marked = marked("FIRST_STAGE_ORDER", "POPULAR_FALLBACK")
        answers = await kill_while_streaming(
            stack, traffic, "reranker", lambda one: not one.is_diverse or is_marked(one)
        )
        all_served(answers)
        assert all(is_marked(answer) for answer in answers if answer.is_diverse)
        plain = [answer for answer in answers if not answer.is_diverse]
        assert plain
        assert not any(gateway_pb2.DEGRADATION_FIRST_STAGE_ORDER in answer.degradations for answer in plain)
        assert any(answer.source == "stored" for answer in answers)
        assert not traffic.write_errors
        await counts_add_up(traffic)
        await traffic.fresh_answer(within_s=30)


async def test_killed_gateway_refuses_at_once_and_retried_writes_count_once(stack: Stack) -> None:
    async with traffic_for(stack, "gateway") as traffic:
        answers = await kill_while_streaming(stack, traffic, "gateway", lambda one: not is_ok(one))
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
