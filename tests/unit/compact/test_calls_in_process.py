"""Candidates and the reranker in the gateway's process answer, and fail, as they do over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from freshet.v1 import candidates_pb2_grpc, reranker_pb2_grpc
from prometheus_client import CollectorRegistry
from retrieval_scene import make_bundle, make_queries, state_fields

from services.algorithms.items.live_catalogue import MAX_VERSIONS
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.candidates import bootstrap as candidates
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import CandidatesServicer
from services.catalogue.follower import CatalogueGate
from services.compact.bootstrap import InProcess
from services.contracts.wire import PackedQueryState
from services.gateway.adapters.processes import Remote, RemoteCandidates, RemoteReranker
from services.gateway.domain import Pool, RerankQuery, Seen
from services.platform import request_context
from services.platform.errors import DeadlineExceeded, FreshetError
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import HealthState, RpcServer
from services.reranker import bootstrap as reranker
from services.reranker.handlers import RerankerMetrics
from services.reranker.server import RerankerServicer

RULE = Rule(name="promo", which=ItemFilter(allow_item_ids=("item-1", "item-2", "0", "1")), boost=0.1)


@dataclass
class Scene:
    """The same servicers behind both ways."""

    gate: CatalogueGate
    state: PackedQueryState
    candidates: list[RemoteCandidates]
    reranker: list[RemoteReranker]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    bundle = make_bundle(tmp_path / "bundle")
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=tmp_path / "bundle", audit_share=0, drain_seconds=0)
    live = candidates.make_live(
        settings,
        candidates.load_catalogue(settings),
        CandidatesMetrics(CollectorRegistry()),
        max_versions=MAX_VERSIONS,
    )
    rerank = reranker.Rerank(catalogue=live.catalogue, metrics=RerankerMetrics(CollectorRegistry()))
    gate = CatalogueGate("candidates", HealthState())
    gate.open()
    first = CandidatesServicer(live.search, check_ready=gate.check)
    second = RerankerServicer(rerank, check_ready=first.check_ready)

    def add(server: Any) -> list[str]:
        candidates_pb2_grpc.add_CandidatesServiceServicer_to_server(first, server)
        reranker_pb2_grpc.add_RerankerServiceServicer_to_server(second, server)
        return []

    server = RpcServer(process="both", settings=settings, add_services=add, registry=CollectorRegistry())
    await server.start()
    replicas = Remote(rpc_client.channel(f"127.0.0.1:{server.port}", shares=False))
    yield Scene(
        gate=gate,
        state=PackedQueryState(
            **state_fields(make_queries(np.random.default_rng(1), 1, 4, 2, 8), bundle.model_version)
        ),
        candidates=[RemoteCandidates(peer) for peer in (InProcess(first), replicas)],
        reranker=[RemoteReranker(peer) for peer in (InProcess(second), replicas)],
    )
    await replicas.close()
    await server.drain()
    await live.search.close()
    await rerank.close()


def without_costs(answer: Any) -> Any:
    """Without the times, and the items that a search read: `exact` tries its strategies in turn."""
    costs = {name: 0 for name in ("queue_ms", "stage_ms", "items_touched") if hasattr(answer, name)}
    lists = {name: list(getattr(answer, name)) for name in ("item_ids", "scores", "votes") if hasattr(answer, name)}
    return replace(answer, **costs, **lists)


async def pool(scene: Scene, *, k: int = 20) -> list[Pool]:
    asked = {
        "k": k,
        "filter": ItemFilter(deny_item_ids=("item-3",)),
        "seen": Seen(["item-1"]),
        "timeout_s": 5.0,
    }
    return [without_costs(await peer.propose(scene.state, **asked)) for peer in scene.candidates]


async def test_answers_are_those_over_grpc(scene: Scene) -> None:
    filter = ItemFilter(exclude_seen=True, allow_categories=("c1", "c2"))
    asked: dict[str, Any] = {"k": 5, "filter": filter, "seen": Seen(["item-1", "item-2"], ["item-2"]), "timeout_s": 5.0}
    here, there = [without_costs(await peer.search(scene.state, **asked)) for peer in scene.candidates]
    assert here == there
    here, there = await pool(scene)
    assert here == there
    assert here.item_ids
    wanted = RerankQuery(
        k=5,
        filter=ItemFilter(),
        seen=["item-1", "item-2"],
        max_per_category=2,
        diversity=0.3,
        discounts={here.item_ids[0]: 0.1},
        rules=[RULE],
    )
    ranked = [without_costs(await peer.rerank(scene.state, here, wanted, 5.0)) for peer in scene.reranker]
    assert ranked[0] == ranked[1]
    assert ranked[0].items
    item_id = ranked[0].items[0].item_id
    explained = [
        await peer.explain(scene.state, item_id, max_pairs=3, rules=(), timeout_s=5) for peer in scene.reranker
    ]
    assert repr(explained[0]) == repr(explained[1])
    served = [await peer.served(5) for peer in (*scene.candidates, *scene.reranker)]
    assert len({repr(one) for one in served}) == 1


@pytest.mark.parametrize("wrong", ["another model", "k", "item", "closed", "late"])
async def test_errors_are_those_over_grpc(scene: Scene, wrong: str) -> None:
    state = replace(scene.state, model_version="older") if wrong == "another model" else scene.state
    if wrong == "closed":
        scene.gate._is_open = False
    timeout_s = 0.0 if wrong == "late" else 5.0
    errors = []
    for first, second in zip(scene.candidates, scene.reranker, strict=True):
        if wrong == "item":
            call = second.explain(state, "nobody's", max_pairs=3, rules=(), timeout_s=timeout_s)
        else:
            k = 0 if wrong == "k" else 5
            call = first.search(state, k=k, filter=ItemFilter(), seen=Seen(), timeout_s=timeout_s)
        with pytest.raises(FreshetError) as caught:
            await call
        errors.append((type(caught.value), caught.value.message, caught.value.retriable))
    assert errors[0] == errors[1]


class _Slow:
    async def Search(self, request: Any, context: Any) -> None:
        await asyncio.sleep(5)

    async def Rerank(self, request: Any, context: Any) -> None:
        raise RuntimeError("a bug, with somebody's words")


async def test_a_call_ends_at_its_deadline_and_a_bug_tells_nobody_what_it_was() -> None:
    peer = InProcess(_Slow())
    with pytest.raises(DeadlineExceeded, match="candidates"):
        await peer.call(None, "Search", None, timeout_s=0.02, peer="candidates")
    token = request_context.deadline.set(0.0)
    with pytest.raises(DeadlineExceeded, match="no time left"):
        await peer.call(None, "Search", None, timeout_s=5, peer="candidates")
    request_context.deadline.reset(token)
    with pytest.raises(FreshetError, match="internal error") as caught:
        await peer.call(None, "Rerank", None, timeout_s=5, peer="reranker")
    assert "words" not in caught.value.message
