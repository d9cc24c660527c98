"""The candidates process while its catalogue changes: versions, freshness, withdrawals, and votes of the memory."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, common_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from retrieval_scene import half, make_bundle, make_items, make_pair_gate, make_queries, state_fields, unit
from serving_scene import served

from services.algorithms.indexes.by_name import parse_algorithm
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.voted_answers import voted_answers, voted_pools
from services.candidates.bootstrap import host_build, load_catalogue, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.domain import SearchQuery, SearchResult, Stage
from services.candidates.metrics import Answered, CandidatesMetrics, examine
from services.candidates.server import CandidatesServicer
from services.catalogue.changes import CatalogueChanges
from services.contracts.topics.index_deltas import Batch, IndexDelta, ItemDelta, MemoryDelta
from services.contracts.topics.items import CatalogueItem

FIRST, FULL = candidates_pb2.STAGE_FIRST, candidates_pb2.STAGE_FULL
P_Q, P_X, D = 4, 2, 8


class Running:
    """A served bundle, its stub, and what its follower's thread would call."""

    def __init__(
        self, path: Path, live: Any, changes: CatalogueChanges, stub: Any, registry: CollectorRegistry
    ) -> None:
        self.bundle = make_bundle(path)
        self.live, self.changes, self.stub, self.registry = live, changes, stub, registry
        self.queries = half(make_queries(np.random.default_rng(5), 6, P_Q, P_X, D))

    def request(self, query: int = 0, **fields: Any) -> Any:
        state = common_pb2.QueryState(**state_fields(self.queries, self.bundle.model_version, query))
        return candidates_pb2.SearchRequest(**{"query_state": state, "k": 10, "stage": FULL, **fields})

    def apply(self, offset: int, *changes: ItemDelta | MemoryDelta, recorded_ms: int | None = None) -> None:
        deltas = [
            IndexDelta(
                model_version=self.bundle.model_version, partition=0, offset=offset, batch=offset, last_of_batch=True,
                change=change,
            )
            for change in changes
        ]  # fmt: skip
        assert self.changes.apply(Batch(offset=offset, deltas=deltas, newest_recorded_ms=recorded_ms), is_live=True)

    def liked_by(self, query: int, item_id: str) -> ItemDelta:
        """A state of that item next to which nothing scores: the mean of the query's components."""
        components = unit(np.repeat(self.queries.components[query].sum(axis=0, keepdims=True), P_X, axis=0))
        return ItemDelta(
            item_id=item_id, components=components, gate=np.zeros(P_Q * P_X, dtype=np.float32), model_share=0
        )

    def remembered(self, query: int, item_id: str, entry_id: str, weight: float = 1.0) -> MemoryDelta:
        return MemoryDelta(
            entry_id=entry_id,
            item_id=item_id,
            components=self.queries.components[query],
            weight=weight,
            type="click" if weight > 0 else "skip",
            event_time_ms=1_000_000 + 1_000 * int(entry_id.strip("e")),
        )


async def serving(path: Path, **changes: Any) -> AsyncIterator[Running]:
    make_bundle(path)
    settings = CandidatesSettings(
        port=0, metrics_port=0, bundle=path, **{"algorithms": "brute_force top_k_avg(15)", "audit_share": 0, **changes}
    )
    registry = CollectorRegistry()
    metrics = CandidatesMetrics(registry)
    live = make_live(settings, load_catalogue(settings), metrics)
    listener = CatalogueChanges(
        live.catalogue,
        metrics.catalogue,
        remembered=live.votes,
        on_change=lambda: metrics.loaded(live.search.info),
    )
    add = candidates_pb2_grpc.add_CandidatesServiceServicer_to_server
    async with served("candidates", settings, add, CandidatesServicer(live.search), registry) as channel:
        yield Running(path, live, listener, candidates_pb2_grpc.CandidatesServiceStub(channel), registry)
    await live.search.close()


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async for scene in serving(tmp_path / "bundle"):
        yield scene


@pytest_asyncio.fixture
async def voting(tmp_path: Path) -> AsyncIterator[Running]:
    async for scene in serving(tmp_path / "bundle", vote_neighbours=4, vote_model_share=0.5):
        yield scene


