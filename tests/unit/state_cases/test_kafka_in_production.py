"""Kafka as it is in production: several brokers, topics made anew, a lost tail, producers that abort.

The in-memory stream is kinder than Kafka: it keeps what was written and is always the same topic. Here it loses its
tail, or another topic takes its name.
"""

from typing import Any

import pytest
from fakes.encoder import MemoryStream
from kafka_fakes import OnePartition, PartitionConsumer, RecordingAdmin
from state_scene import NOW_MS, EncoderProcess, FragileStore, append_all, interaction, replay

from services.contracts import topics
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.interactions import INTERACTIONS, encode_interaction
from services.platform.stream import kafka


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The topics that a cluster of three brokers is asked to make."""
    admin = RecordingAdmin()
    monkeypatch.setattr(topics, "KafkaAdminClient", lambda **_: admin)
    topics.ensure_topics("broker:9092")
    return admin.made


def test_on_three_brokers_every_topic_has_three_replicas(made: dict[str, Any]) -> None:
    assert {name: topic.replication_factor for name, topic in made.items()} == dict.fromkeys(made, 3)


def test_on_three_brokers_an_acknowledged_record_is_on_two(made: dict[str, Any]) -> None:
    in_sync = {name: topic.topic_configs.get("min.insync.replicas") for name, topic in made.items()}
    assert in_sync == dict.fromkeys(made, "2")


def settled(stream: MemoryStream, store: FragileStore) -> EncoderProcess:
    return EncoderProcess(stream, store).settle()


@pytest.mark.parametrize("restarts", [True, False])
def test_a_topic_made_anew_and_filled_past_the_watermark_is_noticed(restarts: bool) -> None:
    """Whatever was applied belongs to another topic: the process refuses (nothing of the new topic is applied over the
    old histories), or the histories are those of the new topic. Offsets alone cannot tell: the new one is longer."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abc")
    process = settled(stream, store)
    of_the_old = replay(stream)
    stream.log[0].clear()
    append_all(stream, "fedcb", first=10)
    (EncoderProcess(stream, store) if restarts else process).settle()
    assert store.contents() in (of_the_old, replay(stream))


def test_a_broker_that_lost_its_tail_does_not_stop_the_stream() -> None:
    """Five events are applied, the new leader has three of them, and a sixth comes: the histories follow the log."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abcde")
    settled(stream, store)
    del stream.log[0][3:]
    append_all(stream, "f", first=5)
    settled(stream, store)
    assert store.contents() == replay(stream)


def test_what_a_producer_aborted_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real reader, over the real `build_consumer`, on a partition with an aborted transaction."""
    partition, store = OnePartition(INTERACTIONS), FragileStore()
    for number, item in enumerate("abc"):
        event = interaction(item, event_id=f"e{number}", second=number)
        partition.append(event.user_id.encode(), encode_interaction(event), NOW_MS, aborted=item == "b")
    monkeypatch.setattr(kafka, "KafkaConsumer", lambda **config: PartitionConsumer(partition, **config))
    stream = TopicReader("broker:9092", INTERACTIONS, group_id="test")
    EncoderProcess(stream, store).settle()
    assert store.history() == "ac"
