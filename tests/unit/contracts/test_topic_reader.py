"""Reading topics over a scripted consumer: when it waits for records to gather, what an error and a restart leave."""

from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.errors import KafkaConnectionError

from services.contracts.topic_reader import TopicReader
from services.platform.errors import DependencyUnavailable

TOPIC = TopicPartition("interactions", 0)


class Scripted:
    """Answers as many records as each poll is to find."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)

    def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        record = SimpleNamespace(offset=0, timestamp=0, key=b"u", value=b"{}", headers=())
        count = min(self.counts.pop(0), max_records)
        return {TOPIC: [record] * count} if count else {}


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("services.contracts.topic_reader.time.sleep", found.append)
    return found


def test_records_gather_after_some_were_read_and_never_after_a_silence(slept: list[float]) -> None:
    consumer: Any = Scripted(0, 0, 3, 2, 0, 1)
    stream = TopicReader("", "interactions", group_id="test", pause_ms=20, connect=lambda *_, **__: consumer)
    waits = []
    for _ in range(6):
        found = len(stream.poll(200, 64))
        waits.append((found, len(slept)))
        slept.clear()
    assert waits == [(0, 0), (0, 0), (3, 0), (2, 1), (0, 1), (1, 0)]


def test_a_stream_that_catches_up_and_one_that_is_only_asked_do_not_wait(slept: list[float]) -> None:
    consumer: Any = Scripted(64, 64, 10, 0)
    stream = TopicReader("", "interactions", group_id="test", pause_ms=20, connect=lambda *_, **__: consumer)
    for _ in range(3):
        stream.poll(200, 64)
    stream.poll(0, 1)
    assert slept == []


class Broker:
    """One partition of two topics, and what a group committed; `fails` makes the next call of a consumer fail."""

    def __init__(self) -> None:
        self.logs = {TopicPartition("a", 0): 5, TopicPartition("b", 0): 7}
        self.committed: dict[TopicPartition, int] = {}
        self.connections, self.fails = 0, False

    def connect(self, *_: Any, **__: Any) -> Any:
        self.connections += 1
        return Consumer(self)


class Consumer:
    """What `TopicReader` uses of kafka-python's consumer; a poll brings two records of each partition."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._at, self._paused = broker, dict.fromkeys(broker.logs, 0), set[TopicPartition]()

    def assignment(self) -> set[TopicPartition]:
        return set(self._at)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self._at[tp] = offset

    def position(self, tp: TopicPartition, timeout_ms: int) -> int:
        return self._at[tp]

    def end_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: self._broker.logs[tp] for tp in tps}

    def paused(self) -> set[TopicPartition]:
        return set(self._paused)

    def pause(self, *tps: TopicPartition) -> None:
        self._paused |= set(tps)

    def resume(self, *tps: TopicPartition) -> None:
        self._paused -= set(tps)

    def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        if self._broker.fails:
            self._broker.fails = False
            raise KafkaConnectionError("lost")
        found = {}
        for tp, end in self._broker.logs.items():
            if tp not in self._paused and self._at[tp] < end:
                offsets = range(self._at[tp], min(end, self._at[tp] + 2))
                found[tp] = [SimpleNamespace(offset=n, timestamp=0, key=b"", value=b"", headers=()) for n in offsets]
                self._at[tp] = offsets[-1] + 1
        return found

    def committed(self, tp: TopicPartition, timeout_ms: int) -> int | None:
        return self._broker.committed.get(tp)

    def commit_async(self, offsets: dict[TopicPartition, Any]) -> None:
        self._broker.committed |= {tp: one.offset for tp, one in offsets.items()}

    def close(self, **_: Any) -> None: ...


def read(broker: Broker, **options: Any) -> TopicReader:
    return TopicReader("", "a", "b", group_id="test", connect=broker.connect, **options)


def test_a_lost_connection_is_an_error_once_and_then_every_topic_goes_on_where_it_was() -> None:
    broker = Broker()
    reader = read(broker)
    assert [(one.topic, one.offset) for one in reader.poll(0)] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    broker.fails = True
    with pytest.raises(DependencyUnavailable, match="lost"):
        reader.poll(0)
    assert [(one.topic, one.offset) for one in reader.poll(0, only="b")] == [("b", 2), ("b", 3)]
    assert (reader.positions("a"), reader.positions("b"), broker.connections) == ({0: 2}, {0: 4}, 2)


def test_reading_to_an_end_leaves_the_other_topic_alone_and_begins_again_after_an_error() -> None:
    broker = Broker()
    reader = read(broker)
    reader.seek({0: 1}, "b")
    broker.fails = True
    with pytest.raises(DependencyUnavailable):
        reader.read_to_end("b")
    assert [one.offset for one in reader.read_to_end("b")] == [1, 2, 3, 4, 5, 6]
    assert [(one.topic, one.offset) for one in reader.poll(0)] == [("a", 0), ("a", 1)]


def test_a_record_is_dead_lettered_once_whatever_restarts() -> None:
    broker, written = Broker(), []
    producer: Any = SimpleNamespace(send_many=written.extend, close=lambda: None)
    for _ in range(2):
        reader = read(broker, dead_letters=producer)
        for record in reader.poll(0, only="b"):
            reader.dead_letter(record, "broken")
    assert [dict(one.headers)["freshet-source-offset"] for one in written] == [b"0", b"1"]
    assert broker.committed == {TopicPartition("b", 0): 2}
    other = read(broker)
    other.dead_letter(other.poll(0, only="a")[0], "another process does it")
    assert len(written) == 2
