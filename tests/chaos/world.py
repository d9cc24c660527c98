"""One small system in simulated time: real handlers of encoder, refresher and gateway on topics and a Redis in memory.

A scenario is a list of steps (`scenario.py`); `Play` takes them. A process turns when a step says so, and in the
background while a client waits. A step may set a trap: other steps that happen inside a turn or a call, before the n-th
time that anything outside the process is touched; there processes die, data goes, another process takes over.
"""

import asyncio
import contextlib
import logging
import random
import selectors
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, Unpack
from unittest import mock

import numpy as np
import structlog
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryStream
from fakes.gateway import MemoryReranker, MemorySessions, MemoryStreamStatus, MemoryTextSources
from fakes.leases import MemoryLeases
from fakes.refresher import MemoryCheckpoints
from fakes.stream import MemoryTopics
from memory_redis import AsyncClient, Client, MemoryServer
from prometheus_client import CollectorRegistry
from refresher import refresher_scene
from state_scene import EncoderProcess

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.indexes.protocol import EXACT
from services.algorithms.rules.filters import ItemFilter
from services.catalogue.changes import CatalogueChanges, CatalogueMetrics
from services.catalogue.follower import CatalogueFollower, CatalogueGate
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.forgets import FORGETS, encode_forget
from services.contracts.topics.histories import HISTORIES
from services.contracts.topics.index_deltas import INDEX_DELTAS, ItemDelta, MemoryDelta
from services.contracts.topics.interactions import DEFAULT_TYPE, INTERACTIONS, Interaction, encode_interaction
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.contracts.topics.search_clicks import SEARCH_CLICKS
from services.encoder.adapters.kafka_outbox import KafkaOutbox as EncoderOutbox
from services.encoder.consumer import ConsumerLimits
from services.encoder.domain import EncodedStates, EncodeJob, Vocabulary
from services.encoder.handlers.encode import EncodeHistory
from services.encoder.server import DescribeUser
from services.gateway.adapters.peers import offsets_of
from services.gateway.dependencies import AcknowledgedLag, Breaker
from services.gateway.domain import Encoded, Hit, Pool, Ranking, ScoredItem, Seen, ServedModel
from services.gateway.handlers import Handlers
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Contributions, Ports, SearchOptions, StoredUser
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.pages import PageTokens
from services.gateway.recommend.popular import PopularItems
from services.gateway.stages import Limits, Preferences
from services.platform import request_context
from services.platform.errors import DependencyUnavailable, FreshetError, PreconditionFailed
from services.platform.rpc.server import HealthState
from services.platform.stream.kafka import Record, partition_for
from services.platform.stream.records import Position
from services.refresher.adapters.topics import KafkaLog, QueryShape
from services.refresher.adapters.topics import KafkaOutbox as RefresherOutbox
from services.user_state.reader import StateReader
from services.user_state.writer import StateWriter

LETTERS = INTERACTIONS + SUFFIX
MODELS = (refresher_scene.MODEL, "model-b")
BUNDLE = [f"item-{row}" for row in range(refresher_scene.NUM_ITEMS)]
ITEM_IDS = [*BUNDLE, "item-12", "item-13"]  # the last two are unknown to the models until they are listed
USERS = ("ann", "bob", "cid", "dan")
# Users of whom nobody asks, one at home in each of two partitions.
SETTLERS = tuple(
    next(f"settler-{n}" for n in range(99) if partition_for(f"settler-{n}".encode(), 2) == p) for p in (0, 1)
)
POISON = 666.0
START_S = 1_800_000_000.0
KEY = b"key"
METRICS = GatewayMetrics(CollectorRegistry()), CatalogueMetrics("chaos", CollectorRegistry())
RULES = refresher_scene.make_rules(max_remembered=12)


class Killed(BaseException):
    """SIGKILL: nothing catches it but who started the process."""