async def test_a_new_item_is_found_under_the_position_of_its_batch(running: Running) -> None:
    before = await running.stub.Search(running.request())
    assert "+" not in before.index_version
    assert before.index_freshness.deltas_offset == -1
    assert not before.index_freshness.HasField("newest_recorded_time")
    assert not before.index_freshness.HasField("lag_seconds")
    recorded_ms = int(time.time() * 1000) - 500
    running.apply(41, running.liked_by(0, "brand-new"), recorded_ms=recorded_ms)
    for stage in (FULL, FIRST):
        after = await running.stub.Search(running.request(stage=stage))
        assert after.item_ids[0] == "brand-new"
        assert after.index_version == before.index_version + "+41"
        assert after.index_freshness.deltas_offset == 41
        assert after.index_freshness.newest_recorded_time.ToMilliseconds() == recorded_ms
        assert 0.499 <= after.index_freshness.lag_seconds < 3600
    info = await running.stub.GetIndexInfo(candidates_pb2.GetIndexInfoRequest())
    assert (info.num_items, info.index_version, info.index_freshness.deltas_offset) == (61, after.index_version, 41)
    assert running.registry.get_sample_value("freshet_candidates_items") == 61
    assert running.registry.get_sample_value("freshet_candidates_index_lag_seconds_count") == 1


async def test_a_withdrawn_item_is_not_answered_and_does_not_starve_the_answer(running: Running) -> None:
    best = list((await running.stub.Search(running.request())).item_ids)
    running.changes.describe(
        [CatalogueItem(item_id=best[0], withdrawn=True), CatalogueItem(item_id=best[1], available=False)]
    )
    running.apply(7, running.liked_by(0, best[0]))
    for stage in (FULL, FIRST):
        answer = await running.stub.Search(running.request(stage=stage, k=60))
        assert len(answer.item_ids) == 58
        assert not set(best[:2]) & set(answer.item_ids)
    running.changes.describe([CatalogueItem(item_id=best[0])])
    assert (await running.stub.Search(running.request())).item_ids[0] == best[0]


async def test_without_a_memory_there_are_no_votes_and_remembering_costs_nothing(running: Running) -> None:
    running.apply(1, running.remembered(0, "item-3", "e1"))
    answer = await running.stub.Search(running.request())
    assert (list(answer.votes), answer.model_share) == ([], 1)
    votes = await running.stub.ExplainVotes(
        candidates_pb2.ExplainVotesRequest(query_state=running.request().query_state, item_id="item-3")
    )
    assert (votes.vote, votes.num_neighbours, votes.model_share) == (0, 0, 1)


async def test_votes_are_merged_into_full_answers_and_the_certificate_holds(voting: Running) -> None:
    whole = await voting.stub.Search(voting.request(k=60))
    worst = whole.item_ids[-1]
    by_s = {item_id: 2 * score for item_id, score in zip(whole.item_ids, whole.scores, strict=True)}
    voting.apply(3, voting.remembered(0, worst, "e1"), voting.remembered(0, worst, "e2"))
    # Two of four neighbours, at similarity 1: a vote of 1/2; lambda 1/2.
    final = {item_id: 0.5 * score + (0.25 if item_id == worst else 0) for item_id, score in by_s.items()}
    best = sorted(final, key=lambda item_id: -final[item_id])
    k = best.index(worst) + 1
    answer = await voting.stub.Search(voting.request(k=k))
    assert list(answer.item_ids) == best[:k]
    assert list(answer.scores) == pytest.approx([final[item_id] for item_id in best[:k]], abs=1e-6)
    assert list(answer.votes) == pytest.approx([0] * (k - 1) + [0.5], abs=1e-6)
    assert answer.model_share == 0.5
    assert answer.passes[0].name == "votes"
    assert answer.certificate.kind == common_pb2.Certificate.KIND_EXACT


async def test_voted_items_that_pass_join_the_pool_and_others_do_not(voting: Running) -> None:
    whole = list((await voting.stub.Search(voting.request(k=60))).item_ids)
    outside, denied, withdrawn = whole[-1], whole[-2], whole[-3]
    voting.apply(
        3,
        *(voting.remembered(0, item_id, f"e{n}") for n, item_id in enumerate((outside, denied, withdrawn, "unknown"))),
    )
    voting.changes.describe([CatalogueItem(item_id=withdrawn, withdrawn=True)])
    rules = common_pb2.Filter(deny_item_ids=[denied])
    pool = await voting.stub.Search(voting.request(stage=FIRST, k=10, filter=rules))
    assert set(pool.item_ids) == {*whole[:10], outside}
    assert list(pool.scores) == sorted(pool.scores, reverse=True)
    assert dict(zip(pool.item_ids, pool.votes, strict=True))[outside] == pytest.approx(0.25, abs=1e-6)
    assert pool.HasField("bound")


