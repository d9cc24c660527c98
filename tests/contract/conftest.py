"""One Redis and one Kafka for all contract suites, each started when a suite first asks for it.

Suites share them, so a suite takes names of its own: a user id, a topic, a model version.
"""

from collections.abc import Iterator

import pytest
from fakes.redis_cluster import RedisCluster, running_cluster

from services.contracts.topics import ensure_topics
from services.stack import Ports, Stack


@pytest.fixture(scope="session")
def _stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), ports=Ports.free())
    yield stack
    stack.down()


@pytest.fixture(scope="session")
def redis_server(_stack: Stack) -> str:
    """The URL of one Redis."""
    _stack.up(["redis"])
    return _stack.redis_url


@pytest.fixture(scope="session")
def redis_url(redis_server: str) -> str:
    """The state store's URL; a suite may run on another."""
    return redis_server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three masters and three replicas: as slow to come back as a cluster is, so a test leaves it as it was."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kafka(_stack: Stack) -> str:
    """The broker's address, with Freshet's topics."""
    _stack.up(["kafka"])
    ensure_topics(_stack.kafka_bootstrap)
    return _stack.kafka_bootstrap