class Clock:
    """The one clock, and the one source of ids; `jump_s` is how wrong this machine's wall clock is."""

    def __init__(self) -> None:
        self.now_s, self.jump_s = 1_000.0, 0.0
        # So that a trial is the same each time; PYTHONHASHSEED does the rest.
        self._random = random.Random(0)
        self.waiting: Callable[[], None] = lambda: None

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        self.advance(max(seconds, 0.001))

    def wall_s(self) -> float:
        return START_S + self.now_s + self.jump_s

    def wall_ns(self) -> int:
        return int(self.wall_s() * 1e9)

    def select(self, timeout: float | None) -> list[Any]:
        """An event loop waits: time passes, and everybody else works."""
        if timeout is None or timeout > 0:
            self.advance(timeout or 0.01)
            self.waiting()
        return []

    @contextlib.contextmanager
    def rules(self) -> Iterator[None]:
        """Every process reads this clock, those that took their clock from a default included."""

        def now() -> float:
            return self.now_s

        with (
            mock.patch.dict(Breaker.__init__.__kwdefaults__, clock=now),
            mock.patch.dict(AcknowledgedLag.__init__.__kwdefaults__, clock=now),
            mock.patch("time.monotonic", now),
            mock.patch("time.time", self.wall_s),
            mock.patch("time.time_ns", self.wall_ns),
            mock.patch("time.sleep", self.sleep),
            mock.patch("secrets.token_hex", lambda size: self._random.randbytes(size).hex()),
            mock.patch("secrets.randbits", self._random.getrandbits),
        ):
            yield


class StopEvent:
    """What a follower's loop waits on; it never stops."""

    def __init__(self, clock: Clock) -> None:
        self.wait = lambda seconds=0.0: bool(clock.advance(seconds))
        self.is_set = lambda: False


class Topics(MemoryTopics):
    """The broker. Every call may be where a trap snaps."""

    world: "World"

    def of(self, *names: str) -> "Topics":
        """A reader of these topics."""
        other = self.reader()
        other.logs, other.topic = {name: self.logs[name] for name in names}, names[0]
        other._next, other.per_poll = {}, self.world.rng.choice((3, 8, 64))
        return other

    def _log(self, topic: str) -> Any:
        self.world.touched()
        self.down = self.world.is_kafka_down
        return super()._log(topic)

    @property
    def log(self) -> Any:
        return self.logs[INTERACTIONS]


class InteractionsReader(Topics, MemoryStream):
    """`another_reader` of the state cases takes this one."""


class Producer:
    """`BulkProducer` over the topics in memory: a kill leaves some records written."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def send_many(self, records: Sequence[Record], timeout_s: float = 15.0) -> list[Position]:
        return [self._world.write(r.topic, r.key, r.value, partition=r.partition, headers=r.headers) for r in records]

    def num_partitions(self, topic: str) -> int:
        return len(self._world.topics._log(topic))

    def close(self, timeout_s: float = 0.0) -> None:
        """Nothing is held."""


def components_of(model_version: str, user_id: str, events: Sequence[tuple[str, int]]) -> tuple[bytes, bytes] | None:
    """The stand-in for the model: a hash of model, user and (item, seconds) of the known items, in half precision.

    Components (3, 4), l2-normalised, and gate (6,).
    """
    known = [(BUNDLE.index(item), seconds) for item, seconds in events if item in BUNDLE]
    if not known:
        return None
    digest = blake2b(f"{model_version} {user_id} {known}".encode(), digest_size=18).digest()
    values = (np.frombuffer(digest, np.uint8).astype(np.float32) - 127.5) / 128
    components = values[:12].reshape(3, 4)
    components /= np.linalg.norm(components, axis=1, keepdims=True)
    return components.astype("<f2").tobytes(), values[12:].astype("<f2").tobytes()


class Model(HashEncoder):
    """What `components_of` says. Poison trips it, and moments without memory do."""

    def __init__(self, world: "World", model_version: str) -> None:
        super().__init__()
        self._world, self._version = world, model_version

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
        self._world.touched()
        if self._world.is_short_of_memory:
            raise MemoryError("no memory for the batch")
        return [self._of(job) for job in jobs]

    def _of(self, job: EncodeJob) -> EncodedStates:
        items, seconds = job.item_index.tolist(), job.event_time.tolist()
        if self._world.is_poison_deadly and any(second % 100 == 66 for second in seconds):
            raise ValueError("this history trips a bug")
        user = (*USERS, *SETTLERS)[job.user_index]
        rows = [
            components_of(self._version, user, [(BUNDLE[i], s) for i, s in zip(items, seconds, strict=True)][: p + 1])
            for p in job.positions
        ]
        found = [(np.frombuffer(c, "<f2"), np.frombuffer(g, "<f2")) for c, g in (row for row in rows if row)]
        return EncodedStates(
            np.array([c.reshape(3, 4) for c, _ in found], np.float32), np.array([g for _, g in found], np.float32)
        )


class Follow:
    """A thread of any process, turned by hand."""

    def __init__(self, follower: Any, world: "World") -> None:
        self.follower = follower
        follower._stop, follower._first_backoff_s = StopEvent(world.clock), 0.01

    def turn(self) -> int:
        try:
            return self.follower.step()
        except Exception as exc:
            self.error = exc
            self.follower.fail(exc)
            return 1 if isinstance(exc, FreshetError) and exc.retriable else 0


class Index:
    """Items and remembered interactions of the candidates process, kept as they come."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.deltas: dict[str, ItemDelta] = {}
        self.memory: dict[str, MemoryDelta] = {}
        self.described: dict[str, CatalogueItem] = {}

    def clear(self) -> None:
        self.memory = {}

    def apply(self, *arguments: Any, **_: Any) -> Any:
        if len(arguments) == 1:
            self.memory.update({one.entry_id: one for one in arguments[0]})
            return 0
        self.deltas.update({one.item_id: one for one in arguments[1]})
        return []

    def describe(self, descriptions: Sequence[CatalogueItem]) -> None:
        self.described.update({one.item_id: one for one in descriptions})

    def served(self) -> list[str]:
        known = [*BUNDLE, *(item for item, one in self.deltas.items() if item not in BUNDLE and not one.dropped)]
        return [item for item in known if item not in self.described or self.described[item].is_served]


