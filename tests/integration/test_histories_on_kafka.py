"""Redis is emptied, and users are evicted, on a real Kafka and Redis: everything comes back equal, and each answer
meanwhile is right or marked."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.encoder import HashEncoder
from kafka.admin import KafkaAdminClient
from killed_encoder import VOCABULARY
from lost_histories import measure

from services.contracts.topics import ensure_topics
from services.encoder.config import EncoderSettings
from services.platform.stream.topic import Topic
from services.stack import Ports, Stack

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[EncoderSettings]:
    """A Kafka and a Redis that nobody else uses."""
    stack = Stack(tmp_path, ports=Ports.free())
    stack.up(["kafka", "redis"])
    yield EncoderSettings(kafka_bootstrap=stack.kafka_bootstrap, redis_url=stack.redis_url)
    stack.down()


def test_a_topic_gets_as_many_partitions_as_the_one_that_it_goes_with(kafka: str) -> None:
    first, second = (f"test-{secrets.token_hex(4)}" for _ in range(2))
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    for topic in (Topic(name=first, num_partitions=3), Topic(name=second, as_many_as=first)):
        ensure_topics(kafka, topics=(topic,))
        deadline = time.monotonic() + 20
        while len(admin.describe_topics([topic.name])[0]["partitions"]) != 3:
            assert time.monotonic() < deadline, f"{topic.name} does not have three partitions"
    admin.close()


def test_lost_users_come_back_equal(settings: EncoderSettings) -> None:
    # No window slides meanwhile: what is compared is a beginning.
    words = replace(VOCABULARY, max_history=100)
    times = measure(settings, HashEncoder(), words, users=600, events_per_user=20, evicted=100)
    assert (times.emptied_wrong, times.evicted_wrong, times.answers_wrong) == (0, 0, 0)
    assert times.answers_marked > 0
