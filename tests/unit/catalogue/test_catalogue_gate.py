"""Processes that hold items answer nothing before their topics were read, and say so; each on a real server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, reranker_pb2, reranker_pb2_grpc
from prometheus_client import CollectorRegistry
from retrieval_scene import make_bundle

from services.candidates import bootstrap as candidates
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import CandidatesServicer
from services.catalogue.follower import NOT_READ, CatalogueGate
from services.platform.rpc.health_check import probe_grpc
from services.platform.rpc.server import HealthState, RpcServer, adding
from services.reranker import bootstrap as reranker
from services.reranker.config import RerankerSettings
from services.reranker.handlers import RerankerMetrics
from services.reranker.server import RerankerServicer


def serve_candidates(path: Path, check: Callable[[], None]) -> Callable[[Any], list[str]]:
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=path, algorithms="brute_force", audit_share=0)
    metrics = CandidatesMetrics(CollectorRegistry())
    live = candidates.make_live(settings, candidates.load_catalogue(settings), metrics)
    servicer = CandidatesServicer(live.search, check_ready=check)
    return adding(candidates_pb2_grpc.add_CandidatesServiceServicer_to_server, servicer, "candidates")


def serve_reranker(path: Path, check: Callable[[], None]) -> Callable[[Any], list[str]]:
    settings = RerankerSettings(port=0, metrics_port=0, bundle=path)
    rerank = reranker.Rerank(
        catalogue=reranker.load_catalogue(settings)[0], metrics=RerankerMetrics(CollectorRegistry())
    )
    servicer = RerankerServicer(rerank, check_ready=check)
    return adding(reranker_pb2_grpc.add_RerankerServiceServicer_to_server, servicer, "reranker")


CALLS = {
    "candidates": [
        (candidates_pb2_grpc.CandidatesServiceStub, "Search", candidates_pb2.SearchRequest()),
        (candidates_pb2_grpc.CandidatesServiceStub, "ExplainVotes", candidates_pb2.ExplainVotesRequest()),
    ],
    "reranker": [
        (reranker_pb2_grpc.RerankerServiceStub, "Rerank", reranker_pb2.RerankRequest()),
        (reranker_pb2_grpc.RerankerServiceStub, "ExplainScore", reranker_pb2.ExplainScoreRequest()),
    ],
}


@pytest.mark.parametrize(("process", "serve"), [("candidates", serve_candidates), ("reranker", serve_reranker)])
async def test_a_closed_gate_refuses_every_answer_and_health_says_why(
    process: str, serve: Callable[..., Any], tmp_path: Path
) -> None:
    make_bundle(tmp_path / "bundle")
    health = HealthState(ready=True)
    gate = CatalogueGate(process, health)
    server = RpcServer(
        process=process,
        settings=CandidatesSettings(port=0, metrics_port=0, drain_seconds=0),
        add_services=serve(tmp_path / "bundle", gate.check),
        health_state=health,
        registry=CollectorRegistry(),
    )
    await server.start()
    address = f"127.0.0.1:{server.port}"

    async def statuses() -> set[grpc.StatusCode]:
        found = set()
        async with grpc.aio.insecure_channel(address) as channel:
            for stub, method, request in CALLS[process]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await getattr(stub(channel), method)(request, timeout=5)
                found.add(caught.value.code())
        return found

    try:
        assert await asyncio.to_thread(probe_grpc, address) == f"{address} answers NOT_SERVING: {NOT_READ}"
        assert await statuses() == {grpc.StatusCode.UNAVAILABLE}
        gate.open()
        assert health.ready
        # Empty requests: they are looked at now.
        assert grpc.StatusCode.UNAVAILABLE not in await statuses()
    finally:
        await server.drain()
