"""One suite for the topics that the gateway writes: in memory always, on a broker with the integration tests.

What was written is compared as the bytes of its topic's format. A failure is the producer's:
tests/unit/platform/test_kafka.py.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.gateway import MemoryExposureLog, MemoryForgetLog, MemoryInteractionLog, MemoryItemLog
from suites import Since, either

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.exposures import EXPOSURES, Exposure, encode_exposure
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.interactions import INTERACTIONS, Interaction, decode_interaction, encode_interaction
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.gateway.adapters.kafka_reads import KafkaStreamEnds
from services.gateway.adapters.topics import KafkaExposureLog, forget_log, interaction_log, item_log
from services.gateway.ports import ExposureLog, Log
from services.platform.stream.event_producer import EventProducer
from services.platform.stream.topic import NUM_PARTITIONS

WAIT_S = 10.0
KEY = b"key"


@dataclass
class Scene:
    """The logs, and keys and values that a topic got, in order, once there are so many."""

    interactions: Log[Interaction]
    items: Log[CatalogueItem]
    forgets: Log[Forget]
    exposures: ExposureLog
    records: Callable[[str, int], list[tuple[bytes, bytes | None]]]

    def values(self, topic: str, count: int) -> list[bytes | None]:
        return [value for _, value in self.records(topic, count)]


@pytest.fixture(params=either("kafka"))
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    if request.param == "memory":
        interactions, items, forgets, exposures = (
            MemoryInteractionLog(),
            MemoryItemLog(),
            MemoryForgetLog(),
            MemoryExposureLog(),
        )
        written: dict[str, Callable[[], Any]] = {
            INTERACTIONS: lambda: [(one.user_id.encode(), encode_interaction(one)) for one in interactions.written],
            ITEMS: lambda: [(one.item_id.encode(), encode_item(one)) for one in items.written],
            FORGETS: lambda: [(one.user_id.encode(), encode_forget(one)) for one in forgets.written],
            EXPOSURES: lambda: [(_key(user_id, one), encode_exposure(one)) for user_id, one in exposures.written],
        }
        yield Scene(interactions, items, forgets, exposures, lambda topic, _: written[topic]())
        return
    kafka = request.getfixturevalue("kafka")
    since = {topic: Since(kafka, topic) for topic in (INTERACTIONS, ITEMS, FORGETS, EXPOSURES)}
    producer, exposure_log = EventProducer(kafka), KafkaExposureLog(kafka, KEY, gather_s=0.01)
    exposure_log.start()
    yield Scene(
        interaction_log(producer),
        item_log(producer),
        forget_log(producer),
        exposure_log,
        lambda topic, count: [(record.key or b"", record.value) for record in since[topic].records(count)],
    )
    await producer.close()
    await exposure_log.close()
    for one in since.values():
        one.close()


def _key(user_id: str, exposure: Exposure) -> bytes:
    return (pseudonym_of(user_id, KEY) if user_id else exposure.exposure_id).encode()


def interaction(event_id: str, user_id: str = "eve") -> Interaction:
    return Interaction(user_id=user_id, item_id="item-1", event_id=event_id, event_time_ms=5, type="click", value=1.0)


def exposure(exposure_id: str) -> Exposure:
    return Exposure(exposure_id=exposure_id, shown_ms=5, surface="recommend", model_version="m1", item_ids=["a", "b"],
                    scores=[0.5, 0.25], sources=["mol", "mol"])  # fmt: skip


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
        await scene.items.append(one, WAIT_S)
    assert scene.values(ITEMS, 2) == [encode_item(one) for one in sent]


async def test_forgets_are_written_in_order(scene: Scene) -> None:
    sent = [Forget(forget_id=f"f{n}", user_id="ann", up_to={0: n, 1: -1}, requested_ms=5) for n in range(2)]
    for one in sent:
        await scene.forgets.append(one, WAIT_S)
    assert scene.values(FORGETS, 2) == [encode_forget(one) for one in sent]


async def test_exposures_are_written_under_pseudonyms_and_of_nobody_under_their_ids(scene: Scene) -> None:
    sent = [("ann", exposure("e1")), ("ann", exposure("e2")), ("", exposure("e3"))]
    for user_id, one in sent:
        scene.exposures.append(user_id, one)
    found = scene.records(EXPOSURES, 3)
    assert sorted(found) == sorted((_key(user_id, one), encode_exposure(one)) for user_id, one in sent)
    assert [value for key, value in found if key == _key("ann", sent[0][1])] == [
        encode_exposure(sent[0][1]),
        encode_exposure(sent[1][1]),
    ]
    assert not any(b"ann" in key + (value or b"") for key, value in found)


@pytest.mark.integration
async def test_exposures_of_a_process_that_ends_are_written_before(kafka: str) -> None:
    since, kept = Since(kafka, EXPOSURES), [0, 0]

    def count(written: int, lost: int) -> None:
        kept[0], kept[1] = kept[0] + written, kept[1] + lost

    log = KafkaExposureLog(kafka, KEY, count=count, gather_s=60)
    log.start()
    for number in range(100):
        log.append("ann", exposure(f"e{number}"))
    await log.close(WAIT_S)
    assert [record.value for record in since.records(100)] == [encode_exposure(exposure(f"e{n}")) for n in range(100)]
    assert kept == [100, 0]
    since.close()


@pytest.mark.integration
async def test_ends_lie_behind_what_was_acknowledged_before_they_were_asked_for(kafka: str) -> None:
    producer, ends = EventProducer(kafka), KafkaStreamEnds(kafka)
    log = interaction_log(producer)
    for number in range(2):
        partition, offset = await log.append(interaction(f"end-{number}"), WAIT_S)
        found = await ends.interactions(WAIT_S)
        assert (found[partition], sorted(found)) == (offset + 1, list(range(NUM_PARTITIONS)))
        record = (await ends.records({partition: offset}, WAIT_S))[partition]
        assert decode_interaction(record.value, record.headers, record.key).event_id == f"end-{number}"
        assert await ends.records({partition: offset + 1}, WAIT_S) == {}
    ends.close()
    await producer.close()


@pytest.mark.integration
async def test_what_waits_for_the_next_hand_over_is_written_in_order_before_the_producer_ends(kafka: str) -> None:
    producer = EventProducer(kafka)
    log = interaction_log(producer)
    first = await log.append(interaction("first"), WAIT_S)
    # The hand-over of `first` was less than a moment ago, or long ago: either way all of these come at once.
    waiting = [asyncio.create_task(log.append(interaction(f"w{number}"), WAIT_S)) for number in range(300)]
    await asyncio.sleep(0)
    await producer.close(WAIT_S)
    found = await asyncio.gather(*waiting)
    assert found == [(first.partition, first.offset + 1 + number) for number in range(300)]
