"""Kafka brokers of three die under load: no acknowledged event is lost, no answer fails, and each says what it lacks.

The broker that leads most of `interactions` dies, then the leader of the controllers, then two at once; each returns.
Two clients at once: a trial of tests/chaos, and one that writes and asks on a clock and notes what each answer says. In
the end the log, histories, seen items and states of both clients' users are compared.
"""

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import gateway_pb2
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
from outside import Outside
from traffic import Answer, Traffic

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts.topics import TOPICS, ensure_topics
from services.gateway.adapters.probes import ProbedStreamStatus
from services.platform.errors import DependencyUnavailable
from services.platform.stream.event_producer import EventProducer
from services.stack import Stack

sys.path.append(str(Path(__file__).parents[1] / "chaos"))

pytestmark = [pytest.mark.integration, pytest.mark.cluster, pytest.mark.timeout(600)]

# From a kill until everybody has noticed, on a busy machine; brokers are away for 15.
NOTICED_S = 5.0
# From when the brokers are back until a new event is answered for without a mark.
RECOVERED_S = 30.0


@pytest.fixture
def three(tmp_path: Path, small_bundle: Path) -> Iterator[Any]:
    from engines import Engines

    stack = Engines(tmp_path / "three", 3)
    stack.use_bundle(small_bundle)
    try:
        # The third is late: no topic is made on two.
        stack.place.state.make()
        stack._start_other("kafka-2")
        Stack.up(stack, ["kafka"])
        stack.wait("two brokers", lambda: stack.registered() == 2)
        with pytest.raises(DependencyUnavailable, match="Kafka has 2 of the 3 brokers"):
            ensure_topics(stack.kafka_bootstrap)
        stack.up()
        yield stack
    finally:
        stack.down()


