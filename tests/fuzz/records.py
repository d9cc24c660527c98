"""Every topic's reader: real loops and handlers on topics in memory, into which random records are written.

A record is written, the loop takes its turns, and then it must have passed the record: applied, or refused with a
reason in the dead letters or the log, without an exception outside the error tree. What the readers serve is asked for
again and again, for a record may do its harm later. Episodes begin with new topics.
"""

import base64
import hashlib
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
from campaign import SLOWEST_S, Target, Violation, random_of
from fakes.encoder import MemoryForgetLog, MemoryStream
from fakes.refresher import from_bytes, to_bytes
from fakes.stream import MemoryTopics
from freshet.v1 import candidates_pb2, common_pb2, events_pb2, generator_pb2, refresher_pb2, reranker_pb2
from gateway.gateway_scene import Scene
from generator import Hints, json_value, message_bytes, mutate_bytes, mutate_json
from generator_scenes import films
from google.protobuf.timestamp_pb2 import Timestamp
from refresher.refresher_scene import MODEL, NUM_ITEMS, World, make_query, make_rules
from scene import ITEM_IDS, Served, query_state, write_small_bundle
from state_scene import NOW_MS, EncoderProcess, FragileStore

from services.algorithms.rules.attributes import Kind
from services.catalogue.changes import CatalogueChanges
from services.catalogue.follower import CatalogueFollower
from services.contracts.operations import Counted
from services.contracts.topics import experiments, histories, index_deltas, rules
from services.contracts.topics.attributions import ATTRIBUTIONS, encode_attribution
from services.contracts.topics.dead_letters import dead_letter, replay_notes, stored_letters
from services.contracts.topics.forgets import FORGETS
from services.contracts.topics.histories import HISTORIES
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.contracts.topics.items import ITEMS
from services.contracts.topics.refresher_checkpoints import HEADS, REFRESHER_CHECKPOINTS
from services.contracts.topics.search_clicks import encode_click
from services.contracts.topics.version_sets import VERSION_SETS, decode_operation, encode_operation
from services.contracts.wire import index_freshness_message, query_state_message
from services.gateway.recommend.standing_rules import LiveRules
from services.generator.followers import ItemChanges
from services.platform.errors import FreshetError, InvalidRequest
from services.platform.stream.kafka import Record
from services.platform.stream.records import DeadLetter, Position, SourceRecord
from services.refresher.adapters.checkpoint_topic import CheckpointTopic
from services.refresher.adapters.topics import KafkaLog, QueryShape
from services.refresher.checkpoint import CheckpointError
from services.refresher.handlers.checkpoints import restore, snapshot
from services.refresher.server import RefresherServicer
from services.user_state.merging import read_arrival

