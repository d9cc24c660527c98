"""The encoder's Kafka adapters on the real broker: reading from where one is told, committing, publishing whole."""

import secrets
import time
from collections.abc import Callable, Iterator

import pytest
from freshet.v1 import events_pb2
from kafka.admin import KafkaAdminClient

from services.common.kafka import BulkProducer, EventProducer, Record, partition_for
from services.common.query_state import PackedQueryState
from services.common.stream.reader import TopicReader
from services.common.stream.record import DeadLetter, SourceRecord
from services.common.stream.retraction import ForgetUpTo, Undo
from services.common.stream.topic import NUM_PARTITIONS, Topic
from services.common.stream.topics import ensure_topics
from services.common.stream.topics.attributions import ATTRIBUTIONS, Attribution
from services.common.stream.topics.dead_letters import SUFFIX
from services.common.stream.topics.forgets import Forget, encode_forget
from services.common.stream.topics.interactions import INTERACTIONS
from services.encoder.adapters.forget_log import ForgetTopic
from services.encoder.adapters.kafka_outbox import KafkaOutbox

pytestmark = pytest.mark.integration

PARTITIONS = 3


@pytest.fixture
def topic(kafka: str) -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    settings = {"message.timestamp.type": "LogAppendTime"}
    ensure_topics(kafka, topics=(Topic(name=name, num_partitions=PARTITIONS, settings=settings),))
    yield name
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    admin.delete_topics([name])
    admin.close()


@pytest.fixture
def open_stream(kafka: str) -> Iterator[Callable[..., TopicReader]]:
    opened: list[TopicReader] = []

    def build(topic: str, group: str = "test", partitions: list[int] | None = None) -> TopicReader:
        stream = TopicReader(kafka, topic, group_id=group, partitions=partitions)
        opened.append(stream)
        return stream

    yield build
    for stream in opened:
        stream.close()


def read(stream: TopicReader, count: int) -> list[SourceRecord]:
    found: list[SourceRecord] = []
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found += stream.poll(200, 1_000)
    return found


def test_attributions_and_dead_letters_are_published_whole(kafka: str, open_stream: Callable[..., TopicReader]) -> None:
    attributions, letters = open_stream(ATTRIBUTIONS), open_stream(INTERACTIONS + SUFFIX)
    attributions.seek(attributions.end_offsets())
    letters.seek(letters.end_offsets())
    attribution = Attribution(
        event_id="e1",
        item_id="item-1",
        state=PackedQueryState(
            model_version="m", components=b"\x00\x3c" * 4, gate=b"", num_components=1, component_width=4
        ),
        type="rating",
        value=4.5,
        event_time_ms=1_234_567,
        recorded_ms=2_345_678,
        partition=2,
        offset=77,
        user_pseudonym="p",
    )
    undo = Undo(
        event_id="u1",
        item_id="item-1",
        undoes=(2, 77),
        event_time_ms=1_300_000,
        recorded_ms=2_400_000,
        partition=2,
        offset=79,
        user_pseudonym="p",
    )
    outbox = KafkaOutbox(BulkProducer(kafka))
    outbox.publish(
        [attribution, undo], [DeadLetter(SourceRecord("interactions", 2, 78, 0, b"ann", b"\xff"), "because")]
    )
    outbox.close()

    record, undone = read(attributions, 2)
    message = events_pb2.Attribution.FromString(record.value or b"")
    assert record.key == b"item-1"
    assert (message.source.partition, message.source.offset, message.user_pseudonym) == (2, 77, "p")
    assert (message.event_time.ToMilliseconds(), message.recorded_time.ToMilliseconds()) == (1_234_567, 2_345_678)
    assert message.query_state.components == b"\x00\x3c" * 4
    assert not message.HasField("undoes")
    # In the item's own partition, behind what it takes back.
    assert (undone.partition, undone.key) == (record.partition, b"item-1")
    message = events_pb2.Attribution.FromString(undone.value or b"")
    assert (message.undoes.partition, message.undoes.offset, message.item_id) == (2, 77, "item-1")
    assert (message.source.offset, message.HasField("query_state")) == (79, False)
    (letter,) = read(letters, 1)
    assert (letter.key, letter.value) == (b"ann", b"\xff")
    assert ("freshet-reason", b"because") in letter.headers


def test_a_voided_user_goes_into_every_partition(kafka: str, open_stream: Callable[..., TopicReader]) -> None:
    attributions = open_stream(ATTRIBUTIONS)
    attributions.seek(attributions.end_offsets())
    outbox = KafkaOutbox(BulkProducer(kafka))
    outbox.publish([ForgetUpTo(forget_id="f1", up_to={0: 4, 7: -1}, user_pseudonym="p", recorded_ms=2_345_678)], [])
    outbox.close()
    records = read(attributions, NUM_PARTITIONS)
    assert sorted(record.partition for record in records) == list(range(NUM_PARTITIONS))
    assert {record.key for record in records} == {b"p"}
    (value,) = {record.value for record in records}
    message = events_pb2.Attribution.FromString(value or b"")
    assert (message.forgets.forget_id, message.user_pseudonym, message.item_id) == ("f1", "p", "")
    assert [(place.partition, place.offset) for place in message.forgets.up_to] == [(0, 4), (7, -1)]


def test_forgets_are_read_whole_then_followed(kafka: str, open_stream: Callable[..., TopicReader]) -> None:
    name = f"test-{secrets.token_hex(4)}"
    ensure_topics(kafka, topics=(Topic(name=name, num_partitions=1, settings={"cleanup.policy": "compact"}),))
    producer = BulkProducer(kafka)

    def put(user: str, offset: int) -> None:
        forget = Forget(forget_id=f"f{offset}", user_id=user, up_to={3: offset}, requested_ms=0)
        producer.send_many([Record(name, user.encode(), encode_forget(forget))])

    put("ann", 1)
    put("bob", 2)
    producer.send_many([Record(name, b"eve", b"\xff")])
    log = ForgetTopic(open_stream(name))
    found = log.read()
    assert [record.forget.user_id if record.forget else None for record in found] == ["ann", "bob", None]
    assert found[2].reason.startswith("value=")
    assert log.read() == []
    put("ann", 9)
    deadline = time.monotonic() + 20
    while not (found := log.read()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [record.forget.up_to for record in found if record.forget] == [{3: 9}]
    # A lost connection loses nothing and repeats nothing.
    log.close()
    put("cat", 11)
    found = []
    while not (found := log.read()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [record.record.offset for record in found] == [4]
    producer.close()


async def test_an_acknowledged_send_says_where_it_lies(kafka: str, topic: str) -> None:
    producer = EventProducer(kafka)
    places = [await producer.send(topic, b"ann", b"%d" % number, timeout_s=10) for number in range(3)]
    await producer.close()
    assert places == [(partition_for(b"ann", PARTITIONS), number) for number in range(3)]
    assert producer.reachable is True
