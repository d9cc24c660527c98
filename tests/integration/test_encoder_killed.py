"""kill -9 of the encoder at random points, undos and forgets among the records: nothing lost, nothing counted twice."""

import contextlib
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.encoder import HashEncoder, MemoryOutbox, MemoryStream
from freshet.v1 import events_pb2
from kafka.admin import KafkaAdminClient
from killed_encoder import KEY, VOCABULARY
from standing import standing

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topic_reader import TopicReader
from services.contracts.topics import ensure_topics
from services.contracts.topics.attributions import ATTRIBUTIONS, Attribution, Undo
from services.contracts.topics.forgets import Forget, encode_forget
from services.contracts.topics.interactions import Interaction, encode_interaction
from services.encoder.handlers.apply_records import ApplyRecords
from services.offline.backfill.memory_store import MemoryStore
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.topic import Topic
from services.user_state.forgetting import Forgotten
from services.user_state.values import UserHistory
from services.user_state.writer import StateWriter

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

PARTITIONS = 2
NUM_USERS = 12
KILLS = 12


@pytest.fixture
def topics(kafka: str) -> Iterator[tuple[str, str]]:
    interactions, forgets = (f"test-{secrets.token_hex(4)}" for _ in range(2))
    ensure_topics(
        kafka,
        topics=(
            Topic(name=interactions, num_partitions=PARTITIONS, settings={"message.timestamp.type": "LogAppendTime"}),
            Topic(name=forgets, num_partitions=1, settings={"cleanup.policy": "compact"}),
        ),
    )
    yield interactions, forgets
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    admin.delete_topics([interactions, forgets])
    admin.close()


def events(rng: random.Random, users: list[str], count: int, name: str) -> list[Interaction]:
    found = []
    start_ms = int(time.time() * 1000) - 10_000_000
    for number in range(count):
        user = rng.choice(users)
        if rng.random() < 0.1 and number:
            undone = f"{name}-{rng.randrange(number)}"
            found.append(Interaction(user_id=user, event_id=f"{name}-{number}", undoes_event_id=undone))
        else:
            when = start_ms + number * 1_000 - rng.randrange(5_000)
            item = f"item-{rng.randrange(55)}"
            found.append(
                Interaction(user_id=user, item_id=item, event_id=f"{name}-{number}", value=1.0, event_time_ms=when)
            )
    return found


@pytest.mark.parametrize("seed", [20_261_121])
def test_killed_at_random_points_the_effect_is_that_of_each_record_once(
    kafka: str, own_redis: str, topics: tuple[str, str], seed: int
) -> None:
    rng = random.Random(seed)
    topic, forgets_topic = topics
    users = [f"{topic}-{number}" for number in range(NUM_USERS)]
    attributions = TopicReader(kafka, ATTRIBUTIONS, group_id=topic)
    first = attributions.end_offsets()
    producer = BulkProducer(kafka)
    store = StateWriter(own_redis)
    command = [sys.executable, "-u", str(Path(__file__).with_name("killed_encoder.py"))]
    command += [kafka, own_redis, topic, forgets_topic, topic]
    ends = dict.fromkeys(range(PARTITIONS), 0)

    def write(batch: list[Interaction]) -> None:
        for partition, offset in producer.send_many(
            [Record(topic, event.user_id.encode(), encode_interaction(event)) for event in batch]
        ):
            ends[partition] = max(ends[partition], offset + 1)

    def caught_up() -> bool:
        epoch = store.epoch()
        return epoch is not None and all(
            found.watermark == ends[partition] - 1
            for partition, found in store.progress(range(PARTITIONS), epoch).items()
        )

    def run_until(done: Any, kills: int) -> None:
        for number in range(kills + 1):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                assert process.stdout is not None
                while "stream_epoch" not in process.stdout.readline():
                    assert process.poll() is None
                # From here on it applies: 30-60 polls of 8 records a second.
                if number < kills:
                    time.sleep(rng.uniform(0.0, 0.25))
                    continue
                deadline = time.monotonic() + 60
                while not done():
                    assert time.monotonic() < deadline, "the consumer did not catch up within 60 s"
                    time.sleep(0.02)
            finally:
                process.kill()
                process.communicate()

    write(events(rng, users, 1_000, "a"))
    run_until(caught_up, KILLS // 2)
    void = {partition: end - 1 for partition, end in ends.items()}
    gone = users[3]
    forget = Forget(forget_id="f1", user_id=gone, up_to=void, requested_ms=1)
    producer.send_many([Record(forgets_topic, gone.encode(), encode_forget(forget))])
    run_until(lambda: store.load_users([gone], store.epoch() or "")[gone].forgotten == void, KILLS // 4)
    write(events(rng, users, 300, "b"))
    run_until(caught_up, KILLS // 4)

    wanted_users, wanted = applied_once(kafka, topic, gone, void, users)
    found = store.load_users(users, store.epoch() or "")
    assert {u: (h.events, h.positions) for u, h in found.items()} == {
        u: (h.events, h.positions) for u, h in wanted_users.items()
    }
    assert folded(attributions, first, {pseudonym_of(user, KEY) for user in users}) == wanted
    for closing in (producer, store, attributions):
        with contextlib.suppress(Exception):
            closing.close()  # type: ignore[attr-defined]


def applied_once(
    kafka: str, topic: str, gone: str, void: dict[int, int], users: list[str]
) -> tuple[dict[str, UserHistory], dict[tuple[int, int], bytes]]:
    """The same log applied in memory, one record after the other, by who knew of the forget from the beginning."""
    stream = TopicReader(kafka, topic, group_id="reference")
    stream.seek(dict.fromkeys(range(PARTITIONS), 0))
    total = sum(stream.end_offsets().values())
    copy = MemoryStream(PARTITIONS)
    deadline = time.monotonic() + 30
    while sum(map(len, copy.log)) < total and time.monotonic() < deadline:
        for record in stream.poll(200, 1_000):
            copy.append(record.partition, record.key, record.value, record.written_ms)
    stream.close()
    forgotten, memory, outbox = Forgotten(), MemoryStore(), MemoryOutbox()
    forgotten.add(Forget(forget_id="f1", user_id=gone, up_to=void, requested_ms=1))
    handler = ApplyRecords(
        store=memory,
        outbox=outbox,
        encoder=HashEncoder(),
        vocabulary=VOCABULARY,
        pseudonym_key=KEY,
        forgotten=forgotten,
    )
    handler.resync(copy)
    while records := copy.poll(0, 1):
        handler.apply(records)
    undone = {message.undoes for message in outbox.attributions if isinstance(message, Undo)}
    attributed = {
        (message.partition, message.offset): message.state.components
        for message in outbox.attributions
        if isinstance(message, Attribution) and (message.partition, message.offset) not in undone
    }
    return dict(memory.load_users(users, memory.epoch() or "")), attributed


def folded(stream: TopicReader, first: Any, pseudonyms: set[str]) -> dict[tuple[int, int], bytes]:
    """What stands of these users after folding `attributions` from `first` on: each place once, void ones left out."""
    stream.seek(first)
    total = sum(stream.end_offsets().values()) - sum(first.values())
    messages = []
    deadline = time.monotonic() + 30
    while len(messages) < total and time.monotonic() < deadline:
        messages += [events_pb2.Attribution.FromString(record.value or b"") for record in stream.poll(200, 5_000)]
    assert len(messages) == total
    mine = [message for message in messages if message.user_pseudonym in pseudonyms]
    return standing(mine)
