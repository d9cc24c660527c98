"""The reranker while its catalogue changes: the pool's own version, votes, withdrawals, and scores explained."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from freshet.v1 import common_pb2, reranker_pb2, reranker_pb2_grpc
from prometheus_client import CollectorRegistry
from retrieval_scene import half, make_bundle, make_queries, state_fields, unit
from serving_scene import served
from structlog.testing import capture_logs

from services.algorithms.items.live_catalogue import MAX_VERSIONS
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates
from services.catalogue.changes import CatalogueChanges
from services.contracts.topics.index_deltas import Batch, IndexDelta, ItemDelta
from services.contracts.topics.items import CatalogueItem
from services.reranker.bootstrap import load_catalogue
from services.reranker.config import RerankerSettings
from services.reranker.handlers import Rerank, RerankerMetrics
from services.reranker.server import RerankerServicer

KINDS = common_pb2.Certificate
SHARE = 0.25


class Running:
    """A served bundle, its stub, and what its follower's thread would call."""

    def __init__(self, path: Path, catalogue: Any, changes: CatalogueChanges, stub: Any) -> None:
        self.bundle, self.catalogue, self.changes, self.stub = make_bundle(path), catalogue, changes, stub
        self.queries = half(make_queries(np.random.default_rng(5), 2, 4, 2, 8))
        self.exact = mol_scores_reference(self.queries, self.bundle.item_states, self.bundle.pair_gate).numpy()[0]

    def request(self, **fields: Any) -> Any:
        pool = [f"item-{row}" for row in range(0, 60, 2)]
        return reranker_pb2.RerankRequest(
            **{"query_state": self.state(), "candidate_item_ids": pool, "k": 5, "bound": -np.inf, **fields}
        )

    def state(self) -> common_pb2.QueryState:
        return common_pb2.QueryState(**state_fields(self.queries, self.bundle.model_version, 0))

    def refreshed(self, row: int, seed: int = 0) -> ItemDelta:
        learnt = unit(np.random.default_rng(seed).normal(size=(2, 8)))
        states = self.bundle.item_states
        assert states.gate is not None
        components = (SHARE * states.components[row] + (1 - SHARE) * learnt).astype(np.float32)
        return ItemDelta(
            item_id=f"item-{row}", components=components, gate=states.gate[row], model_share=SHARE, num_interactions=9
        )

    def score(self, change: ItemDelta) -> float:
        assert change.gate is not None
        states = ItemStates(components=change.components[None], gate=change.gate[None])
        return float(mol_scores_reference(self.queries, states, self.bundle.pair_gate)[0, 0])

    def apply(self, offset: int, *changes: ItemDelta, mark: str = "") -> None:
        deltas = [
            IndexDelta(
                model_version=self.bundle.model_version, partition=0, offset=offset, batch=offset, last_of_batch=True,
                change=change,
            )
            for change in changes
        ]  # fmt: skip
        batch = Batch(offset=offset, deltas=deltas, newest_recorded_ms=1_700_000_000_000, mark=mark)
        assert self.changes.apply(batch, is_live=True)

    @property
    def name(self) -> str:
        return self.catalogue.base.index_version


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    bundle = make_bundle(tmp_path / "bundle")
    settings = RerankerSettings(port=0, metrics_port=0, bundle=bundle.path)
    registry = CollectorRegistry()
    metrics = RerankerMetrics(registry)
    catalogue = load_catalogue(settings)[0]
    rerank = Rerank(catalogue=catalogue, metrics=metrics)
    changes = CatalogueChanges(catalogue, metrics.catalogue)
    add = reranker_pb2_grpc.add_RerankerServiceServicer_to_server
    async with served("reranker", settings, add, RerankerServicer(rerank), registry) as channel:
        yield Running(tmp_path / "bundle", catalogue, changes, reranker_pb2_grpc.RerankerServiceStub(channel))
    await rerank.close()


def scores(answer: Any) -> dict[str, float]:
    return {item.item_id: item.score for item in answer.items}


