"""A real broker: aborted transactions, single records read again, a recreated topic; and the progress that remembers a
log, in a real Redis."""

import secrets
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from fakes.encoder import HashEncoder, MemoryOutbox
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient

from services.contracts.topic_reader import TopicReader
from services.contracts.topics import ensure_topics
from services.contracts.topics.interactions import Interaction, encode_interaction
from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import Conflict, PreconditionFailed
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.records import SourceRecord
from services.platform.stream.topic import NUM_PARTITIONS, Topic
from services.user_state.values import AdvanceStep, UserUpdate
from services.user_state.writer import StateWriter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SETTINGS = {"message.timestamp.type": "LogAppendTime"}


@pytest.fixture
def topic(kafka: str) -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    make(kafka, name)
    yield name
    delete(kafka, name)


def make(kafka: str, name: str, partitions: int = 1) -> None:
    ensure_topics(kafka, topics=(Topic(name=name, num_partitions=partitions, settings=SETTINGS),))


def delete(kafka: str, name: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    admin.delete_topics([name])
    admin.close()


@pytest.fixture
def open_stream(kafka: str) -> Iterator[Callable[[str], TopicReader]]:
    opened: list[TopicReader] = []

    def build(topic: str) -> TopicReader:
        opened.append(TopicReader(kafka, topic, group_id=f"group-{secrets.token_hex(4)}"))
        return opened[-1]

    yield build
    for stream in opened:
        stream.close()


def write(kafka: str, topic: str, *items: str) -> None:
    producer = BulkProducer(kafka)
    producer.send_many(
        [
            Record(topic, b"ann", encode_interaction(Interaction(user_id="ann", item_id=item, event_time_ms=1_000)))
            for item in items
        ]
    )
    producer.close()


def read_on(stream: TopicReader, end: int) -> list[SourceRecord]:
    found: list[SourceRecord] = []
    deadline = time.monotonic() + 30
    while stream.positions()[0] < end and time.monotonic() < deadline:
        found += stream.poll(200, 100)
    return found


def test_what_a_producer_aborted_is_not_read_and_the_end_is_reached_all_the_same(
    kafka: str, topic: str, open_stream: Callable[[str], TopicReader]
) -> None:
    producer = KafkaProducer(bootstrap_servers=kafka, acks="all", transactional_id=secrets.token_hex(4))
    producer.init_transactions()
    for value, commits in ((b"a", True), (b"b", False), (b"c", True), (b"d", False)):
        producer.begin_transaction()
        producer.send(topic, value, b"k")
        producer.flush()
        if commits:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
    producer.close()
    stream = open_stream(topic)
    stream.seek({0: 0})
    (end,) = stream.end_offsets().values()
    assert end == 8
    assert [record.value for record in read_on(stream, end)] == [b"a", b"c"]
    assert stream.positions() == {0: 8}


def test_single_records_are_read_again_beside_the_stream(kafka: str, open_stream: Callable[[str], TopicReader]) -> None:
    name = f"test-{secrets.token_hex(4)}"
    make(kafka, name, partitions=3)
    producer = BulkProducer(kafka)
    for partition, count in ((0, 5), (1, 300)):
        producer.send_many([Record(name, b"k", b"%d" % n, partition=partition) for n in range(count)])
    producer.close()
    stream = open_stream(name)
    stream.seek(dict.fromkeys(range(3), 0))
    first = stream.poll(5_000, 2)
    found = stream.records_at({0: 4, 1: 200, 2: 0})
    assert {partition: record.value for partition, record in found.items()} == {0: b"4", 1: b"200"}
    assert stream.records_at({0: 5, 1: 299}).keys() == {1}
    assert stream.records_at({0: 50}) == {}
    rest = read_on(stream, 5)
    mine = [record.value for record in (*first, *rest) if record.partition == 0]
    assert mine == [b"0", b"1", b"2", b"3", b"4"]
    delete(kafka, name)


def test_a_topic_gets_as_many_partitions_as_the_one_that_it_goes_with(kafka: str) -> None:
    first, second = (f"test-{secrets.token_hex(4)}" for _ in range(2))
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    for topic in (Topic(name=first, num_partitions=3), Topic(name=second, as_many_as=first)):
        ensure_topics(kafka, topics=(topic,))
        deadline = time.monotonic() + 20
        while len(admin.describe_topics([topic.name])[0]["partitions"]) != 3:
            assert time.monotonic() < deadline, f"{topic.name} does not have three partitions"
    admin.close()


def test_a_topic_that_was_deleted_and_filled_again_is_refused_by_name(
    kafka: str, open_stream: Callable[[str], TopicReader]
) -> None:
    name, store = f"test-{secrets.token_hex(4)}", MemoryStore()
    make(kafka, name)
    write(kafka, name, "a", "b", "c")
    stream = open_stream(name)
    handler = ApplyRecords(
        store=store,
        outbox=MemoryOutbox(),
        encoder=HashEncoder(),
        vocabulary=Vocabulary(model_version="m", item_index={}, user_index={}, max_history=16),
        pseudonym_key=b"key",
    )
    handler.resync(stream)
    handler.apply(read_on(stream, 3))
    handler.progress.identity.check(stream, {0})
    delete(kafka, name)
    deadline = time.monotonic() + 30
    while name in _topics(kafka) and time.monotonic() < deadline:
        time.sleep(0.1)
    make(kafka, name)
    write(kafka, name, "f", "e", "d", "c", "b")
    # The client's metadata is of the old topic for a moment.
    with pytest.raises(Conflict, match="do not have the records"):
        _after_reconnecting(stream, lambda: handler.progress.identity.check(stream, {0}))
    with pytest.raises(PreconditionFailed, match="recreated"):
        handler.resync(stream)
    assert [event.item_id for event in store.load_users(["ann"], handler.progress.epoch)["ann"].events] == [
        "a",
        "b",
        "c",
    ]
    delete(kafka, name)


def _topics(kafka: str) -> list[str]:
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    try:
        return list(admin.list_topics())
    finally:
        admin.close()


def _after_reconnecting(stream: TopicReader, ask: Callable[[], None]) -> None:
    stream.close()
    ask()


def test_redis_keeps_what_is_remembered_of_a_log_and_begins_anew(own_redis: str) -> None:
    writer = StateWriter(own_redis)
    with redis.Redis.from_url(own_redis) as client:
        epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
        for name in ("ann", "{bob}"):
            update = UserUpdate(
                user_id=name,
                model_version="m",
                expected=b"",
                positions={0: 1},
                events=[],
                recent=[],
                seen_times={"a": 1},
            )
            writer.apply([update], epoch, {})
        client.set("lease:0", "somebody")
        writer.begin([0], epoch)
        step = AdvanceStep(partition=0, from_watermark=-1, to_watermark=1, counts={"applied": 2}, anchors="0:aa,1:bb")
        writer.advance([step], epoch)
        writer.advance([AdvanceStep(partition=0, from_watermark=1, to_watermark=2, counts={})], epoch)
        found = writer.progress([0], epoch)[0]
        assert (found.watermark, found.anchors, found.counts["applied"]) == (2, "0:aa,1:bb", 2)
        assert writer.progress([0], "another")[0].anchors == ""
        writer.start_new_epoch("another")
        assert writer.epoch() == epoch
        writer.start_new_epoch(epoch)
        assert writer.epoch() not in (epoch, None)
        left = {key.decode() for key in client.scan_iter()}
        assert {key for key in left if key.startswith("u:")} == set()
        assert "lease:0" in left
        client.flushdb()
    writer.close()
