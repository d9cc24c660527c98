"""Ranges of records: gaps are skipped, and only the broker's silence fails a reading."""

import pytest
from fakes.stream import MemoryTopics

from services.platform.errors import DependencyUnavailable
from services.platform.stream import reading
from services.platform.stream.reading import SILENCE_S, read_ranges


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 10 * SILENCE_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reading, "time", made)
    return made


def test_neither_a_slow_caller_nor_a_gap_is_the_brokers_silence(clock: Clock) -> None:
    topics = MemoryTopics({"topic": 1}, per_poll=1)
    for key in (b"a", b"b", b"b", b"b", b"c", b"c"):
        topics.write("topic", key, b"")
    topics.compact("topic")  # offsets 1, 2 and 4 have no record
    found = []
    for records in read_ranges(topics, {0: (0, 4)}, max_records=10):
        found += [record.offset for record in records]
        clock.wait(1.5 * SILENCE_S)
    assert found == [0, 3]


def test_a_silent_broker_fails_the_reading(clock: Clock) -> None:
    reads = read_ranges(MemoryTopics({"topic": 1}), {0: (0, 4)}, max_records=10)
    with pytest.raises(DependencyUnavailable, match=r"Kafka gave \{0: 0\} of \{0: 4\} only"):
        any(clock.wait(1) for _ in reads)
