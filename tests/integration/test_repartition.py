"""`interactions` gets another width: every record is there again, with its time, in its user's partition, in order."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from kafka.admin import KafkaAdminClient, NewPartitions

from services.contracts.topics import TOPICS, ensure_topics
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.contracts.topics.items import ITEMS
from services.offline.backfill import repartition as job
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.platform.stream.kafka import BulkProducer, Record, build_consumer, partition_for
from services.platform.stream.topic import Replicas
from services.stack import Ports, Stack
from tests.unit.cli.shell import facts, refused

pytestmark = pytest.mark.integration

REPLICAS = Replicas(replication_factor=1, min_in_sync=1)
USERS = [f"user-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Its own: other tests count on eight partitions."""
    stack = Stack(tmp_path_factory.mktemp("repartition"), ports=Ports.free())
    stack.up(["kafka", "redis"])
    yield stack
    stack.down()


def records(stack: Stack, topic: str) -> list[Any]:
    """Everything in the topic, partition by partition."""
    consumer = build_consumer(stack.kafka_bootstrap, topic, group_id="test")
    try:
        ends = consumer.end_offsets(list(consumer.assignment()))
        consumer.seek_to_beginning()
        found: dict[int, list[Any]] = {tp.partition: [] for tp in ends}
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            for tp, some in consumer.poll(timeout_ms=200).items():
                found[tp.partition] += some
        return [record for partition in sorted(found) for record in found[partition]]
    finally:
        consumer.close(autocommit=False)


def by_user(found: list[Any]) -> dict[bytes | None, list[tuple[Any, ...]]]:
    """Each key's records in the order of the log."""
    users: dict[bytes | None, list[tuple[Any, ...]]] = defaultdict(list)
    for record in sorted(found, key=lambda record: (record.timestamp, record.partition, record.offset)):
        users[record.key].append((record.value, tuple(record.headers), record.timestamp))
    return dict(users)


def width(stack: Stack, topic: str) -> int:
    consumer = build_consumer(stack.kafka_bootstrap, topic, group_id="test")
    try:
        return len(consumer.assignment())
    finally:
        consumer.close(autocommit=False)


def write(stack: Stack, rounds: range, users: list[str] = USERS) -> None:
    producer = BulkProducer(stack.kafka_bootstrap)
    for number in rounds:
        producer.send_many(
            Record(
                INTERACTIONS,
                user.encode(),
                encode_interaction(Interaction(user_id=user, item_id=f"item-{number}", event_id=f"{user}-{number}")),
                headers=[("content-type", b"application/x-protobuf"), ("trace", str(number).encode())],
            )
            for user in users
        )
        time.sleep(0.01)  # the broker's times count milliseconds
    producer.close(timeout_s=5)


def filled(stack: Stack) -> tuple[dict[bytes | None, list[tuple[Any, ...]]], int]:
    """A log whose users have records in two partitions, one of them forgotten in the middle. -> what has to be there
    afterwards, and how many records are not."""
    bootstrap = stack.kafka_bootstrap
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    admin.delete_topics([name for name in admin.list_topics() if not name.startswith("__")])
    while any(not name.startswith("__") for name in admin.list_topics()):
        time.sleep(0.1)
    ensure_topics(bootstrap, replicas=REPLICAS)
    write(stack, range(8))
    forgotten, up_to = USERS[3], {partition_for(USERS[3].encode(), 8): 0}
    for record in records(stack, INTERACTIONS):
        if record.key == forgotten.encode():
            up_to[record.partition] = record.offset
    before = sum(record.key == forgotten.encode() for record in records(stack, INTERACTIONS))
    admin.create_partitions({INTERACTIONS: NewPartitions(11)})
    while width(stack, INTERACTIONS) != 11:
        time.sleep(0.1)
    admin.close()
    write(stack, range(8, 16))
    producer = BulkProducer(bootstrap)
    forget = Forget(forget_id="f", user_id=forgotten, up_to=up_to, requested_ms=1)
    producer.send_many(
        [
            Record(INTERACTIONS, b"", b"", partition=10),  # nobody can read it, and it stays
            Record(FORGETS, forgotten.encode(), encode_forget(forget)),
            Record(ATTRIBUTIONS, b"item-1", b"of old positions"),
            Record(INDEX_DELTAS, b"item-1", b"of old sums"),
            Record(ITEMS, b"item-1", b"an item"),
        ]
    )
    producer.close(timeout_s=5)
    with redis.Redis.from_url(stack.redis_url) as client:
        client.set("of the old log", 1)
    expected = by_user(records(stack, INTERACTIONS))
    expected[forgotten.encode()] = expected[forgotten.encode()][before:]
    return expected, before


