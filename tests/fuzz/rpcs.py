"""Every RPC of every process, over gRPC on loopback through the guard (and the gateway's door), many calls at once.

An answer has to come in time with a status that the RPC may have: OK, INVALID_ARGUMENT naming what is wrong, and what
`ALSO` adds. Dependencies are in memory and well, so nothing may be unavailable.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
from campaign import SLOWEST_S, Target, Violation, random_of
from encoder.streams import VOCABULARY
from fakes.encoder import HashEncoder
from fakes.gateway import MemoryExposureLog, letter_at
from freshet.v1 import (
    candidates_pb2,
    candidates_pb2_grpc,
    common_pb2,
    encoder_pb2,
    encoder_pb2_grpc,
    events_pb2,
    gateway_pb2,
    gateway_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    refresher_pb2,
    refresher_pb2_grpc,
    reranker_pb2,
    reranker_pb2_grpc,
)
from gateway.gateway_scene import ITEMS, Scene, memory_operations
from generator import Hints, message_bytes
from generator_scenes import films
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client import CollectorRegistry
from refresher.refresher_scene import World, make_rules, random_records
from scene import ITEM_IDS, Served, query_state, write_small_bundle

from services.candidates.config import CandidatesSettings
from services.contracts.operations import Operation
from services.contracts.topics.forgets import Forget
from services.contracts.topics.version_sets import VersionSet, VersionSets
from services.encoder.config import EncoderSettings
from services.encoder.handlers.encode import EncodeHistory
from services.encoder.metrics import EncoderMetrics
from services.encoder.server import DescribeUser, EncoderServicer
from services.gateway.bootstrap import MAX_REQUEST_BYTES
from services.gateway.config import GatewaySettings
from services.gateway.domain import Ranking, ScoredItem
from services.gateway.edge.api_keys import ApiKey, digest
from services.gateway.edge.door import AuditLog, Door, admissions
from services.gateway.edge.roles import Role
from services.gateway.ports import Contributions, StoredUser
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.pages import PageTokens, ServedList, packed_list
from services.generator.config import GeneratorSettings
from services.offline.backfill.memory_store import MemoryStore
from services.platform.rpc.request_counts import OF_CLIENTS
from services.platform.rpc.server import RpcServer
from services.platform.stream.records import Position
from services.refresher.config import RefresherSettings
from services.refresher.server import RefresherServicer
from services.reranker.config import RerankerSettings
from services.user_state.layout import PAGES
from services.user_state.values import now_ms

_TOGETHER = 32
# Its stream ends with the caller: one message is read.
ENDLESS = "TailInteractions"
_CALL_S = SLOWEST_S
# A call that waits for a freshness token waits until its deadline.
_TOKEN_CALL_S = 0.3
SECRET = "freshet_fuzz"

# Beside OK and INVALID_ARGUMENT. RESOURCE_EXHAUSTED: more calls at once than the process takes.
ALSO: dict[str, set[str]] = {
    # Where it waited for a freshness token; where no source answered within its 400 ms, as on a busy machine.
    # With a page token: of a mutated user; of a list that is not kept.
    "GatewayService.Recommend": {"DEADLINE_EXCEEDED", "PERMISSION_DENIED", "FAILED_PRECONDITION"},
    "GatewayService.Search": {"DEADLINE_EXCEEDED"},
    "GatewayService.RecordImpressions": {"PERMISSION_DENIED"},  # of a mutated user
    "GatewayService.Explain": {"NOT_FOUND"},
    "GatewayService.Similar": {"NOT_FOUND"},
    "GatewayService.ReplayDeadLetter": {"NOT_FOUND"},
    "GatewayService.PutRules": {"ABORTED"},  # of another revision
    "GatewayService.ChangeExperiment": {"ABORTED", "NOT_FOUND", "FAILED_PRECONDITION"},
    "GatewayService.ChangeVersionSet": {"ABORTED", "FAILED_PRECONDITION", "NOT_FOUND"},
    "GatewayService.GetExposure": {"NOT_FOUND", "PERMISSION_DENIED"},  # of a mutated user
    "GatewayService.GetItem": {"NOT_FOUND"},
    "GatewayService.PutItems": {"NOT_FOUND"},  # an edit of a mutated item
    "CandidatesService.Similar": {"NOT_FOUND"},
    # Of another model.
    "EncoderService.Encode": {"FAILED_PRECONDITION"},
    "CandidatesService.Search": {"FAILED_PRECONDITION"},
    "CandidatesService.ExplainVotes": {"FAILED_PRECONDITION"},
    "RerankerService.Rerank": {"FAILED_PRECONDITION"},
    "RerankerService.ExplainScore": {"FAILED_PRECONDITION", "NOT_FOUND"},
}

_NOW = Timestamp(seconds=1_700_000_000)
_FILTERS = [common_pb2.Filter(), common_pb2.Filter(exclude_seen=True, deny_item_ids=["a", "item-1"])]
_FILTERS += [
    common_pb2.Filter(allow_categories=["x", "Action"]),
    common_pb2.Filter(allow_item_ids=["a", "item-2", "1"]),
    common_pb2.Filter(where=[common_pb2.AttributeCondition(name="price", comparison=2, values=[{"number": 20}])]),
]
_TIMES = [_NOW, Timestamp(seconds=1_700_000_001, nanos=5_000_000)]
_CLICK = events_pb2.Interaction(user_id="ann", item_id="a", type="click", value=1, event_time=_NOW, context={"d": "tv"})
_SEARCHED = events_pb2.Interaction(user_id="ann", item_id="a", type="search_click", query="two words", event_id="e-1")
_HISTORY = [gateway_pb2.HistoryEvent(item_id=item, type="click") for item in ("a", "b")]
_BOUNDED: Hints = {"k": [1, 2, 10], "diversity": [0.0, 0.5, 1.0], "event_time": _TIMES, "filter": _FILTERS}
# Whose list is always kept, and a place in it; a day ahead, for campaigns of hours.
_READER = "reader"
_PLACE = PageTokens(b"key", lambda: now_ms() + 24 * 3600 * 1000).begin(2)
# An answer to "ann", which the log has.
_SHOWN = MemoryExposureLog()
_EXPOSURE_ID = Exposures(b"key", _SHOWN).shown("recommend", "ann", [ScoredItem("a", 0.5, "mol")], model_version="m1")
_TOKEN = common_pb2.FreshnessToken(epoch="epoch-1", partition=3, offset=5)


@dataclass
class Process:
    """A process that answers: its server and a channel to it, what empties its fakes, and a query state that fits its
    model. servicer: the gateway's, which HTTP serves, too."""

    server: RpcServer
    channel: Any
    tidy: Callable[[], None] = lambda: None
    state: common_pb2.QueryState = field(default_factory=common_pb2.QueryState)
    servicer: Any = None