async def test_a_pool_is_scored_with_the_version_that_made_it(running: Running) -> None:
    change = running.refreshed(4)
    running.apply(10, change)
    running.apply(11, running.refreshed(4, seed=1))
    old = await running.stub.Rerank(running.request(k=30, index_version=running.name))
    middle = await running.stub.Rerank(running.request(k=30, index_version=running.name + "+10"))
    new = await running.stub.Rerank(running.request(k=30, index_version=running.name + "+11"))
    assert scores(old)["item-4"] == pytest.approx(running.exact[4])
    assert scores(middle)["item-4"] == pytest.approx(running.score(change))
    assert scores(new)["item-4"] == pytest.approx(running.score(running.refreshed(4, seed=1)))
    for answer, suffix in ((old, ""), (middle, "+10"), (new, "+11")):
        assert answer.index_version == running.name + suffix
        assert answer.certificate.kind == KINDS.KIND_EXACT


async def test_a_version_that_is_not_held_is_answered_by_the_nearest_as_an_estimate(running: Running) -> None:
    for offset in range(MAX_VERSIONS + 5):
        running.apply(offset, running.refreshed(4, seed=offset))
    for place, scored in ((1, "+5"), (900, "+68"), (40, "+40"), (None, "+68")):
        request = running.request(index_version="of another process", deltas_offset=place)
        answer = await running.stub.Rerank(request)
        assert answer.index_version == running.name + scored
        assert answer.certificate.kind == KINDS.KIND_ESTIMATE


async def test_a_pool_of_the_same_place_in_another_log_is_no_proof(running: Running) -> None:
    running.apply(10, running.refreshed(4), mark="00000001")
    for mark, kind in (("00000001", KINDS.KIND_EXACT), ("00000002", KINDS.KIND_ESTIMATE)):
        answer = await running.stub.Rerank(
            running.request(index_version=f"{running.name}+10.{mark}", deltas_offset=10, k=30)
        )
        assert answer.certificate.kind == kind


async def test_a_gateway_that_says_no_place_is_answered_once_the_version_is_there(running: Running) -> None:
    waiting = asyncio.ensure_future(running.stub.Rerank(running.request(k=30, index_version=running.name + "+10")))
    await asyncio.to_thread(running.apply, 10, running.refreshed(4))
    answer = await waiting
    assert (answer.index_version, answer.certificate.kind) == (running.name + "+10", KINDS.KIND_EXACT)


async def test_a_bound_of_no_named_version_proves_nothing_once_the_index_has_changed(running: Running) -> None:
    assert (await running.stub.Rerank(running.request())).certificate.kind == KINDS.KIND_EXACT
    running.apply(1, running.refreshed(4))
    assert (await running.stub.Rerank(running.request())).certificate.kind == KINDS.KIND_ESTIMATE


async def test_votes_are_combined_and_the_bound_is_scaled(running: Running) -> None:
    votes = [0.0] * 30
    votes[7], votes[9] = 0.5, -0.5
    final = {f"item-{2 * place}": 0.5 * running.exact[2 * place] + 0.5 * vote for place, vote in enumerate(votes)}
    best = sorted(final, key=lambda item_id: -final[item_id])[:5]
    answer = await running.stub.Rerank(running.request(votes=votes, model_share=0.5))
    assert [item.item_id for item in answer.items] == best
    assert [item.score for item in answer.items] == pytest.approx([final[item_id] for item_id in best])
    assert answer.certificate.kind == KINDS.KIND_EXACT
    bounded = await running.stub.Rerank(running.request(votes=votes, model_share=0.5, bound=0.9))
    assert bounded.certificate.kind == KINDS.KIND_BOUNDED
    assert bounded.certificate.gap == pytest.approx(0.45 - final[best[-1]])


async def test_discounts_lower_scores_before_the_bound_and_the_rules(running: Running) -> None:
    discounts = [0.0] * 30
    discounts[7], discounts[9] = 0.5, 4.0
    final = {f"item-{2 * place}": running.exact[2 * place] - lower for place, lower in enumerate(discounts)}
    best = sorted(final, key=lambda item_id: -final[item_id])[:30]
    answer = await running.stub.Rerank(running.request(k=30, discounts=discounts))
    assert [item.item_id for item in answer.items] == best
    assert [item.score for item in answer.items] == pytest.approx([final[item_id] for item_id in best])
    bounded = await running.stub.Rerank(running.request(k=5, discounts=discounts, bound=0.9))
    assert bounded.certificate.gap == pytest.approx(0.9 - final[best[4]])


