"""One suite for the outboxes of encoder and refresher: what readers of the topics find is what was published.

The fakes keep what they are given; the real ones are asked on a broker. Records are compared as the bytes of their
topic's format. A failure is the producer's: tests/unit/platform/test_kafka.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import pytest
from fakes import encoder as encoder_fakes
from fakes import refresher as refresher_fakes
from suites import Since, either

from services.contracts.topics.attributions import ATTRIBUTIONS, Attribution, ForgetUpTo, Undo, encode_attribution
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.histories import HISTORIES, MARK_KEY, EncodedHistory
from services.contracts.topics.index_deltas import INDEX_DELTAS, IndexDelta, ItemDelta, MemoryDelta, encode
from services.contracts.topics.interactions import INTERACTIONS
from services.contracts.topics.search_clicks import SEARCH_CLICKS, SearchClick, encode_click
from services.contracts.wire import PackedQueryState
from services.encoder.adapters import kafka_outbox as encoder_kafka
from services.encoder.ports import Outbox as EncoderOutbox
from services.platform.stream.kafka import BulkProducer, partition_for
from services.platform.stream.records import DeadLetter, SourceRecord
from services.platform.stream.topic import NUM_PARTITIONS
from services.refresher.adapters import topics as refresher_kafka
from services.refresher.ports import Outbox as RefresherOutbox
from services.user_state.ports import HistoryOutbox

AnyOutbox = TypeVar("AnyOutbox", EncoderOutbox, RefresherOutbox)

STATE = PackedQueryState(model_version="m", components=b"\x00\x3c" * 2, gate=b"", num_components=1, component_width=2)
FORGET = ForgetUpTo(forget_id="f1", up_to={0: 4, 7: -1}, user_pseudonym="p", recorded_ms=2)

# Source offset, value and reason.
Letter = tuple[int, bytes | None, str]


def about(offset: int, item_id: str = "item-1") -> dict[str, object]:
    """Fields of a record that the interaction at this offset leads to."""
    return {
        "event_id": f"e{offset}", "item_id": item_id, "event_time_ms": 1, "recorded_ms": 2, "partition": 2,
        "offset": offset, "user_pseudonym": "p",
    }  # fmt: skip


def attribution(offset: int, item_id: str = "item-1") -> Attribution:
    return Attribution(state=STATE, type="rating", value=4.5, **about(offset, item_id))  # type: ignore[arg-type]


def undo(offset: int, undone: int) -> Undo:
    return Undo(undoes=(2, undone), **about(offset))  # type: ignore[arg-type]


def click(offset: int) -> SearchClick:
    return SearchClick(query="space", value=1.0, **about(offset))  # type: ignore[arg-type]


def delta(offset: int, *, last: bool = True) -> IndexDelta:
    change = ItemDelta(item_id="item-1", components=np.full((1, 2), offset / 1_000, dtype=np.float32))
    return IndexDelta(
        model_version="m", partition=0, offset=offset, batch=1, last_of_batch=last,
        change=change if last else MemoryDelta(entry_id=f"e{offset}", dropped=True),
    )  # fmt: skip


def dead(topic: str, offset: int) -> DeadLetter:
    return DeadLetter(SourceRecord(topic, 2, offset, 0, b"ann", b"\xff%d" % offset), f"because {offset}")


class Letters(Since):
    """What goes to a topic's dead letters."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(bootstrap, topic + SUFFIX)

    def letters(self, count: int) -> list[Letter]:
        found = [(record.value, dict(record.headers)) for record in self.records(count)]
        return [
            (int(said["freshet-source-offset"] or b""), value, (said["freshet-reason"] or b"").decode())
            for value, said in found
        ]


@dataclass
class Scene(Generic[AnyOutbox]):
    """An outbox, and what was written once it is at least so many records: to its topics, by name, and as letters."""

    outbox: AnyOutbox
    values: Callable[[str, int], list[bytes | None]]
    letters: Callable[[int], list[Letter]]


def letters_of(dead_letters: list[DeadLetter]) -> list[Letter]:
    return [(one.offset, one.record.value, one.reason) for one in dead_letters]


def on_kafka(
    kafka: str, make: Callable[[BulkProducer], AnyOutbox], topics: Sequence[str], letters_of_topic: str
) -> Iterator[Scene[AnyOutbox]]:
    since = {topic: Since(kafka, topic) for topic in topics}
    letters = Letters(kafka, letters_of_topic)
    producer = BulkProducer(kafka)
    yield Scene(
        make(producer),
        lambda topic, count: [record.value for record in since[topic].records(count)],
        letters.letters,
    )
    for one in (producer, letters, *since.values()):
        one.close()


@pytest.fixture(params=either("kafka"))
def encoder(request: pytest.FixtureRequest) -> Iterator[Scene[EncoderOutbox]]:
    if request.param == "memory":
        fake = encoder_fakes.MemoryOutbox()
        written: dict[str, Callable[[], list[bytes]]] = {
            ATTRIBUTIONS: lambda: list(map(encode_attribution, fake.attributions)),
            SEARCH_CLICKS: lambda: list(map(encode_click, fake.clicks)),
        }
        yield Scene(fake, lambda topic, _: written[topic](), lambda _: letters_of(fake.dead_letters))  # type: ignore[arg-type, return-value]
        return
    yield from on_kafka(
        request.getfixturevalue("kafka"), encoder_kafka.KafkaOutbox, (ATTRIBUTIONS, SEARCH_CLICKS), INTERACTIONS
    )