class Candidates:
    """The candidates process: real follower, real gate, an index of a few items."""

    def __init__(self, world: "World", model_version: str) -> None:
        self.world, self.model_version, self.index = world, model_version, Index()
        self.gate = CatalogueGate("candidates", HealthState())
        changes = CatalogueChanges(self.index, METRICS[1], remembered=self.index)
        follower = CatalogueFollower(
            world.topics.of(INDEX_DELTAS, ITEMS), changes, model_version=model_version, on_ready=self.gate.open
        )
        self.thread, self.withdrawn_before = Follow(follower, world), len(world.topics.logs[ITEMS][0])

    def search(self, state: Any, pool_size: int, wanted: ItemFilter, seen: Seen) -> Pool:
        self.gate.check()
        if state.model_version != self.model_version:
            raise PreconditionFailed(f"candidates: this index holds model {self.model_version!r}")
        out = {*wanted.deny_item_ids, *(seen.item_ids if wanted.exclude_seen else ())}
        found = [item for item in self.index.served() if item not in out]
        found.sort(key=lambda item: blake2b(state.components + item.encode()).digest())
        return Pool(item_ids=found[:pool_size], scores=[-float(n) for n in range(len(found[:pool_size]))])


class Gateway:
    """The gateway process on ports that lead to the others, one of each kind."""

    def __init__(self, world: "World", model_version: str) -> None:
        self.world, self.model_version = world, model_version
        # Models of the candidates asked by the call at hand; when a process that was asked failed last.
        self.asked: list[str] = []
        self.failed_at_s, self.calls = -1.0, 0
        reader = StateReader("redis://localhost")
        reader._redis = AsyncClient(world.redis)  # type: ignore[assignment]
        popular = PopularItems(BUNDLE, np.arange(len(BUNDLE), 0, -1, dtype=np.int64), [()] * len(BUNDLE))
        follower = CatalogueFollower(
            world.topics.of(ITEMS),
            popular,
            model_version=model_version,
            on_ready=popular.caught_up,
            follows_deltas=False,
        )
        self.thread, self.withdrawn_before = Follow(follower, world), len(world.topics.logs[ITEMS][0])
        me: Any = SimpleNamespace
        found = {name: [Hit(item, 1.0) for item in BUNDLE[row::2]] for row, name in enumerate(("text_mol", "lexical"))}
        ports = Ports(
            states=reader,
            sessions=MemorySessions(),
            encoder=me(encode=self._encode, describe_user=self._describe_user),
            candidates=me(search=self._search, propose=self._propose),
            reranker=MemoryReranker(),
            sources=MemoryTextSources(found=found),
            refreshers=me(contributions=self._contributions),
            ends=me(interactions=self._ends, attribution_partitions=self._partitions),
            interactions=me(partition_of=world.partition_of, append=self._append),
            items=me(append=self._put),
            forgets=me(append=self._forget),
            stream=world.status,
            parts=me(),
            letters=me(),
            shown=me(),
        )
        self.handlers = Handlers(
            ports,
            model=ServedModel(version=model_version, schema=default_schema()),
            limits=Limits(),
            preferences=Preferences(),
            lag=AcknowledgedLag(grace_seconds=2.0),
            items=popular,
            metrics=METRICS[0],
            exposures=Exposures(b"key", None),
            pages=PageTokens(b"key"),
        )

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except PreconditionFailed:
            self.asked.append("refused")
            raise
        except Exception:
            self.failed_at_s = self.world.clock.now_s
            raise

    async def _encode(self, user_id: str, history: Sequence[Any], timeout_s: float) -> Encoded:
        with self._noting_failures():
            return await self._encoded(user_id, history)

    async def _encoded(self, user_id: str, history: Sequence[Any]) -> Encoded:
        encoder = self.world.live("encoder")
        if encoder.words.model_version != self.model_version:
            raise PreconditionFailed("encoder: it encodes for another model")
        handler = EncodeHistory(encoder=encoder.process.model, vocabulary=encoder.words)

        async def submit(job: EncodeJob) -> Any:
            return handler._encode([job])[0], 0.0

        handler._batcher = SimpleNamespace(submit=submit)  # type: ignore[assignment]
        events = [
            StoredEvent(one.event_time_ms or 0, 0, 0, 0, one.item_id, one.type or DEFAULT_TYPE, one.value)
            for one in history
        ]
        found = await handler.encode(user_id, events)
        return Encoded(query_state=found.state)

    async def _describe_user(self, user_id: str, timeout_s: float) -> StoredUser:
        encoder, reader = self.world.live("encoder"), StateReader("redis://localhost")
        reader._redis = AsyncClient(self.world.redis)  # type: ignore[assignment]
        describe = DescribeUser(
            reader=reader,
            vocabulary=encoder.words,
            pseudonym_keys=(KEY,),
            applied_up_to=encoder.process.consumer._forgets.applied_up_to,
        )
        user = await describe(user_id)
        return StoredUser(
            pseudonym=user.user_pseudonym,
            history_events=user.history_events,
            seen_items=user.seen_items,
            query_states=len(user.state_model_versions),
            forgotten_up_to=offsets_of(user.forgotten_up_to),
        )

    async def _contributions(self, pseudonym: str, timeout_s: float) -> tuple[list[Contributions], bool]:
        found = []
        for running in self.world.refreshers.values():
            user = running.describe.user(pseudonym)
            found.append(
                Contributions(
                    summed_interactions=user.interactions,
                    remembered_interactions=user.remembered,
                    forgotten_up_to=offsets_of(user.forgotten_up_to),
                    partitions=user.partitions,
                )
            )
        return found, bool(found)

    async def _search(self, state: Any, **asked: Unpack[SearchOptions]) -> Ranking:
        pool = await self._propose(state, **asked)
        scored = zip(pool.item_ids, pool.scores, strict=True)
        return Ranking(items=[ScoredItem(*one, "mol") for one in scored], certificate=EXACT)

    async def _propose(self, state: Any, **asked: Unpack[SearchOptions]) -> Pool:
        self.calls += 1
        replica = self.world.candidates[self.calls % len(self.world.candidates)]
        self.asked.append(replica.model_version)
        self.searched = (replica, state)
        with self._noting_failures():
            return replica.search(state, asked["k"], asked["filter"], asked["seen"])

    async def _ends(self, timeout_s: float) -> Mapping[int, int]:
        return {number: len(log) for number, log in enumerate(self.world.topics._log(INTERACTIONS))}

    async def _partitions(self, timeout_s: float) -> int:
        return len(self.world.topics._log(ATTRIBUTIONS))

    async def _append(self, interaction: Interaction, timeout_s: float) -> Position:
        return self.world.write(INTERACTIONS, interaction.user_id.encode(), encode_interaction(interaction))

    async def _put(self, item: CatalogueItem, timeout_s: float) -> Position:
        return self.world.write(ITEMS, item.item_id.encode(), encode_item(item), partition=0)

    async def _forget(self, forget: Any, timeout_s: float) -> None:
        self.world.write(FORGETS, forget.user_id.encode(), encode_forget(forget), partition=0)


