"""The gateway behind a real grpc.aio server: fields cross the wire, errors become statuses, hints become metadata."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from freshet.v1 import common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc
from gateway_scene import Scene
from prometheus_client import CollectorRegistry

from services.gateway.bootstrap import MAX_REQUEST_BYTES
from services.gateway.config import GatewaySettings
from services.gateway.domain import HistoryEvent, IndexFreshness
from services.gateway.edge.door import admissions
from services.gateway.server import SERVICE
from services.platform.errors import DependencyUnavailable, Overloaded
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import RpcServer

SERVICE_CONFIG = Path(__file__).parents[3] / "protos" / "freshet" / "v1" / "service_config.json"


@asynccontextmanager
async def gateway(scene: Scene, idle_s: float = 60.0, config: str = "") -> AsyncIterator[Any]:
    def add(server: grpc.aio.Server) -> list[str]:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(scene.servicer, server)
        return [SERVICE]

    settings = GatewaySettings(port=0, metrics_port=0, drain_seconds=0)
    server = RpcServer(
        process="gateway_test",
        settings=settings,
        add_services=add,
        registry=CollectorRegistry(),
        admissions=admissions(),
        max_request_bytes=MAX_REQUEST_BYTES,
        idle_s=idle_s,
    )
    await server.start()
    target = f"127.0.0.1:{server.port}"
    options = [("grpc.service_config", config)]
    async with grpc.aio.insecure_channel(target, options) if config else rpc_client.channel(target) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)
    await server.drain()


async def test_an_answer_names_its_provenance() -> None:
    async with gateway(Scene()) as stub:
        request = gateway_pb2.RecommendRequest(user_id="ann", k=2, context={"device": "tv"})
        answer = await stub.Recommend(request, timeout=5, metadata=(("x-request-id", "r-1"),))
    assert [(item.item_id, item.source) for item in answer.items] == [("f", "mol"), ("e", "mol")]
    assert (answer.model_version, answer.index_version, answer.state_source) == ("m1", "index-1", "stored")
    assert answer.state_age_seconds == pytest.approx(time.time() - 3.5, abs=60)
    assert (answer.state_position.partition, answer.state_position.offset) == (3, 7)
    assert answer.certificate.kind == common_pb2.Certificate.KIND_EXACT
    assert (answer.token_honoured, list(answer.degradations), answer.request_id) == (True, [], "r-1")
    assert answer.stage_times.total_ms > 0


async def test_a_gap_that_was_asked_and_what_it_took_are_in_the_certificate() -> None:
    async with gateway(Scene()) as stub:
        answer = await stub.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2, max_gap=0.05), timeout=5)
        assert (answer.certificate.gap, answer.certificate.asked_gap) == (0.0, 0.05)
        assert answer.certificate.HasField("gap")
        answer = await stub.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2), timeout=5)
        assert not answer.certificate.HasField("asked_gap")


async def test_every_method_has_its_limit() -> None:
    methods = {method.name for method in gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].methods}
    assert admissions().keys() == methods


def test_a_gateway_has_eight_tails_at_a_time_four_of_one_key() -> None:
    tails, admitted = admissions()["TailInteractions"], Counter[str]()
    for caller in "aaaaabbbbc":
        with contextlib.suppress(Overloaded):
            tails.enter(caller)
            admitted[caller] += 1
    assert admitted == {"a": 4, "b": 4}


async def test_silent_streams_take_no_place_of_others() -> None:
    event = gateway_pb2.StreamInteractionsRequest(interaction=events_pb2.Interaction(user_id="ann", item_id="c"))
    async with gateway(Scene()) as stub:
        silent = [stub.StreamInteractions() for _ in range(600)]
        for stream in silent:
            # It was refused already, or is while it is written: then the client may call it its own error.
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.AioRpcError):
                await stream.write(event)
        for _ in range(50):
            answer = await stub.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2), timeout=5)
            # Nothing applies the written events: after two seconds, on a slow machine, answers are not fresh.
            assert set(answer.degradations) <= {gateway_pb2.DEGRADATION_NOT_FRESH}
        async with asyncio.timeout(20):
            while len(refused := [stream for stream in silent if stream.done()]) < len(silent) - 64:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        codes = Counter([await stream.code() for stream in refused])
        assert codes.keys() <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL}
        assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED] > 500
        held = [stream for stream in silent if not stream.done()]
        for stream in held:
            await stream.done_writing()
        assert [len((await stream).receipts) for stream in held] == [1] * 64


async def test_a_stream_that_falls_silent_ends_and_says_what_is_written(scene: Scene) -> None:
    event = gateway_pb2.StreamInteractionsRequest(interaction=events_pb2.Interaction(user_id="ann", item_id="c"))
    async with gateway(scene, idle_s=0.2) as stub:
        stream = stub.StreamInteractions()
        for _ in range(3):
            await stream.write(event)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details() == "no message for 0.2 s; 3 earlier messages were written"
    assert len(scene.interactions.written) == 3


async def test_with_the_service_config_a_write_is_repeated_when_the_gateway_says_so(scene: Scene) -> None:
    scene.interactions.refuse_after, scene.interactions.refusal = 0, DependencyUnavailable("no broker")
    event = events_pb2.Interaction(user_id="ann", item_id="c", event_id="e-1")
    request = gateway_pb2.RecordInteractionsRequest(interactions=[event])
    async with gateway(scene, config=SERVICE_CONFIG.read_text()) as stub:
        began = time.monotonic()
        call = asyncio.ensure_future(stub.RecordInteractions(request))
        await asyncio.sleep(0.2)
        assert not call.done()
        scene.interactions.refusal = None
        assert [receipt.event_id for receipt in (await call).receipts] == ["e-1"]
        assert time.monotonic() - began >= 0.5
    assert len(scene.interactions.written) == 1


async def test_a_request_that_is_too_large_is_refused_unread() -> None:
    request = gateway_pb2.RecommendRequest(user_id="ann", k=2, query="x" * MAX_REQUEST_BYTES)
    async with gateway(Scene()) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
            await stub.Recommend(request, timeout=5)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_search_crosses_the_wire_with_what_found_each_result(scene: Scene) -> None:
    request = gateway_pb2.GatewayServiceSearchRequest(query="space 🚀", user_id="ann", k=2)
    request.filter.deny_item_ids.append("d")
    async with gateway(scene) as stub:
        answer = await stub.Search(request, timeout=5, metadata=(("x-request-id", "r-2"),))
    asked = scene.sources.asked[-1]
    assert (asked[1], asked[3].exclude_seen, asked[3].deny_item_ids) == ("space 🚀", False, ("d",))
    assert len(answer.results) == 2
    best = next(result for result in answer.results if result.item_id == "c")
    assert (best.title, best.identifier) == ("C", "Space Movies")
    assert {(found.source, found.rank) for found in best.found_by} >= {("text_mol", 1), ("phrases", 1), ("lexical", 2)}
    assert "mol" in {found.source for found in best.found_by}
    assert (answer.text_version, answer.model_version, answer.request_id) == ("text-1", "m1", "r-2")
    assert (list(answer.degradations), len(answer.sources)) == ([], 4)
    assert answer.total_ms > 0


async def test_filters_history_and_tokens_cross_the_wire(scene: Scene) -> None:
    request = gateway_pb2.RecommendRequest(user_id="ann", k=6)
    request.filter.exclude_seen = False
    request.filter.deny_item_ids.append("f")
    request.freshness_token.epoch = "older"
    event = request.history.add(item_id="c", value=5.0, type="rating")
    event.event_time.FromMilliseconds(1234)
    async with gateway(scene) as stub:
        answer = await stub.Recommend(request, timeout=5)
    assert {item.item_id for item in answer.items} == {"a", "b", "c", "d", "e"}
    assert not answer.token_honoured
    assert scene.encoder.histories[0][1][0].event_time_ms == 1234


async def test_what_a_history_in_a_request_was_only_shown_is_not_seen(scene: Scene) -> None:
    request = gateway_pb2.RecommendRequest(user_id="ann", k=6)
    for item_id, kind in (("c", "impression"), ("d", "dislike"), ("e", "")):
        request.history.add(item_id=item_id, type=kind)
    async with gateway(scene) as stub:
        answer = await stub.Recommend(request, timeout=5)
    assert {item.item_id for item in answer.items} == {"b", "c", "f"}
    assert [event.type for event in scene.encoder.histories[0][1]] == ["impression", "dislike", ""]


async def test_similar_items_cross_the_wire() -> None:
    async with gateway(Scene()) as stub:
        answer = await stub.Similar(gateway_pb2.GatewayServiceSimilarRequest(item_id="c", k=2), timeout=5)
    assert [(one.item_id, one.title) for one in answer.items] == [("a", "A"), ("b", "B")]
    assert answer.items[0].similarity > answer.items[1].similarity
    assert (answer.model_version, answer.index_version, answer.certificate.kind) == ("m1", "index-1", 1)
    assert answer.index_freshness.deltas_offset == 41


async def test_a_timestamp_beyond_its_range_is_invalid_argument() -> None:
    request = gateway_pb2.RecommendRequest(user_id="ann", k=1)
    request.history.add(item_id="c").event_time.nanos = -5
    async with gateway(Scene()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Recommend(request, timeout=5)
        assert caught.value.details() == "history[0].event_time.nanos=-5 allowed: 0-999999999"
        interactions = [events_pb2.Interaction(user_id="ann", item_id="a")]
        interactions[0].event_time.seconds = 10**11
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.RecordInteractions(gateway_pb2.RecordInteractionsRequest(interactions=interactions), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("interactions[0].event_time=")


async def test_recorded_interactions_return_tokens_that_recommend_accepts(scene: Scene) -> None:
    async with gateway(scene) as stub:
        interactions = [events_pb2.Interaction(user_id="ann", item_id="a", event_id="e1", type="rating", value=5)]
        answer = await stub.RecordInteractions(
            gateway_pb2.RecordInteractionsRequest(interactions=interactions), timeout=5
        )
        (receipt,) = answer.receipts
        scene.states.watermarks[3] = receipt.token.offset
        request = gateway_pb2.RecommendRequest(user_id="ann", k=1, freshness_token=receipt.token)
        assert (await stub.Recommend(request, timeout=5)).token_honoured
        undo = gateway_pb2.UndoInteractionRequest(user_id="ann", event_id="e1")
        assert (await stub.UndoInteraction(undo, timeout=5)).receipt.token.offset == 1
    assert receipt.event_id == "e1"
    # The gateway's clock where the client gave no time.
    assert scene.interactions.written[0].event_time_ms > 1_600_000_000_000


async def test_bytes_in_a_stream_that_are_no_message_are_invalid_argument(scene: Scene) -> None:
    event = gateway_pb2.StreamInteractionsRequest(interaction=events_pb2.Interaction(user_id="ann", item_id="a"))
    torn = Mock(SerializeToString=lambda: b"\xff\xff")
    async with gateway(scene) as stub:
        stub.StreamInteractions._request_serializer = lambda message: message.SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StreamInteractions(iter([event, torn]), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the request is not a message of this method; 1 earlier messages were written"
    assert len(scene.interactions.written) == 1


async def test_index_freshness_and_votes_reach_answer_and_reranker(scene: Scene) -> None:
    scene.candidates.model_share = 0.75
    scene.candidates.freshness = IndexFreshness(deltas_offset=41, newest_recorded_ms=1_500, lag_seconds=0.25)
    async with gateway(scene) as stub:
        answer = await stub.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2, diversity=0.1), timeout=5)
        fallback = await stub.Recommend(gateway_pb2.RecommendRequest(user_id="new", k=2), timeout=5)
    freshness = answer.index_freshness
    assert (freshness.deltas_offset, freshness.lag_seconds) == (41, 0.25)
    assert freshness.newest_recorded_time.ToMilliseconds() == 1_500
    (pool,) = scene.reranker.pools
    assert (list(pool.votes), pool.model_share) == ([0.0, 0.0, 0.0, 0.0, 0.5], 0.75)
    assert not fallback.HasField("index_freshness")


async def test_an_explanation_crosses_the_wire(scene: Scene) -> None:
    scene.candidates.model_share = 0.5
    scene.states.histories["ann"] = [HistoryEvent("c", 1_000)]
    async with gateway(scene) as stub:
        answer = await stub.Explain(gateway_pb2.ExplainRequest(user_id="ann", item_id="b", max_pairs=1), timeout=5)
        unknown = await stub.Explain(gateway_pb2.ExplainRequest(user_id="new", item_id="b"), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Explain(gateway_pb2.ExplainRequest(user_id="ann", item_id="zzz"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (answer.score, answer.state_source) == (pytest.approx(0.65), "stored")
    assert answer.share_of_model + answer.share_of_refreshed + answer.share_of_votes == pytest.approx(1)
    similarity = answer.similarity
    assert (similarity.title, similarity.from_model, similarity.num_interactions) == ("B", 0.6, 12)
    assert [(pair.weight, pair.cosine, pair.from_model) for pair in similarity.pairs] == [(0.5, 0.8, 0.3)]
    assert [(v.type, v.count, v.oldest_age_seconds) for v in answer.votes.voters] == [("rating", 2, 60)]
    assert [(past.item_id, past.title) for past in answer.history] == [("c", "C")]
    assert (unknown.state_source, unknown.HasField("similarity")) == ("none", False)


async def test_a_freshness_report_crosses_the_wire(scene: Scene) -> None:
    scene.reranker.failure = DependencyUnavailable("away")
    async with gateway(scene) as stub:
        report = await stub.GetFreshness(gateway_pb2.GetFreshnessRequest(), timeout=5)
    assert (report.model_version, report.index_version, report.epoch) == ("m1", "index-1", "epoch-1")
    applied = report.interactions[3]
    assert (applied.partition, applied.applied_offset, applied.end_offset) == (3, 7, 9)
    assert [progress.end_offset for progress in report.attributions] == [5]
    assert (report.candidates.lag_seconds, report.HasField("reranker")) == (0.25, False)
    assert list(report.degradations) == [gateway_pb2.DEGRADATION_FIRST_STAGE_ORDER]
