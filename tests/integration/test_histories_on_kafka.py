"""Redis is emptied, and users are evicted, on a real Kafka and Redis: everything comes back equal, sooner than from the
log, and each answer meanwhile is right or marked."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.encoder import HashEncoder
from killed_encoder import VOCABULARY
from lost_histories import measure

from services.cli.stack import Ports, Stack
from services.common.stream.reader import TopicReader
from services.common.stream.topic import Topic
from services.common.stream.topics import ensure_topics
from services.encoder.config import EncoderSettings

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
    ensure_topics(kafka, topics=(Topic(name=first, num_partitions=3),))
    ensure_topics(kafka, topics=(Topic(name=second, as_many_as=first),))
    reader = TopicReader(kafka, second, group_id=second)
    assert reader.num_partitions() == 3
    reader.close()


def test_lost_users_come_back_equal_and_sooner_than_from_the_log(settings: EncoderSettings) -> None:
    words = VOCABULARY  # a window of eight: most of each history has left it
    times = measure(settings, HashEncoder(), words, users=600, events_per_user=20, evicted=100)
    assert (times.emptied_wrong, times.evicted_wrong, times.answers_wrong) == (0, 0, 0)
    assert times.answers_marked > 0
    assert times.emptied_states_s < times.replay_s
    assert times.evicted_states_s < 10
