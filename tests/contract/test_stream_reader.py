"""One suite for the reading port: `MemoryTopics` always, kafka-python on a broker with the integration tests.

Two topics, "a" with three partitions and "b" with one.
"""

from collections.abc import Collection, Iterator
from typing import Any, Protocol

import pytest
from fakes.stream import MemoryTopics
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from suites import OwnTopics, either, eventually, polled

from services.contracts.topic_reader import TopicReader
from services.contracts.topics.dead_letters import SUFFIX
from services.platform.errors import DependencyUnavailable
from services.platform.stream.kafka import BulkProducer
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord
from services.stack import Ports

TOPICS = {"a": 3, "b": 1}


class Topics(Protocol):
    """The two topics: `names` are their real ones."""

    names: dict[str, str]

    def open(self, *, partitions: Collection[int] | None = None) -> Reader:
        """Another reader of both, in the same group."""

    def write(self, name: str, *values: bytes | None, partition: int = 0) -> list[int]: ...

    def expire(self, name: str, below: int) -> None:
        """Retention takes the records of partition 0 below this offset away."""

    def dead_letters(self, count: int) -> list[tuple[int, str]]:
        """Source offset and reason of each, at least `count` of them."""


class InMemory:
    def __init__(self) -> None:
        self._topics = MemoryTopics(TOPICS)
        self.names = {name: name for name in TOPICS}

    def open(self, *, partitions: Collection[int] | None = None) -> Reader:
        return self._topics.reader(partitions=partitions)

    def write(self, name: str, *values: bytes | None, partition: int = 0) -> list[int]:
        headers = [("h", b"x")]
        return [self._topics.write(name, b"key", value, partition=partition, headers=headers) for value in values]

    def expire(self, name: str, below: int) -> None:
        self._topics.expire(name, 0, below)

    def dead_letters(self, count: int) -> list[tuple[int, str]]:
        return [(letter.offset, letter.reason) for letter in self._topics.dead_letters]


class OnKafka(OwnTopics):
    def open(self, *, partitions: Collection[int] | None = None) -> Reader:
        return self.reader(*TOPICS, partitions=partitions, dead_letters=BulkProducer(self.bootstrap))

    def expire(self, name: str, below: int) -> None:
        admin = KafkaAdminClient(bootstrap_servers=self.bootstrap)
        admin.delete_records({TopicPartition(self.names[name], 0): below})
        admin.close()

    def dead_letters(self, count: int) -> list[tuple[int, str]]:
        letters = TopicReader(self.bootstrap, self.names["b"] + SUFFIX, group_id="test-letters")
        letters.seek({0: 0})
        headers = [dict(record.headers) for record in eventually(letters.read_to_end, lambda one: len(one) >= count)]
        letters.close()
        return [(int(one["freshet-source-offset"] or b""), (one["freshet-reason"] or b"").decode()) for one in headers]


@pytest.fixture(params=either("kafka"))
def topics(request: pytest.FixtureRequest) -> Iterator[Topics]:
    if request.param == "memory":
        yield InMemory()
        return
    made = OnKafka(request.getfixturevalue("kafka"), TOPICS)
    yield made
    made.close()


def places(records: list[SourceRecord], partition: int = 0) -> list[int]:
    return [record.offset for record in records if record.partition == partition]


def test_records_come_whole_and_in_order_from_where_one_is_told(topics: Topics) -> None:
    topics.write("a", b"0", b"1", None)
    topics.write("a", b"2", partition=2)
    reader = topics.open()
    assert (list(reader.partitions(topics.names["a"])), list(reader.partitions(topics.names["b"]))) == ([0, 1, 2], [0])
    reader.seek({0: 1, 1: 0, 2: 0})
    found = polled(reader, 3)
    assert (places(found), places(found, 2)) == ([1, 2], [0])
    last = found[-1] if found[-1].partition else found[0]
    assert (last.topic, last.key, last.value, list(last.headers)) == (topics.names["a"], b"key", b"2", [("h", b"x")])
    assert next(record.value for record in found if record.offset == 2) is None
    reader.seek({0: 0})
    assert places(polled(reader, 3)) == [0, 1, 2]


def test_a_poll_brings_no_more_than_asked_for_and_the_next_one_goes_on(topics: Topics) -> None:
    topics.write("a", b"0", b"1", b"2")
    reader = topics.open()
    reader.seek({0: 0, 1: 0, 2: 0})
    found = [eventually(lambda: reader.poll(100, 1)) for _ in range(3)]
    assert [places(list(records)) for records in found] == [[0], [1], [2]]
    assert reader.positions() == {0: 3, 1: 0, 2: 0}


def test_bounds_ends_and_what_polling_told_of_them(topics: Topics) -> None:
    topics.write("a", b"0", b"1")
    reader = topics.open()
    assert reader.end_offsets() == {0: 2, 1: 0, 2: 0}
    assert reader.bounds([0, 1]) == {0: (0, 2), 1: (0, 0)}
    reader.seek({0: 0})
    polled(reader, 2)
    assert reader.known_end_offsets()[0] == 2
    topics.write("a", b"2")
    assert (reader.known_end_offsets()[0], reader.end_offsets()[0]) == (2, 3)


def test_records_that_retention_took_are_skipped(topics: Topics) -> None:
    topics.write("a", b"0", b"1", b"2")
    topics.expire("a", 2)
    reader = topics.open()
    assert reader.bounds([0]) == {0: (2, 3)}
    reader.seek({0: 0})
    assert places(polled(reader, 1)) == [2]


def test_a_shorter_topic_than_what_was_read_comes_from_its_start(topics: Topics) -> None:
    topics.write("a", b"0", b"1")
    reader = topics.open()
    reader.seek({0: 9})
    assert places(polled(reader, 2)) == [0, 1]


