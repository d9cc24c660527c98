"""A topic that is another one, or has lost its end, is told from one that only grew."""

from collections.abc import Iterator

import pytest
from fakes.encoder import MemoryForgetLog, MemoryStream
from kafka_fakes import OnePartition, PartitionConsumer
from state_scene import ANN, NOW_MS, EncoderProcess, FragileStore, append_all, interaction, replay
from structlog.testing import capture_logs

from services.contracts.topic_reader import TopicReader
from services.contracts.topics.forgets import Forget
from services.contracts.topics.interactions import INTERACTIONS, encode_interaction
from services.platform.errors import Conflict, DependencyUnavailable, PreconditionFailed
from services.user_state.log_identity import Anchor, Anchors


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    with capture_logs():
        yield


def anchors(store: FragileStore) -> Anchors | None:
    return Anchors.parse(store.progress([0], store.epoch() or "")[0].anchors)


def test_what_is_remembered_lies_with_the_progress_and_follows_it() -> None:
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "ab")
    process = EncoderProcess(stream, store).settle()
    log = stream.log[0]
    assert anchors(store) == Anchors(Anchor.of(log[0]), Anchor.of(log[1]), Anchor.of(log[1]))
    for first in (2, 4, 6):
        append_all(stream, "cd", first=first)
        process.settle()
    # The record near the watermark moves when it was found in its place again: one batch behind.
    assert anchors(store) == Anchors(Anchor.of(log[0]), Anchor.of(log[5]), Anchor.of(log[7]))
    assert Anchors.parse("") is None


def test_a_lost_end_is_looked_at_twice_and_then_said() -> None:
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abcde")
    EncoderProcess(stream, store).settle()
    before = store.epoch()
    del stream.log[0][3:]
    process = EncoderProcess(stream, store)
    with pytest.raises(DependencyUnavailable, match="lost its end"):
        process.consumer.step()
    assert store.epoch() == before
    process.settle()
    assert store.epoch() != before
    assert store.contents() == replay(stream)
    assert process.consumer._handler.progress.tails_lost == 1


def test_a_leader_that_only_lags_for_a_moment_costs_nothing() -> None:
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abcde")
    EncoderProcess(stream, store).settle()
    epoch, tail = store.epoch(), stream.log[0][3:]
    del stream.log[0][3:]
    process = EncoderProcess(stream, store)
    with pytest.raises(DependencyUnavailable):
        process.consumer.step()
    stream.log[0] += tail
    process.settle()
    assert (store.epoch(), store.history()) == (epoch, "abcde")


@pytest.mark.parametrize("restarts", [True, False])
def test_a_lost_end_that_was_written_over_is_noticed(restarts: bool) -> None:
    """The log is longer than what was applied, but the last records are others."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abcde")
    process = EncoderProcess(stream, store).settle()
    del stream.log[0][3:]
    append_all(stream, "fdab", first=20)
    (EncoderProcess(stream, store) if restarts else process).settle()
    assert store.contents() == replay(stream)


def test_attributions_of_a_log_that_lost_its_end_go_out_for_what_is_new() -> None:
    """Of the first event there is none: nothing came before it."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abcde")
    EncoderProcess(stream, store).settle()
    del stream.log[0][3:]
    append_all(stream, "f", first=5)
    process = EncoderProcess(stream, store).settle()
    assert {(one.offset, one.item_id) for one in process.outbox.attributions} == {
        (1, "b"),
        (2, "c"),
        (3, "f"),
    }
    assert stream.commits == {0: 4}
    assert store.contents() == replay(stream)


def test_a_forget_that_names_lost_records_stops_nothing() -> None:
    stream, store, forgets = MemoryStream(1), FragileStore(), MemoryForgetLog()
    append_all(stream, "abcde", user="bob")
    EncoderProcess(stream, store, forget_log=forgets).settle()
    forgets.append(Forget(forget_id="f", user_id=ANN, up_to={0: 4}, requested_ms=NOW_MS))
    del stream.log[0][3:]
    EncoderProcess(stream, store, forget_log=forgets).settle()
    append_all(stream, "f", first=5, user="bob")
    EncoderProcess(stream, store, forget_log=forgets).settle()
    assert store.history("bob") == "abcf"


def test_a_topic_made_anew_under_a_running_process_is_refused_by_name() -> None:
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abc")
    process = EncoderProcess(stream, store).settle()
    stream.log[0].clear()
    append_all(stream, "fedcb", first=10)
    with pytest.raises(Conflict):
        process.consumer.step()
    with pytest.raises(PreconditionFailed, match=r"other records than those that were applied.*recreated"):
        process.consumer.step()
    store.wipe()
    process.settle()
    assert store.contents() == replay(stream)


class Trimmed(MemoryStream):
    """Retention took what lies before `first`."""

    first = 0

    def bounds(self, partitions, topic=""):
        return {partition: (self.first, len(self.log[partition])) for partition in partitions}

    def records_at(self, offsets, topic=""):
        return {p: one for p, one in super().records_at(offsets, topic).items() if one.offset >= self.first}


@pytest.mark.parametrize("first", [2, 3, 5])
def test_a_log_whose_beginning_retention_took_is_still_the_same(first: int) -> None:
    stream, store = Trimmed(1), FragileStore()
    append_all(stream, "abcd")
    EncoderProcess(stream, store).settle()
    append_all(stream, "ef", first=4)
    stream.first = first
    EncoderProcess(stream, store).settle()
    assert store.history() == "abcdef"


def test_what_aborted_transactions_left_at_the_end_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    partition, store = OnePartition(INTERACTIONS), FragileStore()
    for number, item in enumerate("abc"):
        event = interaction(item, event_id=f"e{number}", second=number)
        partition.append(event.user_id.encode(), encode_interaction(event), NOW_MS, aborted=item != "a")
    monkeypatch.setattr(
        "services.platform.stream.kafka.KafkaConsumer", lambda **config: PartitionConsumer(partition, **config)
    )
    process = EncoderProcess(TopicReader("broker:9092", INTERACTIONS, group_id="test"), store).settle()
    assert store.history() == "a"
    assert process.consumer._handler.progress.watermarks == {0: 2}
