"""Trials on the local stack: real Kafka, Redis and processes, the same oracle over what Kafka holds afterwards.

Every acknowledged event is in Kafka, where its receipt says and as it was sent; histories are a replay of that.

A client writes and asks while another thread does three things to the stack, one after the other; after each it waits
until a new event is answered for without a mark, and notes how long that took.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import paths
from engines import WITHIN_S, Clustered, Engines, Setting
from freshet.v1 import events_pb2, gateway_pb2
from kafka import KafkaConsumer, TopicPartition
from oracle import Event, _read, replay

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.scoring.packed_state import unpack_query_state
from services.contracts.stored_history import hash_event_id
from services.contracts.topics.interactions import INTERACTIONS
from services.encoder.bootstrap import in_process_encoder, vocabulary_of
from services.encoder.config import EncoderSettings
from services.encoder.domain import encode_job, user_state
from services.platform.redis_clients import open_client
from services.platform.stream.topic import NUM_PARTITIONS
from services.stack import Ports, Stack
from services.stack.version_sets import find_set, set_names
from services.user_state.layout import home_of, state_key

sys.path.append(str(paths.TESTS / "integration"))
from outside import Outside, event

EVENTS, READS, BATCH = 2_000, 200, 20
USERS = 64
# No window slides: the model's is longer than what one user does.
NEVER_SLIDES = 1_000
# Of a component of a state: half precision, and one engine beside another.
_TOLERANCE = 0.02
PROCESSES = ("gateway", "encoder", "candidates", "reranker", "refresher", "redis", "kafka")
FAULTS = [
    *(f"SIGKILL {name}" for name in PROCESSES),
    *(f"SIGSTOP {name}" for name in ("encoder", "candidates", "refresher", "redis", "kafka")),
    "eviction by DEL",
    "memory limit of Redis",
    "older copy of Redis",
    "Redis emptied",
    "unreadable records",
]


class RealTrial:
    """One seed on a stack that is healthy. kinds: what happens to it; drawn where none are given."""

    def __init__(self, stack: Stack, seed: int, kinds: Sequence[str] = ()) -> None:
        self.stack, self.seed, self.rng = stack, seed, random.Random(seed)
        self.kinds = list(kinds) or three_of(stack, seed)
        self.own = stack.faults() if isinstance(stack, Setting) else {}
        # The models whose states are compared.
        self.bundles = [stack.bundle]
        self.prefix = f"chaos-{seed}-{time.time_ns()}"
        self.users = [f"{self.prefix}-{number}" for number in range(USERS)]
        self.violations: list[str] = []
        self.acknowledged: dict[str, list[tuple[Any, str, str]]] = {user: [] for user in self.users}
        # By (partition, offset) of its receipt, what the log must hold there.
        self.receipts: dict[tuple[int, int], Event] = {}
        self.undone: set[str] = set()
        self.faults: list[dict[str, Any]] = []
        self.events = self.reads = self.marked = 0

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        with Outside(self.stack) as self.client:
            self.before = self._ends()
            todo = [number * EVENTS // 4 for number in (1, 2, 3)]
            kinds, doing = [*self.kinds], threading.Thread()
            while self.events < EVENTS or doing.is_alive():
                if todo and self.events >= todo[0] and not doing.is_alive():
                    todo.pop(0)
                    doing = threading.Thread(target=self._do, args=(kinds.pop(0),))
                    doing.start()
                if self.events < 2 * EVENTS:  # no user's window slides
                    self._write()
                for _ in range(READS * BATCH // EVENTS):
                    self._ask(self.rng.choice(self.users))
            while todo:
                todo.pop(0)
                self._do(kinds.pop(0))
            self.compare()
        return {
            "seed": self.seed,
            "events": self.events,
            "reads": self.reads,
            "marked": self.marked,
            "seconds": round(time.monotonic() - began, 1),
            "faults": self.faults,
            "violations": self.violations,
        }

    # The client.

    def _write(self) -> None:
        batch = []
        for number in range(self.events, self.events + BATCH):
            user, name = self.rng.choice(self.users), f"{self.prefix}-e{number}"
            mine = self.acknowledged[user]
            if mine and self.rng.random() < 0.05:
                # A retry of an old id counts once.
                _, item, old = self.rng.choice(mine)
                batch.append(event(user, item, event_id=old))
            else:
                batch.append(event(user, self.rng.choice(self.client.items), event_id=name, at=1.7e9 + number))
        said = self._persist(lambda: self.client.record(*batch))
        for one, receipt in zip(batch, said, strict=True):
            self.note(one, receipt)
        user = self.rng.choice(self.users)
        if self.acknowledged[user] and self.rng.random() < 0.5:
            name = self.rng.choice(self.acknowledged[user])[2]
            self.undone.add(name)
            request = gateway_pb2.UndoInteractionRequest(user_id=user, event_id=name)
            self._persist(lambda: self.client.gateway.UndoInteraction(request, timeout=5))
        self.events += BATCH

    def note(self, one: events_pb2.Interaction, receipt: gateway_pb2.InteractionReceipt) -> None:
        """This event is acknowledged."""
        self.acknowledged[one.user_id].append((receipt.token, one.item_id, receipt.event_id))
        one.event_id = receipt.event_id
        place = receipt.token.partition, receipt.token.offset
        said = _read(one.user_id.encode(), one.SerializeToString())
        assert said is not None
        self.receipts[place] = Event(place, *said)

    def _persist(self, call: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WITHIN_S
        while True:
            try:
                return call()
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _ask(self, user: str, *, all_well: bool = False) -> bool:
        """Ask with the newest token; True for a whole answer."""
        mine = self.acknowledged[user]
        denied = self.rng.sample(self.client.items, 3)
        # Only diverse answers need the reranker.
        request = gateway_pb2.RecommendRequest(user_id=user, k=50, diversity=0.1 * (self.reads % 2))
        request.filter.exclude_seen = True
        request.filter.deny_item_ids.extend(denied)
        # A token of an earlier epoch is never honoured.
        if mine and not (all_well and mine[-1][0].epoch != (self.client.store.epoch() or "")):
            request.freshness_token.CopyFrom(mine[-1][0])
        try:
            answer = self.client.gateway.Recommend(request, timeout=2)
        except grpc.RpcError:
            return False
        self.reads += 1
        # The index names the model whose it is: an answer of two sets would name two.
        if answer.index_version and not answer.index_version.startswith(f"{answer.model_version}."):
            self.violations.append(f"{user}: model {answer.model_version} from index {answer.index_version}")
        shown = {item.item_id for item in answer.items}
        if shown & {*denied}:
            self.violations.append(f"{user}: a denied item")
        if answer.degradations or not (answer.token_honoured and mine):
            self.marked += 1
            return not mine
        seen = {item for _, item, name in mine if name not in self.undone}
        if shown & seen:
            self.violations.append(f"{user}: seen items {sorted(shown & seen)} without a mark")
        return True

    # What happens to the stack.

    def _do(self, kind: str) -> None:
        what, _, name = kind.partition(" ")
        how: dict[str, Any] = {}
        if isinstance(self.stack, Setting):
            name = self.stack.now(name)
        try:
            if kind in self.own:
                how = self.own[kind](self.rng)
            elif what == "SIGKILL":
                self.stack.kill(name)
                time.sleep(self.rng.uniform(0.2, 2.0))
                self.stack.start(name)
            elif what == "SIGSTOP":
                pid = json.loads((self.stack.place.state.run / f"{name}.json").read_text())["pid"]
                os.killpg(pid, signal.SIGSTOP)
                time.sleep(self.rng.uniform(0.5, 3.0))
                os.killpg(pid, signal.SIGCONT)
            else:
                self._do_to_data(kind)
        except Exception as exc:
            self.violations.append(f"{kind}: {exc!r}")
        healed = time.monotonic()
        user = f"{self.prefix}-probe"
        self.acknowledged.setdefault(user, [])
        while time.monotonic() < healed + WITHIN_S:
            probe = event(user, self.rng.choice(self.client.items))
            try:
                (receipt,) = self.client.record(probe)
                self.note(probe, receipt)
            except grpc.RpcError:
                time.sleep(0.05)
                continue
            if self._ask(user):
                break
        else:
            self.violations.append(f"{kind}: not whole again within {WITHIN_S} s")
        self.faults.append({"kind": kind, "recovered_s": round(time.monotonic() - healed, 2), **how})

    def _do_to_data(self, kind: str) -> None:
        with open_client(self.stack.redis_url, timeout_s=10) as client:
            if kind == "eviction by DEL":
                keys = [*client.scan_iter(match=f"*:{self.prefix}-*")]
                client.delete(*self.rng.sample(keys, max(1, len(keys) // 5)))
            elif kind == "memory limit of Redis":
                before = client.config_get("maxmemory")["maxmemory"]
                client.config_set("maxmemory", client.info("memory")["used_memory"])
                time.sleep(self.rng.uniform(0.5, 2.0))
                client.config_set("maxmemory", before)
            elif kind == "older copy of Redis":
                keys = [*client.scan_iter(count=10_000)]
                pipeline = client.pipeline(transaction=True)  # of one moment, as a file is
                for key in keys:
                    pipeline.dump(key)
                copy = dict(zip(keys, pipeline.execute(), strict=True))
                time.sleep(self.rng.uniform(1.0, 2.0))
                pipeline = client.pipeline(transaction=True)
                pipeline.flushdb()
                for key, value in copy.items():
                    if value is not None:
                        pipeline.restore(key, 0, value)
                pipeline.execute()
            elif kind == "Redis emptied":
                client.flushall()
            else:
                for _ in range(300):
                    self.client.put(self.rng.choice(self.users), b"\x0a\xff")

    # The end.

    def _ends(self) -> dict[int, int]:
        consumer = KafkaConsumer(bootstrap_servers=self.stack.kafka_bootstrap)
        try:
            places = [TopicPartition(INTERACTIONS, number) for number in range(NUM_PARTITIONS)]
            return {place.partition: end for place, end in consumer.end_offsets(places).items()}
        finally:
            consumer.close()

    def _log(self) -> dict[str, list[Event]]:
        """The trial's records by user, in the order of the log."""
        found: dict[str, list[Event]] = {}
        consumer = KafkaConsumer(bootstrap_servers=self.stack.kafka_bootstrap, enable_auto_commit=False)
        try:
            places = [TopicPartition(INTERACTIONS, number) for number in range(NUM_PARTITIONS)]
            consumer.assign(places)
            ends = consumer.end_offsets(places)
            for place in places:
                consumer.seek(place, self.before[place.partition])
            while any(consumer.position(place) < ends[place] for place in places):
                for records in consumer.poll(timeout_ms=500).values():
                    for record in records:
                        if (one := _read(record.key, record.value)) is not None:
                            found.setdefault(one[0], []).append(Event((record.partition, record.offset), *one))
        finally:
            consumer.close()
        return found

    def compare(self) -> None:
        """Wait until every user is answered for without a mark, then compare the log, histories, seen items, states."""
        deadline = time.monotonic() + WITHIN_S
        for user in self.users:
            while self.acknowledged[user] and not self._ask(user, all_well=True):
                if time.monotonic() > deadline:
                    self.violations.append(f"{user}: still marked")
                    break
        log, store = self._log(), self.client.store
        there = {one.place: one for ones in log.values() for one in ones}
        lost = [one for place, one in self.receipts.items() if there.get(place) != one]
        if lost:
            self.violations.append(f"{len(lost)} acknowledged events are not in the log, {lost[0]} first")
        epoch = store.epoch() or ""
        for user in self.users:
            wanted = replay(log.get(user, []), {}, NEVER_SLIDES)
            stored = [tuple(one) for one in store.load_users([user], epoch)[user].events]
            events = [
                (ms, partition, at, hash_event_id(name), item, *said)
                for ms, partition, at, name, item, said in wanted.events
            ]
            if stored != events:
                self.violations.append(f"history of {user}: {len(stored)} events, not {len(events)}")
            if self.client.seen(user) != wanted.seen:
                self.violations.append(f"seen of {user}")
        self._compare_states()

    def _compare_states(self) -> None:
        """Each stored state that is said to be whole, made once more."""
        store = self.client.store
        epoch, users = store.epoch() or "", [user for user in self.users if self.acknowledged[user]]
        for path in self.bundles:
            settings = EncoderSettings(bundle=path)
            bundle = load_bundle(path, verify=False)
            vocabulary, encoder = vocabulary_of(bundle), in_process_encoder(settings, bundle)
            whole = [user for user, is_whole in store.are_whole(users, bundle.model_version, epoch).items() if is_whole]
            for user, history in store.load_users(whole, epoch).items():
                job, rows = encode_job(vocabulary, user, history.events, [len(history.events)])
                if job is None:
                    continue
                (made,) = encoder.encode([job])
                wanted = user_state(vocabulary, made, rows[len(history.events)], history.events)
                found = store._redis.hget(state_key(home_of(user, epoch), bundle.model_version), "components")
                head = bundle.manifest.head
                shape = {
                    "num_components": head.num_query_components,
                    "component_width": head.component_width,
                }
                a, b = (unpack_query_state(one, wanted.gate, **shape).components for one in (found, wanted.components))
                if (off := float(np.abs(a - b).max())) > _TOLERANCE:
                    self.violations.append(f"state of {user} for {bundle.model_version} is off by {off:.3f}")
            encoder.close()