# The loops are asked what they serve after so many records.
_ASK_EVERY = 20
_NOW = Timestamp(seconds=NOW_MS // 1000)
_TIMES = [_NOW, Timestamp(seconds=NOW_MS // 1000 - 5)]
_SOURCES = [common_pb2.StreamPosition(partition=0, offset=offset) for offset in range(40)]


class Records(Target):
    """A topic's reader, or several that belong together. One class attribute each for name and share."""

    name = ""
    weight = 10
    episode = 40

    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[None]:
        """What all episodes share."""
        self.folder = folder
        self.prepare()
        yield

    def prepare(self) -> None:
        """Before the first episode."""

    async def run(self, seed: int, numbers: Sequence[int], found: Callable[[int, BaseException], None]) -> None:
        """Records in order; after one that failed, the episode begins again."""
        self.begin()
        for position, number in enumerate(numbers):
            began = time.perf_counter()
            try:
                self.write(random_of(seed, self.name, number))
                if (took := time.perf_counter() - began) > SLOWEST_S:
                    raise Violation(f"it took {took:.1f} s")
                if position % _ASK_EVERY == _ASK_EVERY - 1 or number == numbers[-1]:
                    await self.ask()
            except Exception as exc:
                found(number, exc)
                await self.end()
                self.begin()
        await self.end()

    def begin(self) -> None:
        """New topics and processes."""

    def write(self, rng: Random) -> None:
        """Write one record and have it read. Raises: what is a finding."""
        raise NotImplementedError

    async def ask(self) -> None:
        """Ask for what is served."""

    async def end(self) -> None:
        """Give everything back."""


def _step(follower: Any, passed: Callable[[], bool], turns: int = 4) -> None:
    """Turns until a record was passed. Raises: what a turn raises; Violation when it was not passed."""
    for _ in range(turns):
        follower.step()
        if passed():
            return
    raise Violation(f"{follower.name} does not pass the record")


def _check_letters(letters: Iterable[DeadLetter]) -> None:
    """Each has a reason and can be written and read back."""
    for letter in letters:
        if len(letter.reason) < 8:
            raise Violation(f"a dead letter without a reason: {letter.reason!r}")
        record = dead_letter(letter)
        topic, headers = record.topic, list(record.headers)
        (stored,) = stored_letters([SourceRecord(topic, 0, 0, 1, record.key, record.value, headers)])
        if stored.position != Position(letter.record.partition, letter.record.offset):
            raise Violation(f"a dead letter of {letter.record.offset} is read as one of {stored.position}")


class EncoderStream(Records):
    """`interactions`, `forgets` and `histories`, by the encoder process; a user is lost now and then."""

    name, weight = "interactions-forgets-histories", 40

    hints: ClassVar[Hints] = {
        "user_id": ["ann", "bob"],
        "item_id": ["a", "b", "c", "new"],
        "event_id": ["e1", "e2", "e3", "e4", ""],
        "undoes_event_id": ["", "", "e1", "e3"],
        "query": [""],
        "event_time": _TIMES,
        "partition": [0],
    }

    def begin(self) -> None:
        """One partition."""
        self.stream, self.store, self.forgets = MemoryStream(1), FragileStore(), MemoryForgetLog()
        self.process = EncoderProcess(self.stream, self.store, forget_log=self.forgets)
        self.process.consumer.step()
        self.letters = 0
        self.mutated: set[int] = set()

    def write(self, rng: Random) -> None:
        """An interaction, a forget, or a record of `histories` whose user is lost then."""
        drawn = rng.random()
        if drawn < 0.75:
            self._write_interaction(rng)
        elif drawn < 0.9:
            self._write_forget(rng)
        else:
            self._write_history(rng)
        if rng.random() < 0.05:
            self.store.evict(["ann", "bob"])

    def _write_interaction(self, rng: Random) -> None:
        message = events_pb2.Interaction(
            user_id=rng.choice(("ann", "bob")), item_id=rng.choice("abcd"), event_id=rng.choice(("e1", "e2", "e3", ""))
        )
        message.event_time.seconds, message.value = NOW_MS // 1000 - rng.randrange(100), rng.randrange(6)
        headers: list[tuple[str, bytes | None]] = []
        if rng.random() < 0.35:
            document = {"user_id": message.user_id, "item_id": message.item_id, "value": 2.5, "context": {"a": "b"}}
            document |= {"event_time": rng.choice(("2026-01-31T12:00:00Z", 1_700_000_000, 1.7e9)), "type": "click"}
            text = json.dumps(mutate_json(rng, document), ensure_ascii=rng.random() < 0.9).encode(
                "utf-8", "surrogatepass"
            )
            value = text if rng.random() < 0.9 else mutate_bytes(rng, text)
            headers = [("content-type", b"application/json"), ("x", None)]
        else:
            value = message_bytes(rng, message, self.hints)
        key: bytes | None = message.user_id.encode()
        if rng.random() < 0.5:
            key = _of(events_pb2.Interaction, value, "user_id") or key
        if rng.random() < 0.05:
            headers.append(
                ("Content-Type", rng.choice((b"application/json", b"\xff\xfe" * 99, b"", b"text/plain", None)))
            )
        if rng.random() < 0.03:
            key = rng.choice((None, b"", b"\xff", b"x" * 2000))
        if rng.random() < 0.01:
            value = b""
        self._append(key, value, headers, rng.choice((NOW_MS, NOW_MS, 0, -1, 2**53)))

    def _append(self, key: bytes | None, value: bytes, headers: Sequence[tuple[str, bytes | None]], at_ms: int) -> None:
        offset = self.stream.append(0, key, value, at_ms, headers)
        handler = self.process.consumer._handler
        _step(self.process.consumer, lambda: handler.progress.watermarks[0] == offset)
        letters = self.process.outbox.dead_letters[self.letters :]
        self.letters += len(letters)
        is_bad = isinstance(read_arrival(self.stream.log[0][offset]), DeadLetter)
        if is_bad != (offset in {letter.record.offset for letter in letters if letter.record.topic != FORGETS}):
            raise Violation(f"dead letters {letters} of a record that {'cannot' if is_bad else 'can'} be read")
        _check_letters(letters)

    def _write_forget(self, rng: Random) -> None:
        valid = events_pb2.Forget(forget_id="f1", user_id=rng.choice(("ann", "bob")), requested_time=_NOW)
        valid.up_to.add(partition=0, offset=rng.randrange(-1, len(self.stream.log[0]) + 1))
        value = message_bytes(rng, valid, {**self.hints, "forget_id": ["f1", "f2"]})
        key = _of(events_pb2.Forget, value, "user_id") or b"ann"
        self.forgets._topic.write(FORGETS, None if rng.random() < 0.03 else key, value if rng.random() < 0.97 else None)
        before = len(self.process.outbox.dead_letters)
        self.process.consumer.step()
        _check_letters(self.process.outbox.dead_letters[before:])
        self.letters = len(self.process.outbox.dead_letters)

    def _write_history(self, rng: Random) -> None:
        """Compute checksums again, so that the fields that they guard are read."""
        topic = self.stream.histories
        lasting = [record for record in topic.logs[HISTORIES][0] if record.value and record.offset not in self.mutated]
        if not lasting:
            return
        record = rng.choice(lasting)
        kind: Any = events_pb2.UserHistory if record.key else events_pb2.HistoriesMark
        message = kind.FromString(record.value or b"")
        message.ClearField("checksum")
        data = message_bytes(rng, message, {"partition": [0], "format": [1], "reading": [message.reading]})
        value = data + histories._CHECKSUM_TAG + histories._checksum(record.key or b"", data)
        value = value if rng.random() < 0.9 else mutate_bytes(rng, value)
        if record.key == histories.MARK_KEY:
            _expect(InvalidRequest, lambda: histories.decode_mark(value))
            return
        _expect(InvalidRequest, lambda: histories.decode_history(record.key or b"", value))
        topic.write(HISTORIES, record.key, value, written_ms=NOW_MS)
        offset = len(topic.logs[HISTORIES][0]) - 1
        self.mutated.add(offset)
        self.process.keep.topic._index.put(record.key or b"", 0, offset)
        self.store.evict([(record.key or b"").decode()])

    async def ask(self) -> None:
        """What goes out can be written."""
        outbox = self.process.outbox
        for attribution in outbox.attributions:
            encode_attribution(attribution)
        for click in outbox.clicks:
            encode_click(click)


class Catalogue(Records):
    """`index-deltas` and `items`, by candidates (with a memory), reranker, generator and gateway."""

    name, weight, episode = "index-deltas-items", 16, 100

    def prepare(self) -> None:
        """The bundles, written once."""
        self.version = write_small_bundle(self.folder / "bundle").model_version
        self.state = query_state(self.version)
        self.films = films(self.folder / "films")
        item = events_pb2.ItemState(
            item_id="item-1", num_components=2, component_width=8, model_share=0.5, num_interactions=3
        )
        item.components, item.gate = np.full(16, 0.25, "<f4").tobytes(), np.zeros(8, "<f4").tobytes()
        memory = events_pb2.MemoryEntry(
            entry_id="0:1", item_id="item-2", num_components=4, component_width=8, weight=1, type="click"
        )
        memory.components = np.full(32, 0.25, "<f2").tobytes()
        memory.event_time.CopyFrom(_NOW)
        self.changes: list[dict[str, Any]] = [{"item": item}, {"memory": memory}]
        self.hints: Hints = {
            "model_version": [self.version],
            "item_id": [*ITEM_IDS[:5], "new", "newer"],
            "entry_id": ["0:1", "0:2", "0:3"],
            "batch": [1, 2],
            "reflects": _SOURCES,
        }

    def begin(self) -> None:
        """Processes over new topics."""
        self.served = Served(self.folder / "bundle", vote_neighbours=4, vote_model_share=0.5)
        self.topics = MemoryTopics({INDEX_DELTAS: 1, ITEMS: 1})
        served = self.served
        changes = [
            CatalogueChanges(
                served.live.catalogue,
                served.candidates_metrics.catalogue,
                remembered=served.live.votes,
            ),
            CatalogueChanges(served.catalogue, served.reranker_metrics.catalogue),
        ]
        scene = Scene()
        others = [scene.popular, ItemChanges(self.films.sources, self.films.metrics)]
        readers = [self.topics.reader() for _ in range(4)]
        self.followers = [
            CatalogueFollower(
                reader, listener, model_version=self.version, follows_deltas=number < 2, poll_s=0.0, backoff_s=0.0
            )
            for number, (reader, listener) in enumerate(zip(readers, [*changes, *others], strict=True))
        ]
        self.readers = readers
        for follower in self.followers:
            follower.step()

    def write(self, rng: Random) -> None:
        """A delta, a tombstone, or an item."""
        if rng.random() < 0.65:
            self._write_delta(rng)
        else:
            item = events_pb2.Item(item_id=rng.choice((*ITEM_IDS[:5], "new", "1", "99")), title="A toy story")
            item.categories.extend(["Action", "x"])
            item.withdrawn = rng.random() < 0.2
            value = message_bytes(rng, item, {"item_id": ["item-1", "new", "2"]})
            key = _of(events_pb2.Item, value, "item_id") or b"item-1"
            self.topics.write(ITEMS, key if rng.random() < 0.97 else rng.choice((None, b"", b"\xff")), value)
        for follower, reader in zip(self.followers, self.readers, strict=True):
            before = len(self.topics.dead_letters)
            topic = ITEMS if follower in self.followers[2:] else ""
            ends = self.topics.end_offsets(topic or INDEX_DELTAS), self.topics.end_offsets(ITEMS)
            _step(
                follower,
                lambda reader=reader, topic=topic, ends=ends: (
                    (reader.positions(topic or INDEX_DELTAS), reader.positions(ITEMS)) == ends
                ),
            )
            _check_letters(self.topics.dead_letters[before:])

    def _write_delta(self, rng: Random) -> None:
        delta = events_pb2.IndexDelta(
            model_version=self.version, batch=1, last_of_batch=True, **rng.choice(self.changes)
        )
        delta.reflects.partition, delta.reflects.offset = 0, len(self.topics.logs[INDEX_DELTAS][0])
        delta.newest_recorded_time.CopyFrom(_NOW)
        value: bytes | None = message_bytes(rng, delta, self.hints)
        key = f"{self.version}/item/item-1".encode()
        try:
            read = events_pb2.IndexDelta.FromString(value or b"")
            which = "item" if read.WhichOneof("change") == "item" else "memory"
            own = read.item.item_id if which == "item" else read.memory.entry_id
            key = f"{read.model_version}/{which}/{own}".encode()
        except Exception:  # it is no message
            pass
        drawn = rng.random()
        if drawn < 0.08:
            value = None
        if drawn < 0.05 or 0.08 < drawn < 0.1:
            prefix = f"{self.version}/".encode()
            key = rng.choice((prefix, prefix + b"item", prefix + b"item/", prefix + b"x/item-1", prefix + b"item/\xff"))
        self.topics.write(INDEX_DELTAS, key, value)

    async def ask(self) -> None:
        """Every RPC that reads what deltas and items change."""
        served, state, c, r = self.served, self.state, candidates_pb2, reranker_pb2
        answers = [
            await served.candidates.Search(
                c.SearchRequest(query_state=state, k=20, stage=stage, seen_item_ids=["item-1"]), None
            )
            for stage in (c.STAGE_FIRST, c.STAGE_FULL)
        ]
        await served.candidates.GetIndexInfo(c.GetIndexInfoRequest(), None)
        await served.candidates.ExplainVotes(c.ExplainVotesRequest(query_state=state, item_id="item-2"), None)
        await served.reranker.GetRerankerInfo(r.GetRerankerInfoRequest(), None)
        pool = list(answers[0].item_ids)
        await served.reranker.Rerank(
            r.RerankRequest(query_state=state, candidate_item_ids=pool, k=5, diversity=0.5, max_per_category=1), None
        )
        for item_id in ("item-1", "new"):
            try:
                await served.reranker.ExplainScore(r.ExplainScoreRequest(query_state=state, item_id=item_id), None)
            except FreshetError:
                continue
        for answer in answers:
            if not all(np.isfinite(answer.scores)):
                raise Violation(f"scores that are no numbers: {list(answer.scores)[:5]}")
            index_freshness_message(1, answer.index_freshness.newest_recorded_time.ToMilliseconds(), None)
        await self.films.servicer.FindByWords(generator_pb2.FindByWordsRequest(query="toy story", k=5), None)

    async def end(self) -> None:
        """Threads of the batchers."""
        await self.served.close()


class Attributions(Records):
    """`attributions`, by the refresher; what it publishes is read as readers do."""

    name, weight, episode = "attributions", 14, 100

    def prepare(self) -> None:
        """Queries of the model, and a hundred places."""
        self.rules = make_rules()
        self.query = query_state_message(make_query(np.random.default_rng(1)))
        items = [f"item-{row}" for row in range(NUM_ITEMS + 2)]
        self.hints: Hints = {
            "item_id": items,
            "user_pseudonym": ["user-1", "user-2", "user-3"],
            "model_version": [MODEL],
            "event_time": _TIMES,
            "recorded_time": _TIMES,
            "source": _SOURCES,
            "undoes": _SOURCES,
            "up_to": _SOURCES,
        }
        self.shape = QueryShape(
            model_version=MODEL,
            num_components=self.query.num_components,
            component_width=self.query.component_width,
            num_pairs=len(self.query.gate) // 2,
        )

    def begin(self) -> None:
        """A refresher on new topics."""
        self.topics = MemoryTopics({ATTRIBUTIONS: 1, ITEMS: 1})
        self.world = World(self.rules)
        log = KafkaLog(self.topics.reader(), self.topics.reader(), self.shape)
        self.running = self.world.refresher(log=log)
        self.running.refresher.step()
        self.published = self.letters = 0

    def write(self, rng: Random) -> None:
        """An interaction, an undo or a forget."""
        message = events_pb2.Attribution(
            event_id="e", user_pseudonym=rng.choice(("user-1", "user-2")), recorded_time=_NOW, type="rating", value=4
        )
        drawn = rng.random()
        if drawn < 0.1:
            message.forgets.forget_id = "f"
            message.forgets.up_to.add(partition=0, offset=rng.randrange(40))
        else:
            message.item_id = rng.choice(self.hints["item_id"])
            message.source.offset, message.event_time.seconds = rng.randrange(60), NOW_MS // 1000 - rng.randrange(99)
            if drawn < 0.2:
                message.undoes.offset = rng.randrange(60)
            else:
                message.query_state.CopyFrom(self.query)
        value = message_bytes(rng, message, self.hints)
        self.topics.write(
            ATTRIBUTIONS, message.item_id.encode(), value, written_ms=rng.choice((NOW_MS, NOW_MS, 0, 2**53))
        )
        end = len(self.topics.logs[ATTRIBUTIONS][0]) - 1
        held = self.running.held.partitions
        _step(self.running.refresher, lambda: held[0].folded_offset == end)
        _check_letters(self.world.outbox.unreadable[self.letters :])
        self.letters = len(self.world.outbox.unreadable)

    async def ask(self) -> None:
        """Publications are readable, the status too, and a checkpoint comes back."""
        self.running.settle()
        deltas = self.world.outbox.deltas
        for delta in deltas[self.published :]:
            index_deltas.decode(delta.key, index_deltas.encode(delta))
        self.published = len(deltas)
        servicer, p = RefresherServicer(self.running.describe), refresher_pb2
        await servicer.GetStatus(p.GetStatusRequest(), None)
        await servicer.DescribeItem(p.DescribeItemRequest(item_id="item-1"), None)
        await servicer.DescribeContributions(p.DescribeContributionsRequest(user_pseudonym="user-1"), None)
        state = self.running.held.partitions[0]
        if from_bytes(to_bytes(state), 0, self.rules, {}).digest() != state.digest():
            raise Violation("a checkpoint comes back as another state")

    async def end(self) -> None:
        """Nothing is held."""


class Clicks(Records):
    """`search-clicks`, by the generator."""

    name, weight = "search-clicks", 8

    def prepare(self) -> None:
        """The films."""
        self.films = films(self.folder)

    def begin(self) -> None:
        """A new topic: the follower notices that it is shorter."""
        from services.generator.followers import ClicksFollower

        self.topic = type(self.films.topic)()
        text = self.films.sources.text
        assert text is not None
        text.reset()
        self.follower = ClicksFollower(self.topic, text, self.films.metrics, poll_s=0, backoff_s=0)
        self.follower.step()

    def write(self, rng: Random) -> None:
        """A click, an undo or a forget."""
        message = events_pb2.SearchClick(
            event_id="e", user_pseudonym=rng.choice("uv"), recorded_time=_NOW, event_time=_NOW, value=1
        )
        drawn = rng.random()
        if drawn < 0.1:
            message.forgets.forget_id = "f"
            message.forgets.up_to.add(partition=0, offset=rng.randrange(40))
        else:
            message.item_id, message.source.offset = rng.choice("1234567x"), rng.randrange(60)
            if drawn < 0.2:
                message.undoes.offset = rng.randrange(60)
            else:
                message.query = rng.choice(("space saga", "dog", "日本", "zz"))
        hints: Hints = {"item_id": list("1234567x"), "source": _SOURCES, "undoes": _SOURCES, "up_to": _SOURCES}
        hints = {**hints, "query": ["space", "dog 日本"], "event_time": _TIMES, "recorded_time": _TIMES}
        self.topic.append(message_bytes(rng, message, hints) if rng.random() < 0.98 else None, b"e")
        before = len(self.topic.dead_letters)
        _step(self.follower, lambda: self.topic.positions() == self.topic.end_offsets())
        _check_letters(self.topic.dead_letters[before:])

    async def ask(self) -> None:
        """Search by words."""
        found = await self.films.servicer.FindByWords(generator_pb2.FindByWordsRequest(query="space saga", k=7), None)
        if not all(np.isfinite([item.score for answer in found.answers for item in answer.items])):
            raise Violation("scores that are no numbers")
        await self.films.servicer.GetGeneratorInfo(generator_pb2.GetGeneratorInfoRequest(), None)


class _Producer:
    """Writes into topics in memory."""

    def __init__(self, topics: MemoryTopics) -> None:
        self._topics = topics

    def num_partitions(self, topic: str) -> int:
        return self._topics.num_partitions(topic)

    def send_many(self, records: Sequence[Record], timeout_s: float = 0) -> list[tuple[int, int]]:
        return [
            (one.partition or 0, self._topics.write(one.topic, one.key, one.value, partition=one.partition or 0))
            for one in records
        ]

    def close(self) -> None:
        """Nothing is held."""


class Checkpoints(Records):
    """`refresher-checkpoints`: heads and parts, whose checksums are computed again, and claims."""

    name, weight, episode = "refresher-checkpoints", 6, 20

    def prepare(self) -> None:
        """A state of some records."""
        from refresher.refresher_scene import random_records

        self.rules = make_rules(max_remembered=10, max_pending=4)
        world = World(self.rules)
        for record in random_records(3, 80):
            world.log.append(0, record)
        running = world.settled()
        taken = snapshot(running.held.partitions[0], {})
        self.values, self.parts = taken.values, {name: data for name, data in taken.parts().items() if data}

    def begin(self) -> None:
        """A topic with one checkpoint."""
        self.topics = MemoryTopics({REFRESHER_CHECKPOINTS: 2})
        self._reader().save(0, self.values, self.parts)
        ((self.head,),) = ([one for one in self._heads() if one.value and b"head" in (one.key or b"")],)

    def _heads(self) -> list[SourceRecord]:
        return self.topics.logs[REFRESHER_CHECKPOINTS][HEADS]

    def _reader(self) -> Any:
        topics = self.topics.reader()
        return CheckpointTopic(topics, _Producer(self.topics), "m")  # type: ignore[arg-type]

    def write(self, rng: Random) -> None:
        """Read by a new process, which refuses it or has a state that can be kept again."""
        document = json.loads(zlib.decompress((self.head.value or b"")[32:]))
        drawn = rng.random()
        key, value = self.head.key or b"", self.head.value or b""
        if drawn < 0.5:
            body = zlib.compress(json.dumps(mutate_json(rng, document)).encode(), 1)
            body = body if rng.random() < 0.95 else mutate_bytes(rng, body)
            value = hashlib.sha256(body).digest() + body
        elif drawn < 0.9:
            value = self._with_other_part(rng, document)
        elif drawn < 0.95:
            value = mutate_bytes(rng, value)
        else:
            key = rng.choice((b"m/0/claim", b"m/x/claim", b"m//claim", b"m/", b"m/0", b"m/\xff/claim", b"m/1e9/claim"))
            value = rng.choice((b"", b"\xff\xfe", b"owner", value))
        self.topics.write(REFRESHER_CHECKPOINTS, key, value, partition=HEADS)
        for kept in self._reader().load(0):
            try:
                state = restore(*kept.read(), 0, self.rules, {})
                to_bytes(state)
                state.digest()
            except CheckpointError:
                continue
        # What does not lie in compaction's way stays: the next record is tried on the good one alone.
        self._heads().pop()
        for log in self.topics.logs[REFRESHER_CHECKPOINTS][HEADS:]:
            del log[60:]

    def _with_other_part(self, rng: Random, document: dict[str, Any]) -> bytes:
        """A head that names a mutated part: its header's JSON, or its bytes."""
        name = rng.choice(sorted(self.parts))
        data = self.parts[name]
        if name.startswith("forgotten"):
            data = json.dumps(mutate_json(rng, json.loads(data))).encode()
        elif rng.random() < 0.7:
            end = 8 + int.from_bytes(data[:8], "little")
            header = json.dumps(mutate_json(rng, json.loads(data[8:end]))).encode()
            data = len(header).to_bytes(8, "little") + header + data[end:]
        else:
            data = mutate_bytes(rng, data)
        offset = self.topics.write(REFRESHER_CHECKPOINTS, b"m/0/part", data, partition=1)
        digest = base64.b85encode(hashlib.sha256(data).digest()[:16]).decode()
        document["parts"][name] = [["part", offset, len(data), digest]]
        body = zlib.compress(json.dumps(document).encode(), 1)
        return hashlib.sha256(body).digest() + body


class Sets(Records):
    """`version-sets`, by whoever follows it."""

    name, weight = "version-sets", 4

    def begin(self) -> None:
        """Nothing counted yet."""
        self.counted, self.offset = Counted(decode_operation), 0

    def write(self, rng: Random) -> None:
        """An operation, mutated: what counts of it is one more, and can be gone by."""
        last = self.counted.last
        revision = (0 if last is None else last.after.revision) + rng.choice((1, 1, 1, 0, 2))
        message = events_pb2.VersionSets(revision=revision, serving="a", salt="s", operation_id="1", time=_NOW)
        for name in "ab":
            message.sets.add(name=name, model_version=f"m-{name}", bundle=f"/{name}", candidates="h:1")
        if rng.random() < 0.5:
            message.canary.name, message.canary.share = "b", rng.choice((0.05, 1.0, 1.5, float("nan")))
        hints: Hints = {"serving": ["a", "b", "c"], "before": ["", "b", "c"], "name": ["a", "b"], "time": _TIMES}
        value = message_bytes(rng, message, hints)
        record = SourceRecord(VERSION_SETS, 0, self.offset, 1, None, value if rng.random() < 0.98 else None)
        self.offset += 1
        changed, now = self.counted.take([record]), self.counted.last
        if changed != (now is not last):
            raise Violation("a change that is none, or is not told")
        if changed and now is not None:
            sets = now.after
            if sets.revision != (0 if last is None else last.after.revision) + 1:
                raise Violation(f"revision {sets.revision} counted")
            if {sets.set_for("ann"), sets.set_for("")} - sets.sets.keys():
                raise Violation("somebody is answered by a set that there is not")
            if decode_operation(encode_operation(now)) != now:
                raise Violation("it is not read as it was written")


class Experimenting(Records):
    """`experiments`, by a gateway."""

    name, weight = "experiments", 4

    def begin(self) -> None:
        """Nothing counted yet."""
        self.counted, self.offset = Counted(experiments.decode_operation), 0

    def write(self, rng: Random) -> None:
        """An operation, mutated: who is assigned is assigned to an arm of a running experiment, once a layer."""
        last = self.counted.last
        revision = (0 if last is None else last.after.revision) + rng.choice((1, 1, 1, 0, 2))
        message = events_pb2.Experiments(revision=revision, operation_id="1", time=_NOW)
        for name, first in (("one", 0.0), ("two", 0.5)):
            one = message.experiments.add(
                name=name, layer="l", first=first, share=0.5, salt="s", state=rng.choice((1, 2, 3))
            )
            one.arms.add(name="a", share=0.5)
            one.arms.add(name="b", share=0.5, diversity=0.5)
        hints: Hints = {"name": ["one", "two", "a"], "layer": ["l", "k"], "time": _TIMES}
        value = message_bytes(rng, message, hints)
        record = SourceRecord(experiments.EXPERIMENTS, 0, self.offset, 1, None, value if rng.random() < 0.98 else None)
        self.offset += 1
        self.counted.take([record])
        now = self.counted.last
        if now is not None and now is not last:
            for user in ("ann", "bob", "cid"):
                for one in now.after.assigned(user, {}):
                    if one.experiment.state != 2 or (one.arm is None) != one.experiment.interleaved:
                        raise Violation("somebody is assigned to what does not run")
            if experiments.decode_operation(experiments.encode_operation(now)) != now:
                raise Violation("it is not read as it was written")


class Ruling(Records):
    """`rules`, by a gateway."""

    name, weight = "rules", 4

    def begin(self) -> None:
        """Nothing counted yet."""
        self.counted, self.offset = Counted(rules.decode_operation), 0
        self.live = LiveRules({"price": Kind.NUMBER})

    def write(self, rng: Random) -> None:
        """An operation, mutated: what is applied keeps the limits."""
        last = self.counted.last
        revision = (0 if last is None else last.after.revision) + rng.choice((1, 1, 1, 0, 2))
        message = events_pb2.StandingRules(revision=revision, operation_id="1", time=_NOW)
        message.rules.add(name="up", categories=["x"], boost=0.5)
        message.rules.add(name="few", where=[{"name": "price", "comparison": 7}], cap=1)
        value = message_bytes(rng, message, {"name": ["price", "a"], "time": _TIMES})
        record = SourceRecord(rules.RULES, 0, self.offset, 1, None, value if rng.random() < 0.98 else None)
        self.offset += 1
        self.counted.take([record])
        now = self.counted.last
        if now is not None and now is not last:
            self.live.apply(now.after)
            self.live.check(self.live.now.rules)
            # NaN is not equal to itself.
            if repr(rules.decode_operation(rules.encode_operation(now))) != repr(now):
                raise Violation("it is not read as it was written")


class Letters(Records):
    """Dead-letter topics, by the commands and by the encoder process."""

    name, weight = "dead-letters", 8

    def write(self, rng: Random) -> None:
        """A letter with mutated headers, or of any record."""
        headers = [(f"h{n}", rng.choice((None, b"", rng.randbytes(8)))) for n in range(rng.randrange(3))]
        source = SourceRecord("t", rng.choice((0, 32767)), rng.choice((0, 2**62)), 5, b"k", rng.randbytes(20), headers)
        record = dead_letter(DeadLetter(source, str(json_value(rng, keys_only=True)).encode(errors="replace").decode()))
        changed = [
            (name if rng.random() < 0.95 else rng.choice(("freshet-replayed-to", "freshet-x", "")), value)
            if rng.random() < 0.6
            else (name, mutate_bytes(rng, value))
            for name, value in record.headers
        ]
        letters = stored_letters([SourceRecord("t.dead-letter", 0, 0, 1, record.key, record.value, changed)])
        replay_notes([(letter, Position(0, 1)) for letter in letters])
        for letter in letters:
            if not letter.name:
                raise Violation("a letter without a name")


def _of(kind: Any, value: bytes, name: str) -> bytes:
    """The key that a record says it has; empty where it says none."""
    try:
        text: str = getattr(kind.FromString(value), name)
    except Exception:
        return b""
    return text.encode()


def _expect(allowed: type[Exception], act: Callable[[], object]) -> None:
    """Do it; `allowed` may be raised."""
    try:
        act()
    except allowed:
        return


def record_targets() -> list[Target]:
    """One for each group of topics that one process reads together."""
    return [
        EncoderStream(),
        Catalogue(),
        Attributions(),
        Clicks(),
        Checkpoints(),
        Sets(),
        Experimenting(),
        Ruling(),
        Letters(),
    ]
