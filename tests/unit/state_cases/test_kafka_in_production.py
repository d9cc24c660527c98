"""Kafka with several brokers, as in production: every record has replicas."""

from typing import Any

import pytest
from kafka_fakes import RecordingAdmin

from services.contracts import topics


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
