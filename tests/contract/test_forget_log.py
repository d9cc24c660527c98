"""One suite for the encoder's forget log: on a topic in memory always, on a broker with the integration tests."""

from collections.abc import Iterator
from typing import Protocol

import pytest
from fakes.encoder import MemoryForgetLog
from suites import OwnTopics, either, eventually

from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.user_state.forgetting import ForgetRecord, ForgetTopic


def forget(user_id: str, offset: int) -> Forget:
    return Forget(forget_id=f"f{offset}", user_id=user_id, up_to={3: offset}, requested_ms=5)


class Topic(Protocol):
    """The topic; `reader` is another process's log."""

    def append(self, forget: Forget | None) -> int:
        """Write one record, None: one that cannot be read; its offset."""

    def reader(self) -> ForgetTopic: ...


class OnKafka(OwnTopics):
    def append(self, forget: Forget | None) -> int:
        key, value = (b"", b"\xff\xff") if forget is None else (forget.user_id.encode(), encode_forget(forget))
        (offset,) = self.write(FORGETS, value, key=key)
        return offset

    def reader(self) -> ForgetTopic:  # type: ignore[override]
        return ForgetTopic(super().reader(FORGETS))


@pytest.fixture(params=either("kafka"))
def topic(request: pytest.FixtureRequest) -> Iterator[Topic]:
    if request.param == "memory":
        yield MemoryForgetLog()
        return
    made = OnKafka(request.getfixturevalue("kafka"), {FORGETS: 1})
    yield made
    made.close()


def read(log: ForgetTopic, count: int) -> list[ForgetRecord]:
    """What came, once it is so many records: a broker may need a moment."""
    found: list[ForgetRecord] = []
    eventually(lambda: found.extend(log.read()) or len(found) >= count)
    return found


def test_the_first_reading_brings_all_and_each_later_one_what_came_since(topic: Topic) -> None:
    forgets = [forget("ann", 1), forget("bob", 2), None, forget("ann", 9)]
    written = [topic.append(one) for one in forgets]
    log = topic.reader()
    found = log.read()
    assert [(one.record.offset, one.forget) for one in found] == list(zip(written, forgets, strict=True))
    assert [one.reason.split("=")[0] for one in found] == ["", "", "value", ""]
    assert (found[2].record.value, found[0].record.key) == (b"\xff\xff", b"ann")
    assert log.read() == []
    topic.append(forget("eve", 11))
    topic.append(None)
    assert [one.forget for one in read(log, 2)] == [forget("eve", 11), None]
    assert log.read() == []


def test_an_empty_log_is_followed(topic: Topic) -> None:
    log = topic.reader()
    assert log.read() == []
    topic.append(forget("ann", 1))
    assert [one.forget for one in read(log, 1)] == [forget("ann", 1)]


def test_every_process_reads_the_whole_log(topic: Topic) -> None:
    topic.append(forget("ann", 1))
    for _ in range(2):
        assert [one.forget for one in topic.reader().read()] == [forget("ann", 1)]


def test_a_closed_log_goes_on_where_it_was(topic: Topic) -> None:
    topic.append(forget("ann", 1))
    log = topic.reader()
    log.read()
    log.close()
    topic.append(forget("bob", 2))
    assert [one.forget for one in read(log, 1)] == [forget("bob", 2)]
