"""The files that one answer passes through are those that CONTRIBUTING.md lists.

Gateway, candidates and reranker are the real ones, each behind a gRPC server of its own on loopback; Redis is the one
in memory of `tests/chaos`, Kafka is not asked. A file counts when a function of it is called between a request's first
byte and its answer; the first answers, which import and remember, are left out.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.called_files import Calls, listed, noted_calls
from fakes.gateway import (
    MemoryDeadLetters,
    MemoryEncoder,
    MemoryExposureLog,
    MemoryForgetLog,
    MemoryInteractionLog,
    MemoryItemLog,
    MemoryParts,
    MemoryRefreshers,
    MemorySessions,
    MemoryShownAnswers,
    MemoryStreamEnds,
    MemoryStreamStatus,
    MemoryTextSources,
)
from freshet.v1 import candidates_pb2_grpc, gateway_pb2, gateway_pb2_grpc, reranker_pb2_grpc
from prometheus_client import CollectorRegistry
from retrieval_scene import make_bundle, make_queries, state_fields

from services.candidates import bootstrap as candidates
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import CandidatesServicer
from services.contracts.stored_history import RecentId, StoredEvent
from services.contracts.wire import PackedQueryState
from services.gateway.adapters.processes import Remote, RemoteCandidates, RemoteReranker
from services.gateway.config import GatewaySettings
from services.gateway.dependencies import AcknowledgedLag
from services.gateway.domain import ServedModel
from services.gateway.edge.door import admissions
from services.gateway.handlers import Handlers
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Ports
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.pages import PageTokens
from services.gateway.recommend.popular import PopularItems
from services.gateway.server import GatewayServicer
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import RpcServer
from services.platform.stream.kafka import partition_for
from services.platform.stream.topic import NUM_PARTITIONS
from services.reranker.handlers import Rerank, RerankerMetrics
from services.reranker.server import RerankerServicer
from services.user_state import layout
from services.user_state.reader import StateReader
from services.user_state.values import StoredState, UserUpdate
from services.user_state.writer import StateWriter
from tests.chaos.memory_redis import AsyncClient, Client, MemoryServer
from tests.unit.gateway.gateway_scene import memory_operations, only_set

MOST_OF_LIBRARY = 28


async def recommend(calls: Calls, request: gateway_pb2.RecommendRequest, folder: Path) -> gateway_pb2.RecommendResponse:
    bundle = make_bundle(folder)
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=folder, audit_share=0, drain_seconds=0)
    live = candidates.make_live(settings, candidates.load_catalogue(settings), CandidatesMetrics(CollectorRegistry()))
    rerank = Rerank(catalogue=live.catalogue, metrics=RerankerMetrics(CollectorRegistry()))
    servers, peers = [], []

    async def serve(add: Any, servicer: Any, **more: Any) -> str:
        def added(server: Any) -> list[str]:
            add(servicer, server)
            return []

        server = RpcServer(process="p", settings=settings, add_services=added, registry=CollectorRegistry(), **more)
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{server.port}"

    async def peer(add: Any, servicer: Any) -> Remote:
        peers.append(Remote(rpc_client.channel(await serve(add, servicer), shares=False)))
        return peers[-1]

    first = await peer(candidates_pb2_grpc.add_CandidatesServiceServicer_to_server, CandidatesServicer(live.search))
    second = await peer(reranker_pb2_grpc.add_RerankerServiceServicer_to_server, RerankerServicer(rerank))
    redis = MemoryServer()
    state = state_fields(make_queries(np.random.default_rng(1), 1, 4, 2, 8), bundle.model_version)
    write_state(redis, PackedQueryState(**state))
    reader = StateReader("redis://localhost")
    reader._redis = AsyncClient(redis)  # type: ignore[assignment]
    ports = Ports(
        states=reader,
        sessions=MemorySessions(),
        encoder=MemoryEncoder(),
        candidates=RemoteCandidates(first),
        reranker=RemoteReranker(second),
        sources=MemoryTextSources(),
        refreshers=MemoryRefreshers(),
        ends=MemoryStreamEnds(),
        interactions=MemoryInteractionLog(),
        items=MemoryItemLog(),
        forgets=MemoryForgetLog(),
        stream=MemoryStreamStatus(),
        parts=MemoryParts(),
        letters=MemoryDeadLetters(),
        shown=MemoryShownAnswers(),
    )
    own = GatewaySettings(port=0, metrics_port=0)
    popular = PopularItems(bundle.item_index, bundle.counts, bundle.categories, bundle.attributes, bundle.by_popularity)
    popular.caught_up()
    handlers = Handlers(
        ports,
        model=ServedModel(
            version=bundle.model_version, schema=bundle.event_schema, tau=bundle.tau, warnings=popular.warnings
        ),
        limits=own.limits,
        preferences=own.preferences,
        lag=AcknowledgedLag(),
        items=popular,
        metrics=GatewayMetrics(CollectorRegistry()),
        exposures=Exposures(b"key", MemoryExposureLog()),
        pages=PageTokens(b"key"),
    )
    routes = only_set(handlers, bundle.model_version)
    address = await serve(
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
        GatewayServicer(routes, memory_operations(routes)),
        admissions=admissions(),
    )
    async with rpc_client.channel(address) as channel:
        ask = gateway_pb2_grpc.GatewayServiceStub(channel).Recommend
        for _ in range(3):
            await ask(request)
        deadline = time.monotonic() + 30
        while True:
            layout.home_of.cache_clear()  # as for a user who did not ask lately
            calls.found.clear()
            with calls.watch():
                answer = await ask(request)
            # On a busy machine a read of the state exceeds its time limit, and the answer is a fallback.
            if not answer.degradations or time.monotonic() > deadline:
                break
    for one in peers:
        await one.close()
    for server in servers:
        await server.drain()
    await live.search.close()
    await rerank.close()
    return answer


def write_state(redis: MemoryServer, state: PackedQueryState) -> None:
    """User "ann", who has had one item, and whose state reflects it."""
    writer = StateWriter("redis://localhost")
    writer._redis = Client(redis)  # type: ignore[assignment]
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    home = partition_for(b"ann", NUM_PARTITIONS)
    stored = StoredState(query_state=state, partition=home, offset=7, event_time_ms=1_002, applied_ms=9_000)
    update = UserUpdate(
        user_id="ann",
        model_version=state.model_version,
        expected=writer.load_users(["ann"], epoch)["ann"].expected,
        positions={home: 7},
        events=[StoredEvent(1_002, home, 7, 0, "item-1")],
        recent=[RecentId(7, home, 7, 0)],
        seen_times={"item-1": 1_002},
        state=stored,
        state_change="set",
    )
    writer.apply([update], epoch, {})


@pytest.fixture
def calls() -> Iterator[Calls]:
    with noted_calls() as found:
        yield found


@pytest.mark.parametrize(
    ("request_", "columns"),
    [
        pytest.param(gateway_pb2.RecommendRequest(user_id="ann", k=10), (2, 3), id="the k best"),
        pytest.param(gateway_pb2.RecommendRequest(user_id="ann", k=10, diversity=0.3), (2, 4), id="reranked"),
    ],
)
async def test_one_answer_passes_through_the_files_that_are_listed(
    calls: Calls, request_: gateway_pb2.RecommendRequest, columns: tuple[int, ...], tmp_path: Path
) -> None:
    answer = await recommend(calls, request_, tmp_path / "bundle")
    assert len(answer.items) == 10
    assert not answer.degradations
    library = {path for path in calls.found if path.startswith("algorithms/")}
    assert calls.found.keys() - library == set().union(*(listed("one answer", column) for column in columns))
    # Which of them a search takes depends on what it costs.
    assert len(library) <= MOST_OF_LIBRARY