async def test_votes_say_of_what_kind_and_age_they_are(voting: Running) -> None:
    voting.apply(
        3,
        voting.remembered(0, "item-3", "e1"),
        voting.remembered(0, "item-3", "e5"),
        voting.remembered(0, "item-3", "e2", weight=-1.0),
        voting.remembered(0, "item-4", "e9"),
    )
    votes = await voting.stub.ExplainVotes(
        candidates_pb2.ExplainVotesRequest(query_state=voting.request().query_state, item_id="item-3")
    )
    assert votes.vote == pytest.approx(0.25, abs=1e-6)
    assert (votes.num_neighbours, votes.model_share) == (4, 0.5)
    found = {one.type: (one.count, one.newest_age_seconds, one.oldest_age_seconds) for one in votes.voters}
    assert found == {"click": (2, 4, 8), "skip": (1, 7, 7)}
    info = await voting.stub.GetIndexInfo(candidates_pb2.GetIndexInfoRequest())
    assert info.num_remembered == 4
    assert info.bytes_per_remembered > 4 * P_Q * D


async def test_what_left_the_memory_votes_no_more_and_a_reset_forgets_all(voting: Running) -> None:
    voting.apply(3, voting.remembered(0, "item-3", "e1"), voting.remembered(0, "item-4", "e2"))
    voting.apply(4, MemoryDelta(entry_id="e1", dropped=True))
    votes = (await voting.stub.Search(voting.request(k=60))).votes
    assert sum(vote > 0 for vote in votes) == 1
    voting.changes.reset()
    answer = await voting.stub.Search(voting.request(k=60))
    assert not any(answer.votes)
    assert "+" not in answer.index_version