def three_of(stack: Stack, seed: int) -> list[str]:
    """Three kinds for a seed, so that each comes as often as any other over seeds that follow each other."""
    kinds = [*FAULTS]
    if isinstance(stack, Setting):
        kinds = [kind for kind in (*kinds, *stack.faults()) if kind not in stack.lacks | stack.undrawn]
    turns = [divmod(3 * seed + number, len(kinds)) for number in range(3)]
    return [random.Random(turn).sample(kinds, len(kinds))[place] for turn, place in turns]


def run_trials(
    first: int, trials: int, minutes: float, brokers: int, kind: str, with_models: bool, with_cluster: bool = False
) -> Iterator[dict[str, Any]]:
    """Trials on a stack of their own. FRESHET_CHAOS_BUNDLE: the model; any will do. kind: only seeds that draw it.
    with_cluster: on a Redis Cluster.

    with_models: an operator changes version sets all the while; FRESHET_CHAOS_NEXT is the second model.
    """
    from models import ModelTrial

    folder = Path(tempfile.mkdtemp(prefix="freshet-chaos-"))
    stack: Stack
    if with_models:
        stack = Stack(folder, ports=Ports.free())
    else:
        stack = Clustered(folder) if with_cluster else Engines(folder, brokers)
    setting = stack.setting if isinstance(stack, Setting) else "one broker, an operator changes models"
    seeds = (seed for seed in itertools.count(first) if not kind or kind in three_of(stack, seed))
    until = time.monotonic() + 60 * minutes
    try:
        stack.use_bundle(Path(os.environ["FRESHET_CHAOS_BUNDLE"]).resolve())
        for seed in itertools.islice(seeds, trials):
            if time.monotonic() > until:
                break
            if seed > first and with_models:
                # What was promoted and took the stack over is what it runs with.
                stack.use_bundle(Stack(folder).bundle)
            stack.up()
            made = ModelTrial(stack, seed) if with_models else RealTrial(stack, seed)
            yield {"setting": setting, **made.run()}
    finally:
        for name in set_names(stack):
            find_set(stack, name).down()
        stack.down()
        shutil.rmtree(folder, ignore_errors=True)