class Checkpoints(MemoryCheckpoints):
    """A disk that can be full, and that tears what it is asked to keep."""

    world: "World"

    def opened(self) -> "Checkpoints":
        other = super().opened()
        assert isinstance(other, Checkpoints)
        other.world = self.world
        return other

    def save(self, partition: int, values: Mapping[str, Any], parts: Mapping[str, bytes | None]) -> None:
        self.world.touched()
        if self.world.is_disk_full:
            raise DependencyUnavailable("checkpoint: no space left on device")
        super().save(partition, values, parts)


class World:
    """Everything, healthy and empty. `rng` decides sizes of polls alone; `seed` makes it the same each time."""

    def __init__(self, clock: Clock, seed: int = 0, *, max_history: int = 64, is_quick: bool = True) -> None:
        self.rng, self.max_history = random.Random(seed), max_history
        self.clock, self.redis, self.status = clock, MemoryServer(), MemoryStreamStatus()
        self.is_kafka_down = self.is_short_of_memory = self.is_disk_full = False
        self.is_poison_deadly = True
        self.topics = Topics(
            {INTERACTIONS: 2, HISTORIES: 2, ATTRIBUTIONS: 2}
            | dict.fromkeys((LETTERS, SEARCH_CLICKS, INDEX_DELTAS, ITEMS, FORGETS), 1)
        )
        self.topics.world, self.redis.hook, clock.waiting = self, self.touched, self._background
        self.dead_letters: list[Record] = []
        self.checkpoints = Checkpoints()
        self.checkpoints.world = self
        self.refresher_world = refresher_scene.World(RULES, checkpoints=self.checkpoints)
        self.limits = ConsumerLimits(
            poll_ms=1,
            min_records=4,
            max_records=16,
            backoff_s=0.01,
            max_backoff_s=0.05,
            commit_every_s=0.0,
            check_every_s=0.0 if is_quick else 1.0,
            look_for_lost_every_s=0.0 if is_quick else 60.0,
        )
        self.loop = asyncio.SelectorEventLoop(_Selector(clock))
        self.trap: tuple[int, Callable[[], None]] | None = None
        self._is_waiting = False
        self.encoders: dict[str, Any] = {}
        self.refreshers: dict[str, Any] = {}
        self.candidates = [Candidates(self, MODELS[0])]
        self.gateways = {MODELS[0]: Gateway(self, MODELS[0])}
        self.encoder_model = MODELS[0]

    # What the ports reach.

    def touched(self) -> None:
        """Something outside a process was asked; here the trap snaps."""
        if self.trap is not None:
            left, snap = self.trap
            self.trap = (left - 1, snap) if left else None
            if not left:
                snap()

    def partition_of(self, user_id: str) -> int:
        return partition_for(user_id.encode(), len(self.topics.logs[INTERACTIONS]))

    def write(
        self, topic: str, key: bytes | None, value: bytes | None, *, partition: int | None = None, headers: Any = ()
    ) -> Position:
        self.touched()
        if self.is_kafka_down:
            raise DependencyUnavailable("Kafka is away")
        if topic not in self.topics.logs or topic == LETTERS:
            self.dead_letters.append(Record(topic, key, value, headers=headers))
        if topic not in self.topics.logs:
            return Position(0, len(self.dead_letters) - 1)
        if partition is None:
            partition = partition_for(key or b"", len(self.topics.logs[topic]))
        written_ms = int(1000 * (START_S + self.clock.now_s))
        return Position(
            partition, self.topics.write(topic, key, value, partition=partition, written_ms=written_ms, headers=headers)
        )

    def live(self, name: str) -> Any:
        """The encoder that answers calls. Raises: DependencyUnavailable."""
        if name not in self.encoders:
            raise DependencyUnavailable(f"{name}: connection refused")
        return self.encoders[name]

    # Processes.

    def _start_encoder(self, name: str) -> Any:
        words = Vocabulary(
            model_version=self.encoder_model,
            item_index={item: row for row, item in enumerate(BUNDLE)},
            user_index={user: row for row, user in enumerate((*USERS, *SETTLERS))},
            max_history=self.max_history,
        )
        stream = self.topics.of(INTERACTIONS)
        stream.__class__ = InteractionsReader
        stream.histories, stream.letters = self.topics.of(HISTORIES), self.topics.of(LETTERS)
        writer = StateWriter("redis://localhost")
        writer._redis = Client(self.redis)  # type: ignore[assignment]
        process = EncoderProcess(
            stream,
            writer,
            words=words,
            model=Model(self, self.encoder_model),
            limits=self.limits,
            forget_log=MemoryForgetLog(self.topics.of(FORGETS)),
            pseudonym_key=KEY,
            outbox=EncoderOutbox(Producer(self)),  # type: ignore[arg-type]
        )
        return SimpleNamespace(process=process, words=words, thread=Follow(process.consumer, self))

    def _start_refresher(self, name: str) -> Any:
        shape = QueryShape(model_version=MODELS[0], num_components=3, component_width=4, num_pairs=6)
        running = self.refresher_world.refresher(
            name,
            log=KafkaLog(self.topics.of(ATTRIBUTIONS, ITEMS), self.topics.of(ATTRIBUTIONS), shape),
            outbox=RefresherOutbox(Producer(self)),  # type: ignore[arg-type]
            checkpoints=self.checkpoints,
            leases=MemoryLeases(self.refresher_world.table, name),
            max_changes=5,
        )
        running.thread = Follow(running.refresher, self)
        return running

    def turn(self, name: str) -> int:
        """One turn of a process, which is started where it does not run. Killed inside a trap, it is gone."""
        self.clock.advance(0.01)
        self.refresher_world.now_ms = int(1000 * self.clock.now_s)
        try:
            if name.startswith("encoder"):
                if name not in self.encoders:
                    self.encoders[name] = self._start_encoder(name)
                turned = int(self.encoders[name].thread.turn())
                self.status.encoder_serving = (
                    "encoder" in self.encoders and self.encoders["encoder"].process.consumer._is_ready
                )
                return turned
            if name.startswith("refresher"):
                if name not in self.refreshers:
                    self.refreshers[name] = self._start_refresher(name)
                return int(self.refreshers[name].thread.turn())
            threads = [one.thread for one in (*self.candidates, *self.gateways.values())]
            return sum(int(thread.turn()) for thread in threads)
        except Killed:
            self.kill(name)
            return 1

    def kill(self, name: str) -> None:
        """SIGKILL."""
        if name == "candidates":
            self.candidates = [Candidates(self, one.model_version) for one in self.candidates]
        elif name == "gateway":
            self.gateways = {model: Gateway(self, model) for model in self.gateways}
        else:
            self.encoders.pop(name, None)
            self.refreshers.pop(name, None)

    def _background(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            for name in [*self.encoders, *self.refreshers, "catalogue"]:
                self.turn(name)
            self._is_waiting = False

    def call(self, request: Any, within_s: float = 0.5) -> Any:
        """An answer of the gateway, or the error that it gave."""
        deadline = request_context.deadline.set(self.clock.now_s + within_s)
        try:
            return self.loop.run_until_complete(request)
        except FreshetError as exc:
            return exc
        finally:
            request_context.deadline.reset(deadline)


class _Selector(selectors.SelectSelector):
    """Nothing comes from outside: waiting is passing time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wall_ns(self) -> int:
        return int(self.wall_s() * 1e9)

    def select(self, timeout: float | None = None) -> list[Any]:
        return self._clock.select(timeout)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Processes log nothing: a trial makes a thousand lines."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**before)
