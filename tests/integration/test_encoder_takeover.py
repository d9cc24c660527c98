"""Encoder processes take over partitions from each other under load: one is killed, one is frozen, one joins, one ends.

The oracle is a replay of the log in memory: histories, positions and query states of every user, and what stands of
`attributions`. Figures are printed, one JSON object per line (`pytest -s`).
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from fakes.encoder import HashEncoder, MemoryOutbox, MemoryStream
from freshet.v1 import events_pb2
from killed_encoder import VOCABULARY
from standing import standing

from services.contracts.pseudonyms import DEVELOPMENT_PSEUDONYM_KEY
from services.contracts.topic_reader import TopicReader
from services.contracts.topics import ensure_topics
from services.contracts.topics.attributions import ATTRIBUTIONS, Attribution, Undo
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.encoder.handlers.apply_records import ApplyRecords
from services.offline.backfill.memory_store import MemoryStore
from services.platform.stream.kafka import BulkProducer, Record
from services.platform.stream.topic import NUM_PARTITIONS
from services.stack import Ports, Stack
from services.user_state.forgetting import Forgotten
from services.user_state.reader import StateReader
from services.user_state.writer import StateWriter

pytestmark = [pytest.mark.integration, pytest.mark.cluster, pytest.mark.timeout(600)]

GROUP = "sharing"
LEASE_S = 3.0
USERS = [f"user-{number}" for number in range(80)]
# Of a loaded machine; what is measured is printed.
PATIENCE_S = 30.0


class Place(NamedTuple):
    """Where the test's Kafka and Redis are."""

    kafka: str
    redis_url: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Of this module's own: nobody else writes to the topics."""
    stack = Stack(tmp_path_factory.mktemp("takeover"), ports=Ports.free())
    stack.up(["kafka", "redis"])
    ensure_topics(stack.kafka_bootstrap)
    yield Place(stack.kafka_bootstrap, stack.redis_url)
    stack.down()


class Load:
    """Writes events and undos until it is ended. acknowledged: where they lie."""

    def __init__(self, kafka: str, seed: int) -> None:
        self._producer, self._rng, self._number = BulkProducer(kafka), random.Random(seed), 0
        self.acknowledged: set[tuple[int, int]] = set()
        # One past the last record of each partition.
        self.ends = dict.fromkeys(range(NUM_PARTITIONS), 0)
        self._active, self._sending = USERS, threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def only(self, users: list[str]) -> None:
        """From now on these write; whatever others wrote is acknowledged."""
        with self._sending:
            self._active = users

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            with self._sending:
                records = [self._record() for _ in range(8)]
                for partition, offset in self._producer.send_many(records):
                    self.acknowledged.add((partition, offset))
                    self.ends[partition] = max(self.ends[partition], offset + 1)

    def _record(self) -> Record:
        self._number += 1
        user, name = self._rng.choice(self._active), f"e-{self._number}"
        when = int(time.time() * 1000) - self._rng.randrange(5_000)
        event = Interaction(user_id=user, item_id=f"item-{self._rng.randrange(55)}", event_id=name, event_time_ms=when)
        if self._rng.random() < 0.1:
            undone = f"e-{self._rng.randrange(self._number)}"
            event = Interaction(user_id=user, event_id=name, undoes_event_id=undone)
        return Record(INTERACTIONS, user.encode(), encode_interaction(event))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._producer.close()


