"""The gateway's adapters against real servers on this machine: peers over gRPC, the stream's probes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from freshet.v1 import (
    candidates_pb2,
    candidates_pb2_grpc,
    common_pb2,
    encoder_pb2,
    encoder_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    refresher_pb2,
    refresher_pb2_grpc,
    reranker_pb2,
    reranker_pb2_grpc,
)
from gateway_scene import query_state
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.algorithms.indexes.protocol import Certificate
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.topic_reader import TopicReader
from services.gateway.adapters.kafka_reads import KafkaStreamEnds
from services.gateway.adapters.peers import RemoteEncoder, RemoteRefreshers, RemoteTextSources
from services.gateway.adapters.probes import ProbedStreamStatus
from services.gateway.adapters.processes import Remote, RemoteCandidates, RemoteReranker
from services.gateway.domain import (
    HistoryEvent,
    Hit,
    IndexFreshness,
    Pool,
    Ranking,
    RerankQuery,
    ScoredItem,
    Seen,
    SourceHits,
)
from services.gateway.ports import PartitionProgress
from services.platform.config import ProcessSettings
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, PreconditionFailed
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import HealthState, RpcServer
from services.stack import Ports

GENERATED = [("i1", "Space", -1.0), ("i2", "Movies", -2.0)]


class Peers(
    encoder_pb2_grpc.EncoderServiceServicer,
    generator_pb2_grpc.GeneratorServiceServicer,
    candidates_pb2_grpc.CandidatesServiceServicer,
    refresher_pb2_grpc.RefresherServiceServicer,
    reranker_pb2_grpc.RerankerServiceServicer,
):
    def __init__(self) -> None:
        self.request: Any = None
        self.response: Any = None

    async def _answer(self, request: Any, context: Any) -> Any:
        self.request = request
        return self.response

    Encode = Search = Rerank = ExplainScore = ExplainVotes = GetIndexInfo = GetRerankerInfo = GetStatus = _answer
    FindByWords = _answer


@asynccontextmanager
async def peers(health: HealthState | None = None) -> AsyncIterator[tuple[Peers, grpc.aio.Channel]]:
    servicer = Peers()

    def add(server: grpc.aio.Server) -> list[str]:
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, server)
        candidates_pb2_grpc.add_CandidatesServiceServicer_to_server(servicer, server)
        generator_pb2_grpc.add_GeneratorServiceServicer_to_server(servicer, server)
        refresher_pb2_grpc.add_RefresherServiceServicer_to_server(servicer, server)
        reranker_pb2_grpc.add_RerankerServiceServicer_to_server(servicer, server)
        return ["freshet.v1.EncoderService"]

    settings = ProcessSettings(port=0, metrics_port=0, drain_seconds=0)
    server = RpcServer(
        process="peers", settings=settings, add_services=add, health_state=health, registry=CollectorRegistry()
    )
    await server.start()
    async with rpc_client.channel(f"127.0.0.1:{server.port}") as channel:
        yield servicer, channel
    await server.drain()


def over(channel: grpc.aio.Channel) -> Remote:
    return Remote(channel)


def _free_port() -> int:
    """One that no outgoing connection gets."""
    return Ports.free()["gateway"]


async def test_sources_of_items_by_words_are_asked_in_one_call_and_each_says_how_it_went() -> None:
    wanted = ItemFilter(exclude_seen=True, deny_item_ids=("x",), allow_categories=("Comedy",))
    async with peers() as (peer, channel):
        items = [generator_pb2.FoundByWords(item_id=i, identifier=n, score=s) for i, n, s in GENERATED]
        peer.response = generator_pb2.FindByWordsResponse(
            answers=[
                generator_pb2.SourceAnswer(source="phrases", items=items, milliseconds=3.5),
                generator_pb2.SourceAnswer(source="text_mol", status=9, reason="text_mol is not loaded: none"),
                generator_pb2.SourceAnswer(source="lexical", status=4, reason="lexical: no answer within 9 ms"),
            ],
            text_version="t1",
        )
        asked = ["phrases", "text_mol", "lexical"]
        found = await RemoteTextSources(over(channel)).find(asked, "space", k=7, filter=wanted, timeout_s=5)
    best = [Hit("i1", -1.0, "Space"), Hit("i2", -2.0, "Movies")]
    assert found["phrases"] == SourceHits(items=best, text_version="t1", milliseconds=3.5)
    assert isinstance(found["text_mol"], PreconditionFailed)
    assert str(found["text_mol"]) == "generator: text_mol is not loaded: none"
    assert isinstance(found["lexical"], DeadlineExceeded)
    assert (peer.request.query, peer.request.k, list(peer.request.sources)) == ("space", 7, asked)
    assert list(peer.request.filter.deny_item_ids) == ["x"]
    assert list(peer.request.filter.allow_categories) == ["Comedy"]
    assert not peer.request.filter.HasField("exclude_seen")


async def test_encode_sends_times_and_reads_the_state() -> None:
    async with peers() as (servicer, channel):
        servicer.response = encoder_pb2.EncodeResponse(queue_ms=1, encode_ms=2)
        servicer.response.query_state.components = b"abc"
        servicer.response.query_state.model_version = "m1"
        encoded = await RemoteEncoder(over(channel), "m1").encode("ann", [HistoryEvent("a", 1_500)], 1.0)
        assert servicer.request.history[0].event_time.ToMilliseconds() == 1_500
        assert encoded.query_state is not None
        assert (encoded.query_state.components, encoded.queue_ms, encoded.encode_ms) == (b"abc", 1, 2)
        servicer.response = encoder_pb2.EncodeResponse(unknown_items=1)
        assert (await RemoteEncoder(over(channel), "m1").encode("ann", [HistoryEvent("a", 1)], 1.0)).query_state is None


async def test_a_search_is_a_full_one_with_its_certificate() -> None:
    async with peers() as (servicer, channel):
        servicer.response = candidates_pb2.SearchResponse(
            item_ids=["a", "b"],
            scores=[0.5, 0.25],
            index_version="i1",
            certificate=common_pb2.Certificate(kind=common_pb2.Certificate.KIND_BOUNDED, gap=0.125),
            votes=[0, 0.5],
            model_share=0.75,
            index_freshness=common_pb2.IndexFreshness(deltas_offset=7),
            queue_ms=1,
            search_ms=2,
        )
        ranking = await RemoteCandidates(over(channel)).search(
            query_state("q"), k=2, filter=ItemFilter(), seen=Seen(["c"], ["c"]), timeout_s=1.0
        )
    request = servicer.request
    assert (request.k, request.stage, list(request.seen_item_ids)) == (2, candidates_pb2.STAGE_FULL, ["c"])
    assert list(request.turned_down_item_ids) == ["c"]
    assert ranking == Ranking(
        items=[ScoredItem("a", 0.5, "mol"), ScoredItem("b", 0.25, "mol")],
        certificate=Certificate(0.125),
        index_version="i1",
        index_freshness=IndexFreshness(deltas_offset=7),
        queue_ms=1,
        stage_ms=2,
    )


@pytest.mark.parametrize("bound", [None, 0.25])
async def test_propose_asks_the_first_stage_and_keeps_its_bound(bound: float | None) -> None:
    async with peers() as (servicer, channel):
        servicer.response = candidates_pb2.SearchResponse(
            item_ids=["a", "b"],
            scores=[0.5, 0.25],
            bound=bound,
            index_version="i1",
            votes=[0, 0.5],
            model_share=0.75,
            index_freshness=common_pb2.IndexFreshness(deltas_offset=7, lag_seconds=0.5),
        )
        pool = await RemoteCandidates(over(channel)).propose(
            query_state("q"), k=20, filter=ItemFilter(deny_categories=("x",)), seen=Seen(["c"]), timeout_s=1.0
        )
    request = servicer.request
    assert (request.k, request.stage, request.query_state.components) == (20, candidates_pb2.STAGE_FIRST, b"q")
    assert (request.filter.exclude_seen, list(request.filter.deny_categories)) == (True, ["x"])
    assert list(request.seen_item_ids) == ["c"]
    assert (list(pool.item_ids), list(pool.scores), pool.bound, pool.index_version) == (
        ["a", "b"],
        [0.5, 0.25],
        bound,
        "i1",
    )
    assert (list(pool.votes), pool.model_share) == ([0, 0.5], 0.75)
    assert pool.index_freshness == IndexFreshness(deltas_offset=7, lag_seconds=0.5)


async def test_rerank_sends_the_pool_with_only_the_seen_items_that_matter() -> None:
    async with peers() as (servicer, channel):
        servicer.response = reranker_pb2.RerankResponse(
            items=[common_pb2.ScoredItem(item_id="b", score=0.5, source="mol")],
            certificate=common_pb2.Certificate(kind=common_pb2.Certificate.KIND_BOUNDED, gap=0.125),
            index_version="i+6",
        )
        ranking = await RemoteReranker(over(channel)).rerank(
            query_state("q"),
            Pool(
                item_ids=["a", "b"],
                scores=[1, 0],
                bound=0.5,
                votes=[0, 0.5],
                model_share=0.75,
                index_version="i+7",
                index_freshness=IndexFreshness(deltas_offset=7),
            ),
            RerankQuery(
                k=1,
                filter=ItemFilter(),
                seen=["a", "z"],
                max_per_category=2,
                diversity=0.5,
                discounts={"b": 0.25, "z": 1.0},
                rules=[Rule(name="r", which=ItemFilter(allow_categories=("x",)), bury=0.5)],
            ),
            timeout_s=1.0,
        )
    request = servicer.request
    assert list(request.discounts) == [0, 0.25]
    assert list(request.rules) == [common_pb2.Rule(name="r", categories=["x"], bury=0.5)]
    assert (list(request.candidate_item_ids), list(request.seen_item_ids), request.bound) == (["a", "b"], ["a"], 0.5)
    assert (request.k, request.max_per_category, request.diversity) == (1, 2, 0.5)
    assert ranking.certificate == Certificate(0.125)
    assert ranking.items[0].item_id == "b"
    # The version that made the pool goes along; what comes back is the version that scored it.
    assert (request.index_version, request.deltas_offset, ranking.index_version) == ("i+7", 7, "i+6")
    assert (list(request.votes), request.model_share) == ([0, 0.5], 0.75)


async def test_explanations_and_served_versions_are_read_whole() -> None:
    async with peers() as (servicer, channel):
        reranker, candidates = RemoteReranker(over(channel)), RemoteCandidates(over(channel))
        pair = reranker_pb2.PairContribution(query_component=1, weight=0.5, cosine=0.5, contribution=0.25)
        servicer.response = reranker_pb2.ExplainScoreResponse(score=0.25, pairs=[pair], title="A", num_interactions=3)
        servicer.response.rules.append(1)
        rules = [Rule(name=name, which=ItemFilter(allow_item_ids=(name,)), boost=0.5) for name in ("b", "a")]
        similarity = await reranker.explain(query_state("q"), "a", max_pairs=4, rules=rules, timeout_s=1.0)
        assert (servicer.request.item_id, servicer.request.max_pairs) == ("a", 4)
        assert [list(rule.item_ids) for rule in servicer.request.rules] == [["b"], ["a"]]
        assert similarity.rules == (1,)
        assert (similarity.title, similarity.num_interactions, similarity.pairs[0].contribution) == ("A", 3, 0.25)
        servicer.response = candidates_pb2.ExplainVotesResponse(vote=0.5, num_neighbours=8, model_share=0.75)
        servicer.response.voters.add(type="click", count=2, oldest_age_seconds=9)
        votes = await candidates.explain_votes(query_state("q"), "a", seen=Seen(), timeout_s=1.0)
        assert (votes.vote, votes.model_share, votes.voters[0].oldest_age_seconds) == (0.5, 0.75, 9)
        servicer.response = candidates_pb2.GetIndexInfoResponse(index_version="i1")
        # An index that never says how fresh it is reflects no change.
        assert (await candidates.served(1.0)).freshness == IndexFreshness()
        servicer.response = reranker_pb2.GetRerankerInfoResponse(index_version="i2")
        servicer.response.index_freshness.newest_recorded_time.FromMilliseconds(5)
        served = await reranker.served(1.0)
        assert (served.index_version, served.freshness.newest_recorded_ms) == ("i2", 5)


async def test_of_several_refreshers_the_silent_one_is_told_apart() -> None:
    async with peers() as (servicer, channel), rpc_client.channel(f"127.0.0.1:{_free_port()}") as nowhere:
        servicer.response = refresher_pb2.GetStatusResponse(
            partitions=[refresher_pb2.RefreshedPartition(partition=2, folded_offset=4, end_offset=6)]
        )
        held = PartitionProgress(partition=2, applied_offset=4, end_offset=6)
        assert await RemoteRefreshers({"one": channel}).folded(1.0) == ([held], True)
        assert await RemoteRefreshers({"one": channel, "two": nowhere}).folded(1.0) == ([held], False)
    assert await RemoteRefreshers({}).folded(1.0) == ([], False)


async def test_an_absent_broker_says_no_ends_and_blocks_nobody() -> None:
    ends = KafkaStreamEnds(f"127.0.0.1:{_free_port()}")
    with pytest.raises((DependencyUnavailable, DeadlineExceeded), match="Kafka"):
        await ends.interactions(0.2)
    ends.close()


async def test_ends_do_not_wait_for_records_that_are_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    come = threading.Event()
    monkeypatch.setattr(TopicReader, "records_at", lambda _, offsets: come.wait(10) and {})
    monkeypatch.setattr(TopicReader, "end_offsets", lambda _: {0: 3})
    ends = KafkaStreamEnds(f"127.0.0.1:{_free_port()}")
    reading = asyncio.ensure_future(ends.records({0: 2}, 10.0))
    await asyncio.sleep(0)
    assert await ends.interactions(5.0) == {0: 3}
    assert not reading.done()
    come.set()
    assert await reading == {}
    ends.close()


class ScriptedHealth:
    """A channel on which the n-th health check does the n-th thing of a script, then the last one for good."""

    def __init__(self, *script: Exception | int) -> None:
        self._script = list(script)
        self.calls = 0
        self.script_is_over = asyncio.Event()

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        async def check(request: Any, timeout: float) -> Any:
            step = self._script[min(self.calls, len(self._script) - 1)]
            self.calls += 1
            if self.calls > len(self._script):
                self.script_is_over.set()
            if isinstance(step, Exception):
                raise step
            return health_pb2.HealthCheckResponse(status=step)

        return check

    unary_stream = unary_unary


async def test_a_probe_that_fails_unexpectedly_says_not_serving_and_the_next_one_is_made() -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    channel: Any = ScriptedHealth(serving, RuntimeError("nobody thought of this"), serving)
    broker = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = broker.sockets[0].getsockname()[1]
    status = ProbedStreamStatus(channel, lambda: [f"127.0.0.1:{port}"], interval_s=0.001)
    await status.probe()
    with capture_logs() as logs:
        await status.probe()
    assert (status.log_reachable, status.encoder_serving) == (True, False)
    assert [entry["probe"] for entry in logs if entry["event"] == "stream_probe_failed"] == ["encoder"]
    await status.start()
    async with asyncio.timeout(5):
        await channel.script_is_over.wait()
    assert status.encoder_serving
    await status.close()
    broker.close()
    await broker.wait_closed()


async def test_one_late_answer_of_the_encoder_says_nothing_two_running_do() -> None:
    late = grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata())
    gone = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
    there = health_pb2.HealthCheckResponse.SERVING
    channel: Any = ScriptedHealth(late, there, late, late, late, there, gone, late, there)
    status = ProbedStreamStatus(channel, list)
    said = []
    for _ in range(9):
        await status.probe()
        said.append(status.encoder_serving)
    assert said == [True, True, True, False, False, True, False, False, True]


async def test_a_broker_that_the_cluster_takes_for_dead_counts_until_another_stands_in_its_place() -> None:
    brokers = [await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) for _ in range(4)]
    *addresses, another = [f"127.0.0.1:{broker.sockets[0].getsockname()[1]}" for broker in brokers]
    channel: Any = ScriptedHealth(health_pb2.HealthCheckResponse.SERVING)
    named: list[str] = []
    status = ProbedStreamStatus(channel, lambda: list(named))

    async def is_there(*now: str) -> bool:
        named[:] = now
        await status.probe()
        return status.log_reachable

    assert not await is_there("no-such-broker:9092")
    assert await is_there(*addresses)
    brokers[2].close()
    assert await is_there(*addresses[:2])
    brokers[1].close()
    assert not await is_there(addresses[0])
    assert await is_there(*addresses[:2], another)
    for broker in brokers:
        broker.close()
        await broker.wait_closed()


async def test_a_broker_whose_name_cannot_be_looked_up_does_not_hide_the_next_one() -> None:
    broker = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = broker.sockets[0].getsockname()[1]
    channel: Any = ScriptedHealth(health_pb2.HealthCheckResponse.SERVING)
    # Not an OSError: the name does not survive its IDNA encoding.
    status = ProbedStreamStatus(channel, lambda: ["no..name:9092", f"127.0.0.1:{port}"])
    await status.probe()
    assert status.log_reachable
    broker.close()
    await broker.wait_closed()
