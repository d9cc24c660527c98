"""The reading port over a scripted consumer: when it waits for records to gather, and when it does not."""

from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition

from services.common.stream.reader import TopicReader

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
    monkeypatch.setattr("services.common.stream.reader.time.sleep", found.append)
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
