"""One Redis and one Kafka for all contract suites, each started when a suite first asks for it.

Suites share them, so a suite takes names of its own: a user id, a topic, a model version.
"""

from collections.abc import Iterator

import pytest

from services.cli.stack import Ports, Stack
from services.common.stream.topics import ensure_topics


@pytest.fixture(scope="session")
def _stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), ports=Ports.free())
    yield stack
    stack.down()


@pytest.fixture(scope="session")
def redis_url(_stack: Stack) -> str:
    """The state store's URL."""
    _stack.up(["redis"])
    return _stack.redis_url


@pytest.fixture(scope="session")
def kafka(_stack: Stack) -> str:
    """The broker's address, with Freshet's topics."""
    _stack.up(["kafka"])
    ensure_topics(_stack.kafka_bootstrap)
    return _stack.kafka_bootstrap
