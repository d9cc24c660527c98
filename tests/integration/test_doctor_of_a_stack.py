"""`freshet doctor` on the real stack, broken piece by piece: it names the piece, and what it advises mends it."""

import shlex
from pathlib import Path

import pytest
import redis
from kafka.admin import KafkaAdminClient
from outside import until

from services.cli.doctor import Finding
from services.cli.doctor.examine import examine
from services.contracts.topics import ensure_topics
from services.contracts.topics.exposures import EXPOSURES
from services.stack import Ports, Stack

pytestmark = pytest.mark.integration


def errors(stack: Stack) -> dict[str, Finding]:
    return {finding.about: finding for finding in examine(stack) if finding.severity == "error"}


def test_a_redis_that_evicts_or_is_nearly_full_is_mended_by_what_is_advised(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "state", ports=Ports.free())
    try:
        stack.up(["redis"])
        with redis.Redis.from_url(stack.redis_url) as client:
            # Small ones: what a connection read of a large one counts as used, too.
            for number in range(512):
                client.set(f"key-{number}", bytes(1 << 13))
            client.config_set("maxmemory", int(1.05 * client.info("memory")["used_memory"]))
            client.config_set("maxmemory-policy", "allkeys-lru")
            found = [finding for finding in examine(stack) if finding.about == "Redis"]
            assert [finding.severity for finding in found] == ["error", "error"]
            for finding in found:
                words = shlex.split(finding.advice.partition(",")[0])
                assert words[:3] == ["redis-cli", "-p", str(stack.ports["redis"])]
                client.execute_command(*words[3:])
            assert "Redis" not in errors(stack)
        stack.kill("redis")
        # Nothing runs: that is no error, and there is nothing to ask.
        assert not {"redis", "Redis"} & errors(stack).keys()
    finally:
        stack.down()


def test_a_part_and_a_topic_that_are_missing_are_named(stack: Stack) -> None:
    until("nothing is wrong", lambda: errors(stack) == {})
    (told,) = [finding.found for finding in examine(stack) if finding.about == "model"]
    for name in ("refresher", "candidates", "reranker", "gateway", "inference-server"):
        assert name in told
    admin = KafkaAdminClient(bootstrap_servers=stack.kafka_bootstrap)
    try:
        admin.delete_topics([EXPOSURES])
        missing = until("a topic is missing", lambda: errors(stack).get("topics"))
        assert EXPOSURES in missing.found
    finally:
        admin.close()
        ensure_topics(stack.kafka_bootstrap)
    stack.kill("reranker")
    found = errors(stack)
    assert found["reranker"].found == "not running"
    assert found["reranker"].advice == f"freshet up --state {stack.place.state.root} --only reranker"
    stack.start("reranker")
    until("nothing is wrong", lambda: errors(stack) == {})
