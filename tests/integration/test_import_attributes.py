"""An import on real Kafka and Redis: topic, states and attributions as streaming would have left them, forgets kept."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from freshet.v1 import events_pb2

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.encoder.bootstrap import vocabulary_of
from services.offline.backfill.jobs import import_interactions
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.platform.stream.kafka import BulkProducer, Record, partition_for
from services.platform.stream.topic import NUM_PARTITIONS
from services.stack import Ports, Stack
from services.user_state.writer import StateWriter

pytestmark = pytest.mark.integration

PEOPLE = SimulatorConfig(
    num_users=60, num_items=400, num_topics=16, mean_events_per_user=40, max_events_per_user=160, seed=7
)


@pytest.fixture
def empty_stack(tmp_path: Path) -> Iterator[Stack]:
    """Kafka and Redis of their own: an import wants an empty topic. The model runs in the importing process."""
    stack = Stack(tmp_path / "state", ports=Ports.free())
    stack.up(["kafka", "redis"])
    yield stack
    stack.down()


def attributions(stack: Stack, count: int) -> list[events_pb2.Attribution]:
    stream = TopicReader(stack.kafka_bootstrap, ATTRIBUTIONS, group_id="test")
    stream.seek(dict.fromkeys(range(NUM_PARTITIONS), 0))
    assert sum(stream.end_offsets().values()) == count
    found: list[events_pb2.Attribution] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found += [events_pb2.Attribution.FromString(record.value or b"") for record in stream.poll(200, 5_000)]
    stream.close()
    return found


def test_an_import_attributes_each_interaction_that_has_a_past_once(empty_stack: Stack, small_bundle: Path) -> None:
    past = simulate(PEOPLE)
    known_items = vocabulary_of(load_bundle(small_bundle)).item_index
    places = {"bundle": small_bundle, "kafka": empty_stack.kafka_bootstrap, "redis_url": empty_stack.redis_url}
    report = import_interactions(past, inference_server=None, **places)  # type: ignore[arg-type]
    assert (report.interactions, report.written, report.users_filled) == (len(past), len(past), past.num_users)

    expected = 0
    begun: set[int] = set()
    for user, item in zip(past.users.tolist(), past.items.tolist(), strict=True):
        expected += user in begun
        if past.item_ids[item] in known_items:
            begun.add(user)
    assert report.attributions == expected
    found = attributions(empty_stack, expected)
    sources = Counter((message.source.partition, message.source.offset) for message in found)
    assert set(sources.values()) == {1}
    assert all(message.recorded_time.seconds >= time.time() - 600 for message in found)

    # Again: it is found to be done.
    again = import_interactions(past, inference_server=None, **places)  # type: ignore[arg-type]
    assert (again.written, again.users_filled, again.attributions) == (0, 0, 0)

    # Redis lost and somebody forgotten: the rest comes back, nothing is attributed a second time.
    gone = past.user_ids[5]
    partition = partition_for(gone.encode(), NUM_PARTITIONS)
    mine = sum(partition_for(past.user_ids[user].encode(), NUM_PARTITIONS) == partition for user in past.users)
    forget = Forget(forget_id="f", user_id=gone, up_to={partition: mine - 1}, requested_ms=0)
    producer = BulkProducer(empty_stack.kafka_bootstrap)
    producer.send_many([Record(FORGETS, gone.encode(), encode_forget(forget))])
    producer.close()
    store = StateWriter(empty_stack.redis_url)
    store._redis.flushall()
    filled = import_interactions(past, inference_server=None, **places)  # type: ignore[arg-type]
    assert (filled.written, filled.users_filled, filled.attributions) == (0, past.num_users, 0)
    users = store.load_users(past.user_ids, store.epoch() or "")
    store.close()
    assert [user for user, history in users.items() if not history.events] == [gone]
    assert users[gone].positions[partition] >= 0