def check(stack: Stack, expected: dict[bytes | None, list[tuple[Any, ...]]], num_partitions: int) -> None:
    found = records(stack, INTERACTIONS)
    assert by_user(found) == expected
    # Within a partition a user's records are in their order, and they are in no other one.
    for key in expected:
        of_key = [record for record in found if record.key == key]
        assert [(record.value, tuple(record.headers), record.timestamp) for record in of_key] == expected[key]
        if key:
            assert {record.partition for record in of_key} == {partition_for(key, num_partitions)}
    assert [width(stack, topic) for topic in (INTERACTIONS, ATTRIBUTIONS, FORGETS)] == [num_partitions] * 2 + [1]
    assert [records(stack, topic) for topic in (ATTRIBUTIONS, FORGETS, INDEX_DELTAS)] == [[], [], []]
    assert [record.value for record in records(stack, ITEMS)] == [b"an item"]
    admin = KafkaAdminClient(bootstrap_servers=stack.kafka_bootstrap)
    assert {name for name in admin.list_topics() if not name.startswith("__")} == {topic.name for topic in TOPICS}
    admin.close()
    with redis.Redis.from_url(stack.redis_url) as client:
        assert not client.keys("*")
    # New records have the broker's times again.
    asked_ms = int(time.time() * 1000)
    producer = BulkProducer(stack.kafka_bootstrap)
    (place,) = producer.send_many([Record(INTERACTIONS, b"user-0", b"x", timestamp_ms=5)])
    producer.close(timeout_s=5)
    (last,) = [r for r in records(stack, INTERACTIONS) if (r.partition, r.offset) == place]
    assert last.timestamp >= asked_ms - 1000


def run(stack: Stack, num_partitions: int) -> job.Repartitioned:
    return job.repartition(stack.kafka_bootstrap, stack.redis_url, num_partitions, replicas=REPLICAS)


def test_every_record_is_there_again_in_its_users_partition(stack: Stack) -> None:
    expected, forgotten = filled(stack)
    report = run(stack, 5)
    assert (report.records, report.forgotten) == (sum(map(len, expected.values())), forgotten)
    check(stack, expected, 5)
    with pytest.raises(PreconditionFailed, match="has 5 partitions already"):
        run(stack, 5)
    with pytest.raises(InvalidRequest, match="partitions=0 allowed: 1 to 1024"):
        run(stack, 0)


class Killed(BaseException):
    """The job ends here, as if its process had been killed."""


@pytest.mark.parametrize("step", range(5))
def test_broken_off_anywhere_it_goes_on_when_it_is_run_again(
    stack: Stack, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the n-th of the moments at which something was just made, deleted or written."""
    expected, _ = filled(stack)
    moments = 0
    kill_at = (2, 5, 7, 10, 16)[step]

    def counted(name: str) -> None:
        original = getattr(job._Repartition, name)

        def call(self: Any, *arguments: Any) -> Any:
            nonlocal moments
            moments += 1
            result = original(self, *arguments)
            if moments == kill_at:
                raise Killed
            return result

        monkeypatch.setattr(job._Repartition, name, call)

    for name in ("_make", "_delete", "_write", "_set_times"):
        counted(name)
    with pytest.raises(Killed):
        run(stack, 13)
    run(stack, 13)
    check(stack, expected, 13)


def test_what_was_written_since_it_broke_off_is_not_thrown_away(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(stack)

    def killed(self: Any, whole: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(job._Repartition, "_copy_back", killed)
        with pytest.raises(Killed):
            run(stack, 3)
    write(stack, range(90, 91))
    with pytest.raises(PreconditionFailed, match="was written after it was copied"):
        run(stack, 3)
    with pytest.raises(PreconditionFailed, match="a change to 3 partitions was begun and not finished"):
        run(stack, 4)
    assert len([record for record in records(stack, INTERACTIONS) if b"item-90" in (record.value or b"")]) == len(USERS)


def test_the_command_says_what_it_did_and_what_it_needs(stack: Stack) -> None:
    expected, forgotten = filled(stack)
    checkpoints = stack.place.state.data("refresher")
    (checkpoints / "model").mkdir(parents=True)
    asked = ("repartition", "--partitions", 4, "--state")
    wanted = {"partitions": 4, "records": sum(map(len, expected.values())), "forgotten": forgotten}
    assert facts(*asked, stack.place.state.root) == wanted
    assert not (checkpoints / "model").exists()
    stack.stop("kafka")
    said = refused(3, *asked, stack.place.state.root, "--json")
    assert json.loads(said)["error"].startswith("Kafka at 127.0.0.1:")
