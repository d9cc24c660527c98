"""One suite for the topics that the gateway writes: in memory always, on a broker with the integration tests.

What was written is compared as the bytes of its topic's format. A failure is the producer's:
tests/unit/common/test_kafka.py.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.gateway import MemoryForgetLog, MemoryInteractionLog, MemoryItemLog
from suites import Since, either

from services.common.kafka import EventProducer
from services.common.stream.topic import NUM_PARTITIONS
from services.common.stream.topics.forgets import FORGETS, Forget, encode_forget
from services.common.stream.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.common.stream.topics.items import ITEMS, CatalogueItem, encode_item
from services.gateway.adapters.stream_ends import KafkaStreamEnds
from services.gateway.adapters.topics import KafkaForgetLog, KafkaInteractionLog, KafkaItemLog
from services.gateway.ports import ForgetLog, InteractionLog, ItemLog

WAIT_S = 10.0


@dataclass
class Scene:
    """The three logs, and the values that a topic got, in order, once there are so many."""

    interactions: InteractionLog
    items: ItemLog
    forgets: ForgetLog
    values: Callable[[str, int], list[bytes | None]]


@pytest.fixture(params=either("kafka"))
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    if request.param == "memory":
        interactions, items, forgets = MemoryInteractionLog(), MemoryItemLog(), MemoryForgetLog()
        written: dict[str, Callable[[], Any]] = {
            INTERACTIONS: lambda: map(encode_interaction, interactions.written),
            ITEMS: lambda: map(encode_item, items.written),
            FORGETS: lambda: map(encode_forget, forgets.written),
        }
        yield Scene(interactions, items, forgets, lambda topic, _: list(written[topic]()))
        return
    kafka = request.getfixturevalue("kafka")
    since = {topic: Since(kafka, topic) for topic in (INTERACTIONS, ITEMS, FORGETS)}
    producer = EventProducer(kafka)
    yield Scene(
        KafkaInteractionLog(producer),
        KafkaItemLog(producer),
        KafkaForgetLog(producer),
        lambda topic, count: [record.value for record in since[topic].records(count)],
    )
    await producer.close()
    for one in since.values():
        one.close()


def interaction(event_id: str, user_id: str = "eve") -> Interaction:
    return Interaction(user_id=user_id, item_id="item-1", event_id=event_id, event_time_ms=5, type="click", value=1.0)


@pytest.mark.parametrize("user_id", ["ann", "日本語", "x" * 128])
async def test_a_users_interactions_lie_in_one_partition_in_the_order_written(scene: Scene, user_id: str) -> None:
    sent = [interaction(f"e{number}", user_id) for number in range(3)]
    found = [await scene.interactions.append(one, WAIT_S) for one in sent]
    assert len({partition for partition, _ in found}) == 1
    first = found[0].offset
    assert [offset for _, offset in found] == [first, first + 1, first + 2]
    assert scene.values(INTERACTIONS, 3) == [encode_interaction(one) for one in sent]


async def test_items_are_written_whole_the_newest_last(scene: Scene) -> None:
    sent = [CatalogueItem(item_id="item-1", title="A"), CatalogueItem(item_id="item-1", withdrawn=True)]
    for one in sent:
        await scene.items.put(one, WAIT_S)
    assert scene.values(ITEMS, 2) == [encode_item(one) for one in sent]


async def test_forgets_are_written_in_order(scene: Scene) -> None:
    sent = [Forget(forget_id=f"f{n}", user_id="ann", up_to={0: n, 1: -1}, requested_ms=5) for n in range(2)]
    for one in sent:
        await scene.forgets.append(one, WAIT_S)
    assert scene.values(FORGETS, 2) == [encode_forget(one) for one in sent]


@pytest.mark.integration
async def test_ends_lie_behind_what_was_acknowledged_before_they_were_asked_for(kafka: str) -> None:
    producer, ends = EventProducer(kafka), KafkaStreamEnds(kafka)
    log = KafkaInteractionLog(producer)
    for number in range(2):
        partition, offset = await log.append(interaction(f"end-{number}"), WAIT_S)
        found = await ends.interactions(WAIT_S)
        assert (found[partition], sorted(found)) == (offset + 1, list(range(NUM_PARTITIONS)))
    await ends.close()
    await producer.close()


@pytest.mark.integration
async def test_what_waits_for_the_next_hand_over_is_written_in_order_before_the_producer_ends(kafka: str) -> None:
    producer = EventProducer(kafka)
    log = KafkaInteractionLog(producer)
    first = await log.append(interaction("first"), WAIT_S)
    # The hand-over of `first` was less than a moment ago, or long ago: either way all of these come at once.
    waiting = [asyncio.create_task(log.append(interaction(f"w{number}"), WAIT_S)) for number in range(300)]
    await asyncio.sleep(0)
    await producer.close(WAIT_S)
    found = await asyncio.gather(*waiting)
    assert found == [(first.partition, first.offset + 1 + number) for number in range(300)]
