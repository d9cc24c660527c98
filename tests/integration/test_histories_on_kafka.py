"""Redis is emptied, and users are evicted, on a real Kafka and Redis: everything comes back equal, sooner than from the
log, and each answer meanwhile is right or marked."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.encoder import HashEncoder
from killed_encoder import VOCABULARY

from services.cli.lost_histories import measure
from services.cli.stack import Ports, Stack
from services.encoder.config import EncoderSettings

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[EncoderSettings]:
    """A Kafka and a Redis that nobody else uses."""
    stack = Stack(tmp_path, ports=Ports.free())
    stack.up(["kafka", "redis"])
    yield EncoderSettings(kafka_bootstrap=stack.kafka_bootstrap, redis_url=stack.redis_url)
    stack.down()


def test_lost_users_come_back_equal_and_sooner_than_from_the_log(settings: EncoderSettings) -> None:
    words = VOCABULARY  # a window of eight: most of each history has left it
    times = measure(settings, HashEncoder(), words, users=600, events_per_user=20, evicted=100)
    assert (times.emptied_wrong, times.evicted_wrong, times.answers_wrong) == (0, 0, 0)
    assert times.answers_marked > 0
    assert times.emptied_states_s < times.replay_s
    assert times.evicted_states_s < 10
