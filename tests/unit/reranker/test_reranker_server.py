"""The reranker over real gRPC on loopback, from a real bundle on disk."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from freshet.v1 import common_pb2, reranker_pb2, reranker_pb2_grpc
from prometheus_client import CollectorRegistry
from retrieval_scene import half, make_bundle, make_queries, state_fields
from serving_scene import served

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.reranker.bootstrap import load_catalogue
from services.reranker.config import RerankerSettings
from services.reranker.handlers import Rerank, RerankerMetrics
from services.reranker.server import RerankerServicer

KINDS = common_pb2.Certificate


class Running:
    """A served bundle, its stub, and the exact scores of one query."""

    def __init__(self, bundle: Bundle, stub: Any, registry: CollectorRegistry) -> None:
        self.bundle, self.stub, self.registry = bundle, stub, registry
        self.queries = half(make_queries(np.random.default_rng(5), 6, 4, 2, 8))
        self.exact = mol_scores_reference(self.queries, bundle.item_states, bundle.pair_gate).numpy()

    def request(self, query: int = 0, **fields: Any) -> Any:
        state = common_pb2.QueryState(**state_fields(self.queries, self.bundle.model_version, query))
        pool = [f"item-{row}" for row in range(0, 60, 2)]
        return reranker_pb2.RerankRequest(**{"query_state": state, "candidate_item_ids": pool, "k": 5, **fields})

    def best(self, query: int = 0, *, k: int, rows: list[int] | None = None) -> list[str]:
        rows = list(range(0, 60, 2)) if rows is None else rows
        order = sorted(rows, key=lambda row: (-self.exact[query][row], f"item-{row}"))
        return [f"item-{row}" for row in order[:k]]


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    bundle = make_bundle(tmp_path / "bundle")
    settings = RerankerSettings(port=0, metrics_port=0, bundle=bundle.path)
    registry = CollectorRegistry()
    rerank = Rerank(catalogue=load_catalogue(settings)[0], metrics=RerankerMetrics(registry))
    add = reranker_pb2_grpc.add_RerankerServiceServicer_to_server
    async with served("reranker", settings, add, RerankerServicer(rerank), registry) as channel:
        yield Running(bundle, reranker_pb2_grpc.RerankerServiceStub(channel), registry)
    await rerank.close()


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def ids(answer: Any) -> list[str]:
    return [item.item_id for item in answer.items]


async def test_the_pool_comes_back_in_order_of_the_full_score(running: Running) -> None:
    answer = await running.stub.Rerank(running.request())
    assert ids(answer) == running.best(k=5)
    assert [item.score for item in answer.items] == pytest.approx(sorted(running.exact[0][::2], reverse=True)[:5])
    assert {item.source for item in answer.items} == {"mol"}
    assert answer.model_version == running.bundle.model_version
    assert answer.dropped_items == 0


async def test_the_bound_becomes_the_certificate(running: Running) -> None:
    kth = sorted(running.exact[0][::2], reverse=True)[4]
    for bound, kind, gap in (
        (None, KINDS.KIND_ESTIMATE, 0),
        (kth - 0.01, KINDS.KIND_EXACT, 0),
        (-np.inf, KINDS.KIND_EXACT, 0),
        (kth + 0.25, KINDS.KIND_BOUNDED, 0.25),
    ):
        answer = await running.stub.Rerank(running.request(bound=bound))
        assert answer.certificate.kind == kind
        assert answer.certificate.HasField("gap") is (kind != KINDS.KIND_ESTIMATE)
        assert answer.certificate.gap == pytest.approx(gap, abs=1e-9)


async def test_a_pool_smaller_than_k_is_exact_only_when_nothing_was_left_out(running: Running) -> None:
    few = {"candidate_item_ids": ["item-1", "item-2"]}
    complete = await running.stub.Rerank(running.request(**few, bound=-np.inf))
    assert ids(complete) == running.best(k=5, rows=[1, 2])
    assert complete.certificate.kind == KINDS.KIND_EXACT
    partial = await running.stub.Rerank(running.request(**few, bound=0.1))
    assert partial.certificate.kind == KINDS.KIND_ESTIMATE


async def test_unknown_and_repeated_items_are_dropped_and_counted(running: Running) -> None:
    pool = ["item-4", "nowhere", "item-8", "item-4", ""]
    answer = await running.stub.Rerank(running.request(candidate_item_ids=pool))
    assert ids(answer) == running.best(k=5, rows=[4, 8])
    assert answer.dropped_items == 3


async def test_the_filter_is_verified_again(running: Running) -> None:
    seen = running.best(k=2)
    rules = common_pb2.Filter(exclude_seen=True, deny_categories=["Drama"], deny_item_ids=["item-0"])
    answer = await running.stub.Rerank(running.request(filter=rules, seen_item_ids=seen, k=30))
    rows = [row for row in range(4, 60, 4) if f"item-{row}" not in seen]
    assert ids(answer) == running.best(k=30, rows=rows)
    assert answer.dropped_items == 30 - len(rows)


async def test_category_limits_hold(running: Running) -> None:
    answer = await running.stub.Rerank(running.request(max_per_category=2, k=10))
    by_category: dict[int, list[int]] = {}
    for item_id in running.best(k=60):
        by_category.setdefault(int(item_id[5:]) % 4, []).append(int(item_id[5:]))
    rows = [row for members in by_category.values() for row in members[:2]]
    assert ids(answer) == running.best(k=10, rows=rows)


async def test_diversity_changes_the_choice_but_not_the_certificate(running: Running) -> None:
    plain = await running.stub.Rerank(running.request(bound=-1.0))
    diverse = await running.stub.Rerank(running.request(bound=-1.0, diversity=0.9))
    assert ids(plain)[0] == ids(diverse)[0]
    assert set(ids(plain)) != set(ids(diverse))
    assert diverse.certificate == plain.certificate


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 0}, "k=0 allowed: 1-1000"),
        ({"k": 10**6}, "k=1000000 allowed: 1-1000"),
        ({"candidate_item_ids": ["x"] * 10_001}, "len(candidate_item_ids)=10001 allowed: 0-10000"),
        ({"bound": float("nan")}, "bound=nan allowed"),
        ({"bound": float("inf")}, "bound=inf allowed"),
        ({"diversity": float("nan")}, "diversity=nan allowed: 0-1"),
        ({"diversity": -0.1}, "diversity=-0.1 allowed: 0-1"),
        ({"seen_item_ids": ["x"] * 20_001}, "len(seen_item_ids)=20001 allowed: 0-20000"),
        ({"query_state": common_pb2.QueryState()}, "num_components=0 allowed"),
    ],
)
async def test_a_bad_request_is_refused_by_name(running: Running, fields: dict, message: str) -> None:
    code, details = await refused(running.stub.Rerank(running.request(**fields)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


async def test_a_state_of_another_model_fails_the_precondition_naming_both(running: Running) -> None:
    state = common_pb2.QueryState(**state_fields(running.queries, "0123456789abcdef"))
    code, details = await refused(running.stub.Rerank(running.request(query_state=state)))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "0123456789abcdef" in details
    assert running.bundle.model_version in details


def test_a_model_beyond_the_memory_limit_is_refused_naming_both_values(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", count=12000)
    settings = RerankerSettings(port=0, metrics_port=0, bundle=bundle.path, max_memory_mb=1)
    with pytest.raises(MemoryError, match=r"12000 items needs .* allowed: 1.0 MiB \(FRESHET_RERANKER_MAX"):
        load_catalogue(settings)


def test_without_a_limit_a_model_larger_than_the_free_memory_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(tmp_path / "bundle", count=12000)
    monkeypatch.setattr("services.platform.machine.available_bytes", lambda: 1 << 20)
    catalogue, _ = load_catalogue(RerankerSettings(port=0, metrics_port=0, bundle=bundle.path))
    assert catalogue.base.num_items == 12000