@dataclass(frozen=True)
class Rpc:
    """One method. valid: requests that are answered with OK, given a query state."""

    name: str
    weight: int
    valid: Callable[[common_pb2.QueryState], Sequence[Message]]
    streams: bool = False


@dataclass
class Service(Target):
    """All methods of a service; which one an input calls is drawn, too."""

    name: str
    start: Callable[[Path], contextlib.AbstractAsyncContextManager[Process]]
    rpcs: Sequence[Rpc]
    hints: Hints = field(default_factory=dict)
    episode: int = 256
    # (method, status) -> calls.
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def weight(self) -> int:
        """Those of its methods."""
        return sum(rpc.weight for rpc in self.rpcs)

    def allowed(self, method: str) -> set[str]:
        """The statuses of a method."""
        also = ALSO.get(f"{self.name}.{method}", set())
        strangers = {"UNAUTHENTICATED"} if self.name == "GatewayService" else set()
        return {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", *also, *strangers}

    @contextlib.asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[None]:
        """A process of its own."""
        async with self.start(folder) as process:
            self._process = process
            make = process.channel
            paths = {rpc.name: f"/freshet.v1.{self.name}/{rpc.name}" for rpc in self.rpcs}
            self._calls = {
                rpc.name: (make.stream_unary if rpc.streams else make.unary_unary)(paths[rpc.name]) for rpc in self.rpcs
            }
            if ENDLESS in paths:
                self._calls[ENDLESS] = make.unary_stream(paths[ENDLESS])
            self._valid = {rpc.name: rpc.valid(process.state) for rpc in self.rpcs}
            yield

    async def run(self, seed: int, numbers: Sequence[int], found: Callable[[int, BaseException], None]) -> None:
        """Some at a time."""
        waiting = iter(numbers)

        async def work() -> None:
            for number in waiting:
                try:
                    await self._one(random_of(seed, self.name, number))
                except Violation as exc:
                    found(number, exc)

        await asyncio.gather(*(work() for _ in range(_TOGETHER)))
        self._process.tidy()

    async def _one(self, rng: Random) -> None:
        (rpc,) = rng.choices(self.rpcs, [rpc.weight for rpc in self.rpcs])
        valid = rng.choice(self._valid[rpc.name])
        data = message_bytes(rng, valid, self.hints)
        request: Any = data
        if rpc.streams:
            request = iter([data, *(message_bytes(rng, valid, self.hints) for _ in range(rng.choice((0, 0, 1, 3))))])
        call_s = _TOKEN_CALL_S if rpc.name == "Recommend" and _has_token(data) else _CALL_S
        began = time.perf_counter()
        try:
            call = self._calls[rpc.name](request, timeout=call_s, metadata=_metadata(rng))
            await (call.read() if rpc.name == ENDLESS else call)
            call.cancel()
            status, details = "OK", ""
        except grpc.aio.AioRpcError as exc:
            status, details = exc.code().name, exc.details() or ""
        took = time.perf_counter() - began
        self.statuses[rpc.name, status] += 1
        if status not in (allowed := self.allowed(rpc.name)):
            raise Violation(f"{rpc.name}: {status}: {details}; allowed: {sorted(allowed)}")
        if status == "INVALID_ARGUMENT" and len(details) < 8:
            raise Violation(f"{rpc.name}: INVALID_ARGUMENT does not say what is wrong: {details!r}")
        if took > SLOWEST_S:
            raise Violation(f"{rpc.name}: it took {took:.1f} s")
        is_valid = not rpc.streams and data == valid.SerializeToString()
        if is_valid and status in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"):
            raise Violation(f"{rpc.name}: a valid request has {status}: {details}")


def _has_token(data: bytes) -> bool:
    try:
        return gateway_pb2.RecommendRequest.FromString(data).HasField("freshness_token")
    except DecodeError:
        return False


def _metadata(rng: Random) -> tuple[tuple[str, str], ...]:
    """A key, now and then another one; a request id of any printable ASCII."""
    drawn = rng.random()
    secret = SECRET if drawn < 0.98 else rng.choice(("", "x" * 4000, "freshet_other", "Bearer Bearer"))
    found = (("authorization", f"{rng.choice(('Bearer', 'bearer'))} {secret}"),)
    if drawn < 0.1:
        text = "".join(chr(rng.randrange(33, 127)) for _ in range(rng.choice((1, 64, 65, 500))))
        found += (("x-request-id", text),)
    return found


@contextlib.asynccontextmanager
async def serving(
    process: str, settings: Any, add: Callable[..., Any], servicer: Any, **options: Any
) -> AsyncIterator[tuple[RpcServer, Any]]:
    """A guarded server, and a channel to it."""

    def add_services(server: grpc.aio.Server) -> list[str]:
        add(servicer, server)
        return []

    own = settings(port=0, metrics_port=0, drain_seconds=0)
    server = RpcServer(
        process=process, settings=own, add_services=add_services, registry=CollectorRegistry(), **options
    )
    await server.start()
    limit = [("grpc.max_send_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=limit) as channel:
        yield server, channel
    await server.drain()


@contextlib.asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Process]:
    """On memory ports; a forget is applied as soon as it is written."""
    scene = Scene()
    scene.letters.letters.append(letter_at(Position(3, 5)))

    def apply(forget: Forget) -> None:
        pseudonym = f"p-{forget.user_id}"
        scene.encoder.users[forget.user_id] = StoredUser(pseudonym=pseudonym, forgotten_up_to=dict(forget.up_to))
        scene.refreshers.of_users[pseudonym] = [Contributions(partitions=(0, 1), forgotten_up_to=dict(forget.up_to))]

    served = Ranking(items=[ScoredItem(item, 0.5, "mol") for item in ("a", "b", "c", "d")])
    kept_list = packed_list(_PLACE, ServedList(ranking=served, model_version="m1"))

    def tidy() -> None:
        scene.sessions.lists.clear()
        scene.sessions.lists[PAGES, _READER] = [kept_list]
        for kept in (
            *(scene.encoder.histories, scene.encoder.users, scene.refreshers.of_users, scene.items.written),
            *(scene.candidates.query_states, scene.candidates.pool_sizes, scene.candidates.seen, scene.reranker.asked),
            *(scene.reranker.pools, scene.interactions.written, scene.forgets.written, scene.sources.asked),
            *(scene.exposures.written, scene.reranker.discounts, scene.sessions.ttls),
        ):
            kept.clear()  # type: ignore[attr-defined]
        scene.exposures.written += _SHOWN.written

    staged = VersionSets.of_one(VersionSet(name="a", model_version="m1", bundle="/a"))
    staged = staged.staged(VersionSet(name="b", model_version="m2", bundle="/b"))
    made = Operation(after=staged, operation="stage b", operator="ann", operation_id="1", time_ms=1)
    scene.servicer.operations = memory_operations(scene.routes, made)
    tidy()
    scene.forgets.on_append = apply
    key = ApiKey(id="fuzz", sha256=digest(SECRET.encode()).hex(), roles=frozenset(Role))
    own: dict[str, Any] = {
        "admissions": admissions(),
        "max_request_bytes": MAX_REQUEST_BYTES,
        "limits": OF_CLIENTS,
        "door": Door([key], AuditLog(folder / "audit.log")),
    }
    add = gateway_pb2_grpc.add_GatewayServiceServicer_to_server
    async with serving("gateway", GatewaySettings, add, scene.servicer, **own) as (server, channel):
        yield Process(server, channel, tidy, servicer=scene.servicer)


@contextlib.asynccontextmanager
async def encoder(folder: Path) -> AsyncIterator[Process]:
    """With a model that is a hash."""
    model = HashEncoder()
    handler = EncodeHistory(encoder=model, vocabulary=VOCABULARY)
    describe = DescribeUser(
        reader=MemoryStore(), vocabulary=VOCABULARY, pseudonym_keys=(b"key",), applied_up_to=lambda user_id: {3: 9}
    )
    servicer = EncoderServicer({"model-1": handler}, describe, EncoderMetrics(CollectorRegistry()), "model-1")
    add = encoder_pb2_grpc.add_EncoderServiceServicer_to_server
    async with serving("encoder", EncoderSettings, add, servicer) as (server, channel):
        yield Process(server, channel, model.calls.clear)
    await handler.close()


@contextlib.asynccontextmanager
async def _of_bundle(folder: Path, name: str, settings: Any, add: Any) -> AsyncIterator[Process]:
    """Candidates or the reranker, over the small bundle."""
    version = write_small_bundle(folder / "bundle").model_version
    served = Served(folder / "bundle")
    async with serving(name, settings, add, getattr(served, name)) as (server, channel):
        yield Process(server, channel, state=query_state(version))
    await served.close()


def candidates(folder: Path) -> contextlib.AbstractAsyncContextManager[Process]:
    add = candidates_pb2_grpc.add_CandidatesServiceServicer_to_server
    return _of_bundle(folder, "candidates", CandidatesSettings, add)


def reranker(folder: Path) -> contextlib.AbstractAsyncContextManager[Process]:
    return _of_bundle(folder, "reranker", RerankerSettings, reranker_pb2_grpc.add_RerankerServiceServicer_to_server)


@contextlib.asynccontextmanager
async def refresher(folder: Path) -> AsyncIterator[Process]:
    """After a hundred folded records."""
    world = World(make_rules())
    for record in random_records(3, 100):
        world.log.append(0, record)
    running = world.settled()
    add = refresher_pb2_grpc.add_RefresherServiceServicer_to_server
    async with serving("refresher", RefresherSettings, add, RefresherServicer(running.describe)) as (server, channel):
        yield Process(server, channel)


@contextlib.asynccontextmanager
async def generator(folder: Path) -> AsyncIterator[Process]:
    """Over seven films."""
    running = films(folder)
    add = generator_pb2_grpc.add_GeneratorServiceServicer_to_server
    async with serving("generator", GeneratorSettings, add, running.servicer) as (server, channel):
        yield Process(server, channel)
    await running.servicer.close()


def rpc_targets() -> list[Target]:
    """All methods of all services; `test_fuzz.py` compares them with the descriptors."""
    return [_gateway(), _encoder(), _candidates(), _reranker(), _refresher(), _generator()]


def _gateway() -> Service:
    g = gateway_pb2
    hints: Hints = {
        "user_id": ["ann", "new"],
        "item_id": ITEMS,
        "epoch": ["epoch-1"],
        "partition": [3],
        "offset": [5, 8],
    }
    hints = {**_BOUNDED, **hints, "interaction": [_CLICK, _SEARCHED], "interactions": [_CLICK, _SEARCHED]}
    recommends = [
        g.RecommendRequest(user_id="ann", k=3, freshness_token=_TOKEN, diversity=0.5, context={"a": "b"}),
        g.RecommendRequest(k=2, history=_HISTORY, query="space", filter=_FILTERS[1]),
        g.RecommendRequest(user_id="new", k=1000, max_per_category=1),
        g.RecommendRequest(user_id="ann", k=2, page_depth=50, not_again=g.NotAgain(answers=2, minutes=10)),
        g.RecommendRequest(
            user_id="ann",
            k=3,
            rules=[
                common_pb2.Rule(name="up", categories=["x"], boost=0.5),
                common_pb2.Rule(name="first", item_ids=["b"], pin=1),
                common_pb2.Rule(name="few", where=[{"name": "price", "comparison": 7}], cap=1),
            ],
        ),
        g.RecommendRequest(user_id=_READER, k=2, page_token=PageTokens(b"key").token(_PLACE, _READER)),
    ]
    searches = [
        g.GatewayServiceSearchRequest(query="space jam", k=5, filter=common_pb2.Filter(deny_item_ids=["a"])),
        g.GatewayServiceSearchRequest(query="x", k=1, user_id="ann", filter=_FILTERS[1]),
    ]
    explains = [
        g.ExplainRequest(user_id="ann", item_id="b", max_pairs=1),
        g.ExplainRequest(item_id="b", history=_HISTORY),
    ]
    similar = [
        g.GatewayServiceSimilarRequest(item_id="b", k=3, user_id="ann", filter=_FILTERS[1]),
        g.GatewayServiceSimilarRequest(item_id="c", k=1000),
    ]
    seen = g.RecordImpressionsRequest(
        user_id="ann", exposure_id=_EXPOSURE_ID, impressions=[g.Impression(position=2, item_id="a")]
    )
    item = events_pb2.Item(
        item_id="a", title="A", categories=["x"], available=True, attributes={"price": {"number": 9}}
    )
    replay = g.ReplayDeadLetterRequest(
        topic="interactions", position=common_pb2.StreamPosition(partition=3, offset=5), preview=True
    )
    puts = [g.PutItemsRequest(items=[item]), g.PutItemsRequest(items=[item], fields=["title", "attributes.price"])]
    listings = [g.ListItemsRequest(page_size=2), g.ListItemsRequest(prefix="a", category="x", newest_first=True)]
    listings.append(g.ListItemsRequest(page_token="1@m1", page_size=1))
    forgets = [g.ForgetUserRequest(user_id="ann"), g.ForgetUserRequest(user_id="b", preview=True)]
    shadow = g.ChangeVersionSetRequest(change=1, name="b", share=0.5, expected_revision=1)
    arms = [events_pb2.Arm(name="a", share=0.5), events_pb2.Arm(name="b", share=0.5, rules=recommends[4].rules)]
    mixed = g.ChangeExperimentRequest(
        create=events_pb2.Experiment(name="one", layer="a", share=0.5, arms=arms, context={"surface": "home"})
    )
    rpcs = [
        Rpc("Recommend", 16, lambda state: recommends),
        Rpc("Search", 12, lambda state: searches),
        Rpc("Similar", 8, lambda state: similar),
        Rpc("RecordInteractions", 14, lambda state: [g.RecordInteractionsRequest(interactions=[_CLICK, _SEARCHED])]),
        Rpc("StreamInteractions", 8, lambda state: [g.StreamInteractionsRequest(interaction=_CLICK)], streams=True),
        Rpc("RecordImpressions", 8, lambda state: [seen]),
        Rpc("UndoInteraction", 6, lambda state: [g.UndoInteractionRequest(user_id="ann", event_id="e-1")]),
        Rpc("PutItems", 10, lambda state: puts),
        Rpc("Explain", 10, lambda state: explains),
        Rpc("ForgetUser", 6, lambda state: forgets),
        Rpc("GetFreshness", 2, lambda state: [g.GetFreshnessRequest()]),
        Rpc("DescribeCatalogue", 2, lambda state: [g.DescribeCatalogueRequest(max_categories=2)]),
        Rpc("GetItem", 4, lambda state: [g.GetItemRequest(item_id="a")]),
        Rpc("ListItems", 6, lambda state: listings),
        Rpc("GetUser", 4, lambda state: [g.GetUserRequest(user_id="ann", max_events=1, skip_events=1)]),
        Rpc("ListExposures", 3, lambda state: [g.ListExposuresRequest(user_id="ann", max_answers=2)]),
        Rpc("GetExposure", 3, lambda state: [g.GetExposureRequest(user_id="ann", exposure_id=_EXPOSURE_ID)]),
        Rpc("TailInteractions", 2, lambda state: [g.TailInteractionsRequest()]),
        Rpc("GetHealth", 2, lambda state: [g.GetHealthRequest(minutes=3)]),
        Rpc("ListDeadLetters", 3, lambda state: [g.ListDeadLettersRequest(topic="interactions", max_letters=2)]),
        Rpc("ReplayDeadLetter", 3, lambda state: [replay]),
        Rpc("GetVersionSets", 1, lambda state: [g.GetVersionSetsRequest()]),
        Rpc("ChangeVersionSet", 4, lambda state: [shadow]),
        Rpc("ListRules", 1, lambda state: [g.ListRulesRequest()]),
        Rpc("ListExperiments", 1, lambda state: [g.ListExperimentsRequest()]),
        Rpc("ChangeExperiment", 6, lambda state: [mixed]),
        Rpc("PutRules", 6, lambda state: [g.PutRulesRequest(rules=recommends[4].rules)]),
    ]
    return Service("GatewayService", gateway, rpcs, hints)


def _encoder() -> Service:
    e = encoder_pb2
    history = [e.EncodeEvent(item_id=f"item-{n}", event_time=Timestamp(seconds=n)) for n in range(3)]
    rpcs = [
        Rpc("Encode", 12, lambda state: [e.EncodeRequest(history=history)]),
        Rpc("DescribeUser", 3, lambda state: [e.DescribeUserRequest(user_id="u")]),
    ]
    known = [f"item-{n}" for n in range(60)]
    hints = {"user_id": ["user-0", "new"], "item_id": known, "model_version": ["", "model-1", "model-2"]}
    return Service("EncoderService", encoder, rpcs, hints)


_SERVED: Hints = {
    **_BOUNDED,
    **dict.fromkeys(("item_id", "candidate_item_ids", "seen_item_ids"), ITEM_IDS),
    "stage": [1, 2],
    "algorithm": ["", "exact", "top_k_avg"],
    "model_share": [0.5, 1.0],
    "votes": [0.0, 0.5],
}


def _candidates() -> Service:
    c = candidates_pb2
    rpcs = [
        Rpc(
            "Search",
            16,
            lambda state: [
                c.SearchRequest(query_state=state, k=10, stage=c.STAGE_FULL, seen_item_ids=["item-3", "item-9"]),
                c.SearchRequest(query_state=state, k=10_000, stage=c.STAGE_FIRST, filter=_FILTERS[2]),
            ],
        ),
        Rpc(
            "Similar",
            8,
            lambda state: [c.SimilarRequest(item_id="item-4", k=10, seen_item_ids=["item-3"], filter=_FILTERS[1])],
        ),
        Rpc("GetIndexInfo", 1, lambda state: [c.GetIndexInfoRequest()]),
        Rpc(
            "ExplainVotes",
            8,
            lambda state: [c.ExplainVotesRequest(query_state=state, item_id="item-4", seen_item_ids=["item-3"])],
        ),
    ]
    return Service("CandidatesService", candidates, rpcs, _SERVED)


def _reranker() -> Service:
    r = reranker_pb2
    pool, votes = ITEM_IDS[:20], {"votes": [0.1, 0.2], "model_share": 0.5}
    rpcs = [
        Rpc(
            "Rerank",
            16,
            lambda state: [
                r.RerankRequest(query_state=state, candidate_item_ids=pool, k=5, bound=0.5, diversity=0.3),
                r.RerankRequest(query_state=state, candidate_item_ids=["item-1", "x"], k=1, **votes),
            ],
        ),
        Rpc("GetRerankerInfo", 1, lambda state: [r.GetRerankerInfoRequest()]),
        Rpc("ExplainScore", 8, lambda state: [r.ExplainScoreRequest(query_state=state, item_id="item-4", max_pairs=3)]),
    ]
    return Service("RerankerService", reranker, rpcs, _SERVED)


def _refresher() -> Service:
    p = refresher_pb2
    rpcs = [
        Rpc("GetStatus", 1, lambda state: [p.GetStatusRequest()]),
        Rpc("DescribeItem", 3, lambda state: [p.DescribeItemRequest(item_id="item-1")]),
        Rpc("DescribeContributions", 3, lambda state: [p.DescribeContributionsRequest(user_pseudonym="user-1")]),
    ]
    return Service("RefresherService", refresher, rpcs, {"item_id": ITEM_IDS, "user_pseudonym": ["user-1", "x"]})


def _generator() -> Service:
    w = generator_pb2
    kind = w.FindByWordsRequest
    rpcs = [Rpc("FindByWords", 12, lambda state: [kind(query="toy story", k=3), kind(query="dog", k=1000)])]
    rpcs.append(Rpc("GetGeneratorInfo", 1, lambda state: [w.GetGeneratorInfoRequest()]))
    words = ["toy story", "space", "zzzz", "dog 日本"]
    return Service(
        "GeneratorService", generator, rpcs, {**_BOUNDED, "query": words, "sources": ["text_mol", "phrases"]}
    )