async def test_one_broker_of_three_may_die_and_two_cost_writes_alone(three: Any) -> None:
    from engines import CONTROLLER, LEADER, TWO
    from real import RealTrial

    check_topics(three.kafka_bootstrap)
    trial = RealTrial(three, 0, [LEADER, CONTROLLER, TWO])
    found: dict[str, Any] = {}
    doing = threading.Thread(target=lambda: found.update(trial.run()), daemon=True)
    items = list(load_bundle(three.bundle).item_ids[:200])
    load = {"users": 48, "events_per_s": 20.0, "with_tokens": True}
    target, redis_url = three.address("gateway"), three.redis_url
    async with (
        Traffic(target=target, redis_url=redis_url, item_ids=items, prefix="asking", **load) as traffic,
        probed_by_one_name(three) as probed,
    ):
        doing.start()
        await asyncio.to_thread(doing.join)
        await traffic.stop_writing()
        await traffic.applied(within_s=60)
    sys.stderr.write(f"{found}\n{said(three.outages, traffic)}\n")
    assert found["violations"] == []
    assert [fault["kind"] for fault in found["faults"]] == [LEADER, CONTROLLER, TWO]
    assert all(fault["recovered_s"] < RECOVERED_S for fault in found["faults"])
    whole = [answer for answer in traffic.answers if answer.status is grpc.StatusCode.OK]
    assert all(answer.items == 10 for answer in whole)
    assert all(answer.honoured or answer.degradations for answer in whole)
    # One with a token waits for it until shortly before its deadline: too shortly, on a busy machine, for a few. So is
    # any other while thousands of refused events are sent again.
    late = [answer for answer in traffic.answers if answer.status is not grpc.StatusCode.OK]
    assert {answer.status for answer in late} <= {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert len(late) < 0.01 * len(whole)
    compare(trial, traffic)

    leader, controller, two = three.outages
    for outage in (leader, controller):
        # The other two take the events of the time after the failover.
        assert acknowledged_between(traffic, outage.killed + NOTICED_S, outage.started)
    assert not acknowledged_between(traffic, two.killed + NOTICED_S, two.started)
    refused = Counter(code for at, code in traffic.refused if two.killed + NOTICED_S < at < two.started)
    assert {"UNAVAILABLE"} <= set(refused) <= {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
    marked = traffic.asked_between(two.killed + NOTICED_S, two.started)
    assert marked
    assert all(answer.degradations for answer in marked)
    for name, answers in probed.items():
        assert {up for at, up in answers if two.killed + NOTICED_S < at < two.started} == {False}, name
        assert answers[-1][1], name


def wait_for_all(producers: Collection[EventProducer], brokers: Sequence[str]) -> None:
    """Until each was told of them all."""
    end = time.monotonic() + 10
    while any(set(producer.brokers()) != set(brokers) for producer in producers):
        assert time.monotonic() < end, [producer.brokers() for producer in producers]
        time.sleep(0.05)


@asynccontextmanager
async def probed_by_one_name(three: Any) -> AsyncIterator[Mapping[str, Sequence[tuple[float, bool]]]]:
    """What gateways that were told one broker's address alone say of the log, by that address: when, and whether it is
    there."""
    found: dict[str, list[tuple[float, bool]]] = {}
    names = three.kafka_bootstrap.split(",")
    async with grpc.aio.insecure_channel(three.address("encoder")) as encoder:
        producers = {name: EventProducer(name) for name in names}
        for producer in producers.values():
            producer.start()
        await asyncio.to_thread(wait_for_all, producers.values(), names)
        probes = {name: ProbedStreamStatus(encoder, producer.brokers) for name, producer in producers.items()}

        async def ask() -> None:
            while True:
                for name, probe in probes.items():
                    await probe.probe()
                    found.setdefault(name, []).append((time.monotonic(), probe.log_reachable))
                await asyncio.sleep(0.3)

        asking = asyncio.create_task(ask())
        try:
            yield found
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for producer in producers.values():
                await producer.close()


def check_topics(bootstrap: str) -> None:
    """Every topic lies on three brokers, two of which have a record before it is acknowledged."""
    names = [topic.name for topic in TOPICS]
    admin = KafkaAdminClient(bootstrap_servers=bootstrap.split(","))
    try:
        found = {one["topic"]: one["partitions"] for one in admin.describe_topics(names)}
        asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        said = [row for answer in admin.describe_configs(asked) for row in answer.resources]
    finally:
        admin.close()
    assert set(found) == set(names)
    assert {len(one["replicas"]) for partitions in found.values() for one in partitions} == {3}
    in_sync = {row[3]: entry[1] for row in said for entry in row[4] if entry[0] == "min.insync.replicas"}
    assert in_sync == dict.fromkeys(names, "2")


def compare(trial: Any, traffic: Traffic) -> None:
    """The trial's checker on the users of both clients."""
    for one in traffic.written:
        trial.acknowledged.setdefault(one.event.user_id, [])
        trial.note(one.event, one.receipt)
    trial.users += [traffic.user(number) for number in range(traffic.users)]
    trial.before = dict.fromkeys(trial.before, 0)
    with Outside(trial.stack) as trial.client:
        trial.compare()
    assert trial.violations == []
    assert len(traffic.written) == len(traffic.acknowledged) > 500


def acknowledged_between(traffic: Traffic, start: float, end: float) -> int:
    return sum(start < one.ended < end for one in traffic.written)


def said(outages: Sequence[Any], traffic: Traffic) -> str:
    """What each outage cost, as the clients saw it."""
    rows = []
    for outage, until in zip(outages, [*(one.killed for one in outages[1:]), inf], strict=True):
        began = outage.killed
        refused = [(at, code) for at, code in traffic.refused if began <= at < until]
        asked = traffic.asked_between(began, until)
        marked = [one for one in asked if one.degradations]
        failed = [one.at for one in asked if one.status is not grpc.StatusCode.OK]
        waits = [one.ended - one.began for one in traffic.written if began <= one.ended < until]
        rows.append(
            f"{outage.brokers} away {outage.started - began:.1f} s; in s after the kill: refused "
            f"{span([at for at, _ in refused], began)} {Counter(code for _, code in refused)}, of {len(asked)} marked "
            f"{span([one.at for one in marked], began)} {marks(marked)}, failed {span(failed, began)}; "
            f"longest wait for an acknowledgement {max(waits):.2f} s"
        )
    rows.append(f"{len(traffic.answers)} answers, {len(traffic.written)} events")
    return "\n".join(rows)


def span(times: Sequence[float], since: float) -> str:
    return f"{len(times)} times from {min(times) - since:.2f} to {max(times) - since:.2f}" if times else "never"


def marks(answers: Sequence[Answer]) -> dict[str, int]:
    kinds = Counter(kind for one in answers for kind in one.degradations)
    return {gateway_pb2.Degradation.Name(kind).removeprefix("DEGRADATION_"): count for kind, count in kinds.items()}