async def test_a_withdrawn_item_is_dropped_whatever_version_the_pool_is_of(running: Running) -> None:
    best = (await running.stub.Rerank(running.request())).items[0].item_id
    running.changes.describe([CatalogueItem(item_id=best, withdrawn=True)])
    answer = await running.stub.Rerank(running.request(index_version=running.name, k=30))
    assert best not in scores(answer)
    assert answer.dropped_items == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"discounts": [0.5]}, "len(discounts)=1 allowed: none, or one per candidate: 30"),
        (
            {"discounts": [-0.5] + [0.0] * 29},
            "values' allowed: finite numbers from 0",
        ),
        ({"discounts": [math.nan] * 30}, "discounts='NaN, negative or infinite values'"),
        ({"votes": [0.1]}, "len(votes)=1 allowed: none, or one per candidate: 30"),
        ({"votes": [float("nan")] * 30, "model_share": 0.5}, "votes='NaN or infinite values' allowed"),
        ({"votes": [0.1] * 30, "model_share": 1.5}, "model_share=1.5 allowed: 0-1"),
        ({"votes": [0.1] * 30, "model_share": float("nan")}, "model_share=nan allowed: 0-1"),
    ],
)
async def test_bad_votes_and_discounts_are_refused_by_name(
    running: Running, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.Rerank(running.request(**fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")


async def test_a_score_is_explained_by_pairs_and_shares(running: Running) -> None:
    change = running.refreshed(4)
    running.apply(10, change)
    request = reranker_pb2.ExplainScoreRequest(query_state=running.state(), item_id="item-4")
    explained = await running.stub.ExplainScore(request)
    assert explained.score == pytest.approx(running.score(change))
    assert explained.from_model + explained.from_interactions == pytest.approx(explained.score)
    assert explained.from_model == pytest.approx(sum(pair.from_model for pair in explained.pairs))
    assert sum(pair.contribution for pair in explained.pairs) == pytest.approx(explained.score)
    sizes = [abs(pair.contribution) for pair in explained.pairs]
    assert sizes == sorted(sizes, reverse=True)
    assert {(pair.query_component, pair.item_component) for pair in explained.pairs} == {
        (q, x) for q in range(4) for x in range(2)
    }
    assert (explained.model_share, explained.num_interactions) == (SHARE, 9)
    assert (explained.title, explained.index_version) == ("Title 4", running.name + "+10")
    untouched = await running.stub.ExplainScore(
        reranker_pb2.ExplainScoreRequest(query_state=running.state(), item_id="item-5", max_pairs=3)
    )
    assert len(untouched.pairs) == 3
    assert untouched.from_interactions == pytest.approx(0, abs=1e-12)
    assert untouched.score == pytest.approx(running.exact[5])


async def test_explaining_an_item_without_a_state_says_why_there_is_none(running: Running) -> None:
    running.changes.describe([CatalogueItem(item_id="put"), CatalogueItem(item_id="item-4", withdrawn=True)])
    for item_id, why in (
        ("nowhere", "is no item of this index"),
        ("put", "has no state yet: it has had no interaction"),
        ("item-4", "is withdrawn or not available"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.ExplainScore(
                reranker_pb2.ExplainScoreRequest(query_state=running.state(), item_id=item_id)
            )
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert (caught.value.details() or "").startswith(f"item_id='{item_id}' {why}")


async def test_info_tells_version_items_bytes_and_freshness(running: Running) -> None:
    running.apply(3, running.refreshed(4))
    info = await running.stub.GetRerankerInfo(reranker_pb2.GetRerankerInfoRequest())
    assert (info.model_version, info.index_version) == (running.bundle.model_version, running.name + "+3")
    assert info.num_items == 60
    assert info.bytes_per_item > 4 * (16 + 8)
    assert info.index_freshness.deltas_offset == 3
    assert info.index_freshness.newest_recorded_time.ToMilliseconds() == 1_700_000_000_000


def test_a_start_takes_a_snapshot_of_unchanged_items(tmp_path: Path) -> None:
    bundle, root = make_bundle(tmp_path / "bundle", count=10), tmp_path / "snapshots"
    settings = RerankerSettings(port=0, metrics_port=0, bundle=bundle.path, snapshots=str(root))
    path = load_catalogue(settings)[0].capture(written_s=1)(root)
    assert not (path / "item_states.safetensors").exists()
    with capture_logs() as logs:
        load_catalogue(settings)
    assert [one["event"] for one in logs] == ["snapshot_taken"]