def test_one_topic_is_polled_alone_and_the_other_goes_on_where_it_was(topics: Topics) -> None:
    a, b = topics.names["a"], topics.names["b"]
    topics.write("a", b"0", b"1")
    topics.write("b", b"0")
    reader = topics.open()
    reader.seek({0: 0, 1: 0, 2: 0}, a)
    reader.seek({0: 0}, b)
    assert {record.topic for record in polled(reader, 1, only=b)} == {b}
    assert (reader.positions(a)[0], reader.positions(b)) == (0, {0: 1})
    topics.write("b", b"1")
    assert sorted((one.topic, one.offset) for one in polled(reader, 3)) == sorted([(a, 0), (a, 1), (b, 1)])


def test_reading_to_the_end_brings_all_of_one_topic_and_leaves_the_other_alone(topics: Topics) -> None:
    a, b = topics.names["a"], topics.names["b"]
    topics.write("a", b"0")
    topics.write("b", *(b"%d" % number for number in range(600)))
    reader = topics.open()
    reader.seek({0: 0, 1: 0, 2: 0}, a)
    reader.seek({0: 4}, b)
    assert places(reader.read_to_end(b)) == list(range(4, 600))
    assert reader.read_to_end(b) == []
    assert [(one.topic, one.offset) for one in polled(reader, 1)] == [(a, 0)]


def test_only_its_partitions_belong_to_a_reader(topics: Topics) -> None:
    topics.write("a", b"0")
    topics.write("a", b"1", partition=1)
    reader = topics.open(partitions=[0])
    assert (list(reader.partitions()), reader.end_offsets()) == ([0], {0: 1})
    reader.seek({0: 0})
    assert [(one.partition, one.offset) for one in polled(reader, 1)] == [(0, 0)]
    assert reader.bounds([1]) == {1: (0, 1)}


def test_assigning_polls_these_partitions_alone_and_leaves_the_other_topic_where_it_is(topics: Topics) -> None:
    a, b = topics.names["a"], topics.names["b"]
    for partition in range(3):
        topics.write("a", b"0", b"1", partition=partition)
    topics.write("b", b"0", b"1")
    reader = topics.open()
    reader.seek({0: 1}, b)
    reader.assign({1: 0, 2: 1}, a)
    found = polled(reader, 4)
    assert sorted((one.topic, one.partition, one.offset) for one in found) == [
        (a, 1, 0),
        (a, 1, 1),
        (a, 2, 1),
        (b, 0, 1),
    ]
    assert (list(reader.partitions(a)), list(reader.partitions(b))) == ([1, 2], [0])
    reader.assign({}, a)
    topics.write("a", b"2", partition=1)
    topics.write("b", b"2")
    assert [(one.topic, one.offset) for one in polled(reader, 1)] == [(b, 2)]
    reader.assign({1: 2}, a)
    assert [(one.topic, one.partition, one.offset) for one in polled(reader, 1)] == [(a, 1, 2)]


def test_progress_is_kept_for_each_topic_and_whoever_reads_next(topics: Topics) -> None:
    a, b = topics.names["a"], topics.names["b"]
    reader = topics.open()
    assert reader.committed(a) == {0: 0, 1: 0, 2: 0}
    reader.commit({0: 4, 2: 9}, a)
    reader.commit({0: 7}, b)
    assert (reader.committed(a), reader.committed(b)) == ({0: 4, 1: 0, 2: 9}, {0: 7})
    reader.close()
    assert topics.open(partitions=[0]).committed(a) == {0: 4}


def test_a_closed_reader_goes_on_where_it_was(topics: Topics) -> None:
    a, b = topics.names["a"], topics.names["b"]
    topics.write("a", b"0", b"1", partition=1)
    topics.write("a", b"0")
    reader = topics.open()
    reader.seek({0: 0}, b)
    reader.assign({1: 0}, a)
    assert places(polled(reader, 1, max_records=1), 1) == [0]
    reader.close()
    topics.write("b", b"0")
    found = polled(reader, 2)
    assert sorted((one.topic, one.partition, one.offset) for one in found) == [(a, 1, 1), (b, 0, 0)]


def test_a_record_becomes_a_dead_letter_once_whatever_restarts(topics: Topics) -> None:
    b = topics.names["b"]
    topics.write("b", b"0", b"1")
    for number in range(2):
        reader = topics.open()
        reader.seek({0: 0}, b)
        for record in reader.read_to_end(b):
            reader.dead_letter(record, f"reading {number}")
        reader.close()
    topics.write("b", b"2")
    reader = topics.open()
    reader.seek({0: 0}, b)
    for record in reader.read_to_end(b):
        reader.dead_letter(record, "later")
    assert topics.dead_letters(3) == [(0, "reading 0"), (1, "reading 0"), (2, "later")]


ASKS: dict[str, tuple[Any, ...]] = {
    "poll": (0,), "end_offsets": (), "seek": ({0: 0},), "assign": ({0: 0},), "positions": (), "read_to_end": (),
    "committed": (), "bounds": ([0],),
}  # fmt: skip


# The real one fails in one place, while it connects; that takes it two seconds.
@pytest.mark.parametrize(("case", "asked"), [*(("memory", name) for name in ASKS), ("kafka", "poll")])
def test_without_a_broker_there_is_no_answer(case: str, asked: str) -> None:
    reader: Any = MemoryTopics(TOPICS)
    reader.down = True
    if case == "kafka":
        reader = TopicReader(f"127.0.0.1:{Ports.free()['kafka']}", *TOPICS, group_id="test")
    with pytest.raises(DependencyUnavailable):
        getattr(reader, asked)(*ASKS[asked])
