"""`freshet archive` beside a real broker: what retention took is read from it, and a forget takes users out of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts.topics import ensure_topics
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.encoder.config import EncoderSettings
from services.offline.archive.files import open_whole
from services.offline.backfill.jobs import run_reattribution
from services.offline.datasets import load_dataset
from services.platform.stream.kafka import BulkProducer, Record, build_consumer, partition_for
from services.stack import Ports, Stack
from tests.unit.cli.shell import run

pytestmark = pytest.mark.integration

USERS = [f"user-{number}" for number in range(12)]
NOW_MS = 1_700_000_000_000


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Its own broker: others read `interactions` from its beginning."""
    stack = Stack(tmp_path / "stack", ports=Ports.free())
    stack.up(["kafka"])
    ensure_topics(stack.kafka_bootstrap)
    yield stack
    stack.down()


def read(stack: Stack, topic: str) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Everything in the topic by its position."""
    consumer = build_consumer(stack.kafka_bootstrap, topic, group_id="test")
    try:
        ends = consumer.end_offsets(list(consumer.assignment()))
        consumer.seek_to_beginning()
        found = {}
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            for some in consumer.poll(timeout_ms=200).values():
                for one in some:
                    found[one.partition, one.offset] = (one.timestamp, one.key, one.value, tuple(one.headers))
        return found
    finally:
        consumer.close(autocommit=False)


def write(stack: Stack, items: list[str], rounds: range) -> None:
    """Interactions and undos, a record that nobody can read, JSON, and a transaction that is taken back."""
    records = []
    for number in rounds:
        for user in USERS:
            event = Interaction(
                user_id=user,
                item_id=items[(number * 7 + len(user)) % len(items)],
                event_id=f"{user}-{number}",
                event_time_ms=NOW_MS + number * 1000,
            )
            if number % 10 == 9:
                event = Interaction(user_id=user, event_id=event.event_id, undoes_event_id=f"{user}-{number - 2}")
            records.append(Record(INTERACTIONS, user.encode(), encode_interaction(event), [("trace", b"\x00\xff")]))
    value = json.dumps({"user_id": USERS[0], "item_id": items[0], "event_time": NOW_MS / 1000}).encode()
    records.append(Record(INTERACTIONS, USERS[0].encode(), value, [("content-type", b"application/json")]))
    records.append(Record(INTERACTIONS, USERS[1].encode(), b"\xff"))
    producer = BulkProducer(stack.kafka_bootstrap)
    producer.send_many(records)
    producer.close(timeout_s=5)
    aborting = KafkaProducer(
        bootstrap_servers=stack.kafka_bootstrap, acks="all", transactional_id=f"aborted-{rounds.start}"
    )
    aborting.init_transactions()
    aborting.begin_transaction()
    for user in USERS:
        aborting.send(INTERACTIONS, b"taken back", user.encode()).get(timeout=10)
    aborting.abort_transaction()
    aborting.close()


def archive(stack: Stack, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The command's exit status, and what it says."""
    result = run("archive", folder, "--state", stack.place.state.root, "--json", *options)
    return result.exit_code, json.loads(result.stdout)


def archived(folder: Path) -> dict[tuple[int, int], tuple[Any, ...]]:
    whole = open_whole(folder)
    return {
        (one.partition, one.offset): (one.written_ms, one.key, one.value, tuple(one.headers))
        for number in whole.partitions
        for some in whole.records(number)
        for one in some
    }


def test_what_retention_took_is_read_from_the_archive(stack: Stack, small_bundle: Path, tmp_path: Path) -> None:
    items, folder = load_bundle(small_bundle).item_ids[:40], tmp_path / "archive"
    write(stack, items, range(30))
    first = read(stack, INTERACTIONS)
    status, report = archive(stack, folder)
    assert (status, report["copied"], report["records"]) == (0, len(first), len(first))
    assert archived(folder) == first
    write(stack, items, range(30, 45))
    whole = read(stack, INTERACTIONS)
    settings = EncoderSettings(bundle=small_bundle, kafka_bootstrap=stack.kafka_bootstrap)
    run_reattribution(settings)
    expected = read(stack, ATTRIBUTIONS)
    # Retention takes what is archived, and nothing else.
    admin = KafkaAdminClient(bootstrap_servers=stack.kafka_bootstrap)
    ends = {int(number): end for number, (_, end) in report["partitions"].items()}
    admin.delete_records({TopicPartition(INTERACTIONS, partition): end for partition, end in ends.items() if end})
    admin.close()
    assert read(stack, INTERACTIONS).keys() == {place for place in whole if place[1] >= ends[place[0]]}
    # The same job again, in a group of its own: it has written nothing yet.
    run_reattribution(settings, rekeys=True, archive=folder)
    again = {place: one for place, one in read(stack, ATTRIBUTIONS).items() if place not in expected}
    assert sorted(one[1:3] for one in again.values()) == sorted(one[1:3] for one in expected.values())
    assert len({one[1:3] for one in expected.values()}) == len(expected) > 400
    # The next run goes on; one that is altered is refused, and stays.
    assert archive(stack, folder)[1]["copied"] == len(whole) - len(first)
    assert archived(folder) == whole
    _forgotten_users_leave(stack, folder, whole)
    altered = min(folder.glob("*.parquet"))
    altered.write_bytes(altered.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for options in ((), ("--check",)):
        status, said = archive(stack, folder, *options)
        assert status == 1
        assert altered.name in said["error"]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def _forgotten_users_leave(stack: Stack, folder: Path, whole: dict[tuple[int, int], tuple[Any, ...]]) -> None:
    user = USERS[3].encode()
    partition = partition_for(user, 8)
    last = max(offset for (number, offset), one in whole.items() if number == partition and one[1] == user)
    forget = Forget(forget_id="f", user_id=USERS[3], up_to={partition: last}, requested_ms=1)
    producer = BulkProducer(stack.kafka_bootstrap)
    producer.send_many([Record(FORGETS, user, encode_forget(forget))])
    producer.close(timeout_s=5)
    status, report = archive(stack, folder)
    rest = {place: one for place, one in whole.items() if one[1] != user}
    assert (status, report["copied"], report["forgotten"]) == (0, 0, len(whole) - len(rest))
    assert archived(folder) == rest
    assert USERS[3] not in load_dataset(folder).user_ids
    assert set(load_dataset(folder).user_ids) == set(USERS) - {USERS[3]}
