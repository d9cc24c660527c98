"""What the contract suites share: cases, waiting, and topics of a test's own.

A suite runs each test on the fake and on the real adapter: `either` makes both cases.
What a real component does a moment later is waited for with `eventually`; the fake does it at once.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from services.contracts.topic_reader import TopicReader
from services.contracts.topics import ensure_topics
from services.contracts.topics.dead_letters import dead_letter_topic
from services.platform.errors import DependencyUnavailable
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord
from services.platform.stream.topic import Topic

DEADLINE_S = 60.0

T = TypeVar("T")


def either(real: str) -> list[Any]:
    """A suite's cases: "memory" always, the real component with the integration tests."""
    return ["memory", pytest.param(real, marks=pytest.mark.integration)]


def eventually(ask: Callable[[], T], is_enough: Callable[[T], bool] = bool) -> T:
    """The first answer that is enough."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_enough(answer := ask()):
        assert time.monotonic() < deadline, f"gave up waiting; the last answer was {answer!r}"
        time.sleep(0.005)
    return answer


def polled(reader: Reader, count: int, *, max_records: int | None = None, only: str = "") -> list[SourceRecord]:
    """The next `count` records, and whatever came with them."""
    found: list[SourceRecord] = []
    eventually(lambda: found.extend(reader.poll(100, max_records, only=only)) or len(found) >= count)
    return found


class OwnTopics:
    """Topics of a test's own on the broker: names -> number of partitions. Their real names differ in every test."""

    def __init__(self, bootstrap: str, topics: dict[str, int]) -> None:
        self.bootstrap, self._opened = bootstrap, list[TopicReader]()
        self.names = {name: f"{name}-{secrets.token_hex(4)}" for name in topics}
        made = [Topic(name=self.names[name], num_partitions=count) for name, count in topics.items()]
        ensure_topics(bootstrap, topics=(*made, *map(dead_letter_topic, made)))
        self.producer = BulkProducer(bootstrap)
        for name in self.names.values():
            eventually(lambda name=name: self._is_known(name))

    def _is_known(self, name: str) -> bool:
        """A topic is made before every connection hears of it."""
        try:
            return bool(self.producer.num_partitions(name))
        except DependencyUnavailable:
            return False

    def reader(self, *names: str, **options: Any) -> TopicReader:
        """A reader of some of the topics, in this test's group."""
        group_id = "-".join(self.names.values())
        reader = TopicReader(self.bootstrap, *(self.names[name] for name in names), group_id=group_id, **options)
        self._opened.append(reader)
        return reader

    def write(self, name: str, *values: bytes | None, key: bytes = b"key", partition: int = 0) -> list[int]:
        """Write records; return their offsets."""
        records = [Record(self.names[name], key, value, [("h", b"x")], partition) for value in values]
        return [offset for _, offset in self.producer.send_many(records)]

    def close(self) -> None:
        for reader in self._opened:
            reader.close()
        self.producer.close()


class Since:
    """What is written to a topic of all tests from now on."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._reader = TopicReader(bootstrap, topic, group_id=f"test-{secrets.token_hex(4)}")
        self._reader.seek(self._reader.end_offsets())
        self._found: list[SourceRecord] = []

    def records(self, count: int) -> list[SourceRecord]:
        """All of it once there are `count`, in order within each partition."""
        if len(self._found) < count:
            self._found += polled(self._reader, count - len(self._found))
        return self._found

    def close(self) -> None:
        self._reader.close()