@pytest.fixture(params=either("kafka"))
def refresher(request: pytest.FixtureRequest) -> Iterator[Scene[RefresherOutbox]]:
    if request.param == "memory":
        fake = refresher_fakes.MemoryOutbox()
        values = lambda *_: [None if isinstance(one, bytes) else encode(one) for one in fake.records]  # noqa: E731
        yield Scene(fake, values, lambda _: letters_of(fake.unreadable))
        return
    yield from on_kafka(request.getfixturevalue("kafka"), refresher_kafka.KafkaOutbox, (INDEX_DELTAS,), ATTRIBUTIONS)


def test_what_the_encoder_publishes_is_there_in_order_when_publish_returns(encoder: Scene[EncoderOutbox]) -> None:
    sent = [attribution(1), undo(2, undone=1), attribution(3)]
    chosen = [click(1), FORGET, undo(2, undone=1)]
    broken = [dead(INTERACTIONS, 78), dead(INTERACTIONS, 80)]
    encoder.outbox.publish(sent, broken, chosen)
    # A repetition after a crash is written again: readers know records by their source.
    encoder.outbox.publish(sent[2:], (), chosen[2:])
    assert encoder.values(ATTRIBUTIONS, 4) == [encode_attribution(one) for one in (*sent, sent[2])]
    assert encoder.values(SEARCH_CLICKS, 4) == [encode_click(one) for one in (*chosen, chosen[2])]
    assert encoder.letters(2) == [(78, b"\xff78", "because 78"), (80, b"\xff80", "because 80")]


def test_what_the_refresher_publishes_is_there_in_order_when_publish_returns(
    refresher: Scene[RefresherOutbox],
) -> None:
    sent = [delta(number, last=number % 2 == 1) for number in range(4)]
    refresher.outbox.publish(sent, [dead(ATTRIBUTIONS, 78)])
    refresher.outbox.publish(sent[2:], (), [sent[0].key])
    assert refresher.values(INDEX_DELTAS, 7) == [*map(encode, sent), None, *map(encode, sent[2:])]
    assert refresher.letters(1) == [(78, b"\xff78", "because 78")]


@pytest.fixture(params=either("kafka"))
def histories(request: pytest.FixtureRequest) -> Iterator[tuple[HistoryOutbox, Callable[[int], list[SourceRecord]]]]:
    """An outbox, and what was written once it is so many records."""
    if request.param == "memory":
        topic = encoder_fakes.MemoryStream(NUM_PARTITIONS).histories
        yield encoder_fakes.MemoryOutbox(topic), lambda _: topic.reader().read_to_end()
        return
    since, producer = Since(request.getfixturevalue("kafka"), HISTORIES), BulkProducer(request.getfixturevalue("kafka"))
    yield encoder_kafka.KafkaOutbox(producer), since.records
    since.close()
    producer.close()


def test_histories_lie_where_they_were_meant_to_in_order_and_it_is_said_at_which_offsets(
    histories: tuple[HistoryOutbox, Callable[[int], list[SourceRecord]]],
) -> None:
    outbox, written = histories
    sent = [EncodedHistory(3, b"ann", b"1"), EncodedHistory(5, b"bob", None), EncodedHistory(3, MARK_KEY, b"2")]
    offsets = outbox.keep(sent)
    found = {(one.partition, one.offset): (one.key, one.value) for one in written(3)}
    assert found == {(r.partition, at): (r.key, r.value) for r, at in zip(sent, offsets, strict=True)}
    assert offsets[0] < offsets[2] < outbox.keep(sent[:1])[0]
    assert list(outbox.keep([])) == []


def test_a_closed_outbox_publishes_on(encoder: Scene[EncoderOutbox], refresher: Scene[RefresherOutbox]) -> None:
    encoder.outbox.close()
    refresher.outbox.close()
    encoder.outbox.publish([attribution(5)], ())
    refresher.outbox.publish([delta(5)], ())
    assert encoder.values(ATTRIBUTIONS, 1) == [encode_attribution(attribution(5))]
    assert refresher.values(INDEX_DELTAS, 1) == [encode(delta(5))]


@pytest.mark.integration
def test_an_items_attributions_share_a_partition_and_a_voided_user_goes_into_every_one(kafka: str) -> None:
    sent, producer = Since(kafka, ATTRIBUTIONS), BulkProducer(kafka)
    encoder_kafka.KafkaOutbox(producer).publish([attribution(1), FORGET, undo(2, undone=1)], ())
    records = sent.records(2 + NUM_PARTITIONS)
    of_item = {(record.key, record.partition) for record in records if record.key != b"p"}
    assert of_item == {(b"item-1", partition_for(b"item-1", NUM_PARTITIONS))}
    of_user = [record for record in records if record.key == b"p"]
    assert sorted(record.partition for record in of_user) == list(range(NUM_PARTITIONS))
    assert {record.value for record in of_user} == {encode_attribution(FORGET)}
    producer.close()
    sent.close()