class World:
    """The processes, and what the state store says of them."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self._folder = place, folder
        self.store, self.redis = StateWriter(place.redis_url), redis.Redis.from_url(place.redis_url)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> int:
        """A process that waits for `join`: what it imports takes seconds."""
        command = [sys.executable, str(Path(__file__).with_name("sharing_encoder.py"))]
        environment = os.environ | {
            "FRESHET_KAFKA_BOOTSTRAP": self.place.kafka,
            "FRESHET_REDIS_URL": self.place.redis_url,
            "FRESHET_ENCODER_GROUP": GROUP,
            "FRESHET_ENCODER_LEASE_MS": str(int(1000 * LEASE_S)),
            "FRESHET_ENCODER_HISTORY_EVERY_S": "1",
        }
        with (self._folder / f"encoder-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self.processes[process.pid] = process
        return process.pid

    def join(self, pid: int) -> None:
        stdin = self.processes[pid].stdin
        assert stdin is not None
        stdin.write(b"\n")
        stdin.close()

    def held(self) -> dict[int, set[int]]:
        """By process, the partitions that it holds."""
        names = [f"encoder:{{{GROUP}}}:lease:{partition}" for partition in range(NUM_PARTITIONS)]
        found: dict[int, set[int]] = {}
        for partition, owner in enumerate(self.redis.mget(names)):  # type: ignore[arg-type]
            if owner is not None:
                found.setdefault(int(owner.decode().split("-")[-2]), set()).add(partition)
        return found

    def applied(self) -> dict[int, int]:
        """One past the last applied record of each partition."""
        epoch = self.store.epoch()
        progress = self.store.progress(range(NUM_PARTITIONS), epoch) if epoch else {}
        return {partition: found.watermark + 1 for partition, found in progress.items()}

    def has_applied(self, ends: dict[int, int]) -> bool:
        applied = self.applied()
        return all(applied.get(partition, 0) >= end for partition, end in ends.items())

    def send(self, pid: int, number: int) -> None:
        self.processes[pid].send_signal(number)

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        self.redis.close()
        self.store.close()


@pytest.fixture
def world(place: Place, tmp_path: Path) -> Iterator[World]:
    made = World(place, tmp_path)
    yield made
    made.end()


def until(claim: Callable[[], bool], what: str) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not claim():
        assert time.monotonic() - began < PATIENCE_S, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.005)
    return time.monotonic() - began


def say(**figures: Any) -> None:
    print(json.dumps(figures))  # noqa: T201 - what was measured


def test_partitions_are_taken_over_and_every_user_is_what_the_log_says(world: World) -> None:
    load = Load(world.place.kafka, 20_261_125)
    try:
        frozen, forget = takeovers(world, load)
    finally:
        load.end()
    until(lambda: world.has_applied(load.ends), "what was acknowledged is applied")
    assert world.applied() == load.ends
    assert frozen in world.held()
    log = copied(world.place.kafka)
    assert load.acknowledged <= {(one.partition, one.offset) for one in chain(*log.log)}
    compare(world, log, forget)


def takeovers(world: World, load: Load) -> tuple[int, Forget]:
    """Everything that happens under load: the process that was frozen, and who was forgotten meanwhile."""

    def again(partitions: set[int]) -> float:
        """Seconds until each of these partitions has applied something that was written after now."""
        ends = dict(load.ends)
        until(lambda: all(load.ends[partition] > ends[partition] for partition in partitions), "load")
        return until(lambda: world.has_applied({p: ends[p] + 1 for p in partitions}), f"{partitions} are applied again")

    def shared(*counts: int) -> float:
        return until(lambda: sorted(map(len, world.held().values())) == list(counts), f"shared {counts}")

    one, two, three, four = (world.start() for _ in range(4))
    world.join(one)
    shared(NUM_PARTITIONS)
    world.join(two)
    say(event="second joins", until_shared_s=round(shared(4, 4), 3))

    lost = world.held()[one]
    began = time.monotonic()
    world.send(one, signal.SIGKILL)
    again(lost)
    taken_s = time.monotonic() - began
    say(event="killed", lease_s=LEASE_S, until_applied_again_s=round(taken_s, 3))
    assert taken_s < LEASE_S + 10

    world.join(three)
    until(lambda: world.held().keys() == {two, three}, "a new one joins")
    shared(4, 4)
    # All that Redis holds is lost, leases too: it comes back from what both processes kept.
    world.redis.flushdb()
    ends = dict(load.ends)
    until(lambda: world.has_applied(ends), "an emptied store is filled")

    shared(4, 4)
    # Between the forget and the erasure she rests: what comes there may be too late for the window of then, and is in
    # time for one that never held what is void.
    load.only([user for user in USERS if user != USERS[3]])
    lost = world.held()[three]
    began = time.monotonic()
    world.send(three, signal.SIGSTOP)
    forget = Forget(forget_id="f", user_id=USERS[3], up_to={p: e - 1 for p, e in load.ends.items()}, requested_ms=1)
    producer = BulkProducer(world.place.kafka)
    producer.send_many([Record(FORGETS, USERS[3].encode(), encode_forget(forget))])
    producer.close()
    again(lost)
    say(event="frozen", lease_s=LEASE_S, until_applied_again_s=round(time.monotonic() - began, 3))
    load.only(USERS)
    until(lambda: world.held().keys() == {two}, "the frozen one has lost its partitions")
    world.send(three, signal.SIGCONT)
    shared(4, 4)

    world.join(four)
    shared_s = shared(2, 3, 3)
    # It holds partitions before it has found where they stand: what it does first is no part of another one's end.
    say(event="third joins", until_shared_s=round(shared_s, 3), until_applied_s=round(again(world.held()[four]), 3))

    lost = world.held()[two]
    began = time.monotonic()
    world.send(two, signal.SIGTERM)
    assert world.processes[two].wait(PATIENCE_S) == 0
    # It has given its leases back: none has to run out.
    assert two not in world.held()
    again(lost)
    say(event="ended", lease_s=LEASE_S, until_applied_again_s=round(time.monotonic() - began, 3))
    shared(4, 4)
    return three, forget


def copied(kafka: str) -> MemoryStream:
    """`interactions`, in memory."""
    reader, copy = TopicReader(kafka, INTERACTIONS, group_id="reference"), MemoryStream(NUM_PARTITIONS)
    reader.seek(dict.fromkeys(range(NUM_PARTITIONS), 0))
    for record in reader.read_to_end():
        assert copy.append(record.partition, record.key, record.value, record.written_ms) == record.offset
    reader.close()
    return copy


def compare(world: World, log: MemoryStream, forget: Forget) -> None:
    """Histories, positions, states, and what stands of attributions, with the log applied once in memory, by who knew
    of the forget from the beginning."""
    forgotten, memory, outbox = Forgotten(), MemoryStore(), MemoryOutbox()
    forgotten.add(forget)
    handler = ApplyRecords(
        store=memory,
        outbox=outbox,
        encoder=HashEncoder(),
        vocabulary=VOCABULARY,
        pseudonym_key=DEVELOPMENT_PSEUDONYM_KEY.encode(),
        forgotten=forgotten,
    )
    handler.resync(log)
    while records := log.poll(0, 100):
        handler.apply(records)
    wanted = memory.load_users(USERS, memory.epoch() or "")

    def lost() -> set[str]:
        found = world.store.load_users(USERS, world.store.epoch() or "")
        return {user_id for user_id, user in found.items() if user.is_lost}

    def wanted_state(user: str) -> bytes | None:
        found = memory.states.get((user, VOCABULARY.model_version))
        return None if found is None else found.query_state.components

    wanted_states = {user: wanted_state(user) for user in USERS}
    # Users who were lost are read again in slices, and their states are made after.
    with contextlib.suppress(AssertionError):
        until(lambda: not lost() and states(world) == wanted_states, "states are whole")
    assert lost() == set()
    found_states = states(world)
    assert {u: s for u, s in found_states.items() if s != wanted_states[u]} == {}
    found = world.store.load_users(USERS, world.store.epoch() or "")
    assert {u: (h.events, h.positions) for u, h in found.items()} == {
        u: (h.events, h.positions) for u, h in wanted.items()
    }
    undone = {message.undoes for message in outbox.attributions if isinstance(message, Undo)}
    assert attributed(world.place.kafka) == {
        (one.partition, one.offset): one.state.components
        for one in outbox.attributions
        if isinstance(one, Attribution) and (one.partition, one.offset) not in undone
    }


def states(world: World) -> dict[str, bytes | None]:
    async def read() -> dict[str, bytes | None]:
        reader = StateReader(world.place.redis_url, timeout_s=5)
        found = {user: (await reader.read_user(user, VOCABULARY.model_version)).state for user in USERS}
        await reader.close()
        return {user: None if state is None else state.query_state.components for user, state in found.items()}

    return asyncio.run(read())


def attributed(kafka: str) -> dict[tuple[int, int], bytes]:
    """What stands in `attributions`."""
    reader = TopicReader(kafka, ATTRIBUTIONS, group_id="reference")
    reader.seek(dict.fromkeys(reader.partitions(), 0))
    messages = [events_pb2.Attribution.FromString(record.value or b"") for record in reader.read_to_end()]
    reader.close()
    found = standing(messages)
    say(event="attributions", messages=len(messages), standing=len(found))
    return found