async def test_explaining_votes_refuses_what_a_search_refuses(voting: Running) -> None:
    request = candidates_pb2.ExplainVotesRequest(query_state=voting.request().query_state)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await voting.stub.ExplainVotes(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    request.item_id, request.query_state.model_version = "item-1", "other"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await voting.stub.ExplainVotes(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_searches_go_on_while_batches_are_applied(running: Running) -> None:
    """Every answer is of one version, whole: in version n both twins have the same state, so they stand together."""

    def twins(number: int) -> list[ItemDelta]:
        one, other = (running.liked_by(number % 6, name) for name in ("twin-a", "twin-b"))
        return [one, other]

    async def search(number: int) -> None:
        answer = await running.stub.Search(running.request(number % 6, k=62))
        places = [list(answer.item_ids).index(name) for name in ("twin-a", "twin-b")]
        assert places[1] == places[0] + 1, answer.index_version

    running.apply(0, *twins(0))
    writer = asyncio.to_thread(lambda: [running.apply(number, *twins(number)) for number in range(1, 200)])
    task = asyncio.create_task(writer)
    asked = 0
    while not task.done() or asked < 20:
        await asyncio.gather(*(search(asked + number) for number in range(4)))
        asked += 4
    await task
    assert (await running.stub.GetIndexInfo(candidates_pb2.GetIndexInfoRequest())).index_freshness.deltas_offset == 199


IDS = [f"i{row:02}" for row in range(30)]
ITEMS = make_items(np.random.default_rng(8), 30, 2, 2, 4)
GATE = make_pair_gate(np.random.default_rng(9), 4, 4)
QUERY = make_queries(np.random.default_rng(10), 1, 2, 2, 4)
S = mol_scores_reference(QUERY, ITEMS, GATE).numpy()[0]
ALGORITHMS = ["top_k_avg(6)", "top_k_per_embedding(3)", "exact"]
CATALOGUE = LiveCatalogue(
    Catalogue(model_version="m", item_ids=IDS, titles=IDS, categories=[()] * 30, states=ITEMS, pair_gate=GATE),
    build=host_build([parse_algorithm(name) for name in ALGORITHMS]),
)


@given(
    votes=st.dictionaries(st.sampled_from([*IDS, "unknown"]), st.floats(-1, 1), max_size=8),
    share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    k=st.integers(1, 12),
    denied=st.lists(st.sampled_from(IDS), max_size=20),
    algorithm=st.sampled_from(ALGORITHMS),
)
@settings(deadline=None, max_examples=150)
def test_a_joined_answer_keeps_its_certificate_against_every_item(
    votes: dict[str, float], share: float, k: int, denied: list[str], algorithm: str
) -> None:
    wanted, served = ItemFilter(deny_item_ids=denied), CATALOGUE.served
    asked: tuple[Any, ...] = (CATALOGUE, served, QUERY, k, [wanted], [votes])
    ((joined,), _) = voted_answers(*asked, algorithm, model_share=share)
    final = {
        item_id: share * S[row] + (1 - share) * votes.get(item_id, 0.0)
        for row, item_id in enumerate(IDS)
        if item_id not in denied
    }
    assert dict(zip(joined.item_ids, joined.scores, strict=True)) == pytest.approx(
        {item_id: final[item_id] for item_id in joined.item_ids}
    )
    assert joined.certificate is not None
    best = sorted(final.values(), reverse=True)[:k]
    if joined.certificate.kind == "exact":
        assert joined.scores.tolist() == pytest.approx(best)
    elif joined.certificate.gap is not None:
        left_out = [s for item_id, s in final.items() if item_id not in joined.item_ids]
        assert max(left_out) <= joined.scores[-1] + joined.certificate.gap + 1e-12
    pool = CATALOGUE.index.version.first_stage(QUERY, k, wanted, algorithm=algorithm)
    ((voted,), _, _) = voted_pools(*asked, algorithm)
    assert {*pool.item_ids[0], *votes} - {"unknown"} - set(denied) == set(voted.item_ids)
    finding = examine(
        CATALOGUE,
        Answered(
            search=SearchQuery(query=QUERY, model_version="m", k=k, stage=Stage.FULL, filter=wanted),
            found=SearchResult(
                algorithm=algorithm, item_ids=joined.item_ids, scores=joined.scores.tolist(), bound=None,
                certificate=joined.certificate, search_s=0.0, passes=(), served=served,
                model_version="m", model_share=share,
            ),
            votes=votes,
        ),
    )  # fmt: skip
    assert finding.held is not False or finding.true <= (finding.promised or 0) + 1e-12


async def test_similar_items_follow_the_stream(running: Running) -> None:
    async def similar(**fields: Any) -> Any:
        return await running.stub.Similar(candidates_pb2.SimilarRequest(**{"k": 5, **fields}))

    one, other = running.bundle.item_ids[3], running.bundle.item_ids[7]
    before = await similar(item_id=one)
    assert len(before.item_ids) == 5
    assert one not in before.item_ids
    assert before.certificate.kind == common_pb2.Certificate.KIND_EXACT
    states = running.bundle.item_states
    gate = None if states.gate is None else states.gate[3]
    # The other becomes what the one is.
    running.apply(4, ItemDelta(item_id=other, components=states.components[3], gate=gate, model_share=0.5))
    after = await similar(item_id=one)
    assert after.item_ids[0] == other
    assert after.similarities[0] == pytest.approx(1, abs=1e-6)
    assert after.index_freshness.deltas_offset == 4
    wanted = common_pb2.Filter(exclude_seen=True)
    assert other not in (await similar(item_id=one, filter=wanted, seen_item_ids=[other])).item_ids
    running.changes.describe([CatalogueItem(item_id="put")])
    for fields, code, says in (
        ({"item_id": "nowhere"}, grpc.StatusCode.NOT_FOUND, "item_id='nowhere' is no item of this index"),
        ({"item_id": "put"}, grpc.StatusCode.NOT_FOUND, "item_id='put' has no state yet"),
        ({"item_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "item_id"),
        ({"item_id": one, "k": 0}, grpc.StatusCode.INVALID_ARGUMENT, "k=0"),
        ({"item_id": one, "k": 10_001}, grpc.StatusCode.INVALID_ARGUMENT, "k=10001"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await similar(**fields)
        assert raised.value.code() is code
        assert (raised.value.details() or "").startswith(says)
