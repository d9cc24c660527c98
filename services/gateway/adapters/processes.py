"""Call candidates and reranker, over gRPC or in this process. A port method is one RPC; query states stay bytes."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, reranker_pb2, reranker_pb2_grpc

from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.shards import WHOLE, Shard
from services.contracts.wire import (
    ExplainedScore,
    ItemVotes,
    PackedQueryState,
    certificate_of,
    explained_of,
    filter_message,
    query_state_message,
    rule_message,
    votes_of,
)
from services.gateway.domain import IndexFreshness, Pool, Ranking, RerankQuery, ScoredItem, Seen
from services.gateway.metrics import PartCalls
from services.gateway.ports import ServedIndex
from services.platform.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    FreshetError,
    Overloaded,
    PreconditionFailed,
)
from services.platform.rpc import client as rpc_client

# The generated stubs carry no types.
_CandidatesStub: Any = candidates_pb2_grpc.CandidatesServiceStub
_RerankerStub: Any = reranker_pb2_grpc.RerankerServiceStub
# Number of newest seen items sent if only the votes of item neighbours need them.
_RECENT = 100
FAILURES = (DependencyUnavailable, DeadlineExceeded, Overloaded)
# `Timed` does not count calls for a peer's status: no user's answer depends on them.
_STATUS = ("GetIndexInfo", "GetRerankerInfo")


class Peer(Protocol):
    """A process that answers RPCs, remote or local."""

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """Make an idempotent call. Raises: as `rpc_client.call`."""

    async def close(self) -> None:
        """Close the peer; no call follows."""


class Remote:
    """Implements `Peer` over a gRPC channel. of: suffix of the peer's name in errors, such as " of model m1"."""

    def __init__(self, channel: grpc.aio.Channel, of: str = "") -> None:
        self._channel, self._of = channel, of
        self._stubs: dict[Any, Any] = {}

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        if stub not in self._stubs:
            self._stubs[stub] = stub(self._channel)
        called = getattr(self._stubs[stub], method)
        return await rpc_client.call(called, request, timeout_s=timeout_s, peer=peer + self._of)

    async def close(self) -> None:
        await self._channel.close()


class Timed:
    """Implements `Peer`: counts another peer's calls."""

    def __init__(self, peer: Peer, calls: PartCalls) -> None:
        self._peer, self._calls = peer, calls

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        if method in _STATUS:
            return await self._peer.call(stub, method, request, timeout_s=timeout_s, peer=peer)
        began = time.perf_counter()
        try:
            answer = await self._peer.call(stub, method, request, timeout_s=timeout_s, peer=peer)
        except FreshetError as exc:
            self._calls.add(time.perf_counter() - began, failed=isinstance(exc, FAILURES))
            raise
        self._calls.add(time.perf_counter() - began)
        return answer

    async def close(self) -> None:
        await self._peer.close()


def _index_freshness_of(answer: Any) -> IndexFreshness | None:
    if not answer.HasField("index_freshness"):
        return None
    message = answer.index_freshness
    return IndexFreshness(
        deltas_offset=message.deltas_offset,
        newest_recorded_ms=message.newest_recorded_time.ToMilliseconds()
        if message.HasField("newest_recorded_time")
        else None,
        lag_seconds=message.lag_seconds if message.HasField("lag_seconds") else None,
    )


def _searched(response: Any) -> dict[str, Any]:
    """Return the fields of `Found` in a SearchResponse."""
    return {
        "index_version": response.index_version,
        "index_freshness": _index_freshness_of(response),
        "queue_ms": response.queue_ms,
        "stage_ms": response.search_ms,
        "num_items": response.shard.num_items,
        "items_touched": sum(one.items_touched for one in response.passes),
    }


def _served(info: Any) -> ServedIndex:
    return ServedIndex(
        index_version=info.index_version,
        freshness=_index_freshness_of(info) or IndexFreshness(),
        model_version=info.model_version,
    )


class RemoteCandidates:
    """Implements `ports.Candidates` for one shard of the catalogue or all of it."""

    def __init__(self, peer: Peer, shard: Shard = WHOLE) -> None:
        self._peer, self._shard = peer, shard
        self._name = "candidates" if shard.is_all else f"candidates shard {shard}"

    async def search(self, query_state: PackedQueryState, **asked: Any) -> Ranking:
        """Call Search for the full search. asked: as in `_search`."""
        response = await self._search(candidates_pb2.STAGE_FULL, query_state, **asked)
        return Ranking(
            items=[ScoredItem(*one, "mol") for one in zip(response.item_ids, response.scores, strict=True)],
            certificate=certificate_of(response.certificate),
            **_searched(response),
        )

    async def propose(self, query_state: PackedQueryState, **asked: Any) -> Pool:
        """Call Search for the first stage. asked: as in `_search`."""
        response = await self._search(candidates_pb2.STAGE_FIRST, query_state, **asked)
        return Pool(
            item_ids=response.item_ids,
            scores=response.scores,
            bound=response.bound if response.HasField("bound") else None,
            votes=response.votes,
            model_share=response.model_share if response.votes else 1.0,
            **_searched(response),
        )

    async def _search(
        self,
        stage: Any,
        query_state: PackedQueryState,
        *,
        k: int,
        filter: ItemFilter,
        seen: Seen,
        timeout_s: float,
        index_version: str = "",
        max_gap: float | None = None,
    ) -> Any:
        """Call Search. The process uses its newest version if it does not have `index_version`."""
        request = candidates_pb2.SearchRequest(
            query_state=query_state_message(query_state),
            k=k,
            stage=stage,
            filter=filter_message(filter),
            seen_item_ids=seen.item_ids if filter.exclude_seen else seen.item_ids[:_RECENT],
            turned_down_item_ids=seen.turned_down,
            index_version=index_version,
            max_gap=max_gap,
        )
        return await self._call("Search", request, timeout_s)

    async def similar(
        self, item_id: str, *, k: int, filter: ItemFilter, seen: Sequence[str], timeout_s: float
    ) -> Ranking:
        ranking, _ = await self.similar_with_components(item_id, k=k, filter=filter, seen=seen, timeout_s=timeout_s)
        return ranking

    async def similar_with_components(
        self,
        item_id: str,
        *,
        k: int,
        filter: ItemFilter,
        seen: Sequence[str],
        timeout_s: float,
        components: bytes = b"",
    ) -> tuple[Ranking, bytes]:
        """Call Similar; return the item's components too. components: from the item's shard, for other shards."""
        request = candidates_pb2.SimilarRequest(
            item_id=item_id,
            k=k,
            filter=filter_message(filter),
            seen_item_ids=seen if filter.exclude_seen else (),
            components=components,
        )
        response = await self._call("Similar", request, timeout_s)
        ranking = Ranking(
            items=[ScoredItem(*one, "similar") for one in zip(response.item_ids, response.similarities, strict=True)],
            certificate=certificate_of(response.certificate),
            index_version=response.index_version,
            index_freshness=_index_freshness_of(response),
            stage_ms=response.search_ms,
            num_items=response.shard.num_items,
        )
        return ranking, response.components

    async def explain_votes(
        self, query_state: PackedQueryState, item_id: str, *, seen: Seen, timeout_s: float
    ) -> ItemVotes:
        request = candidates_pb2.ExplainVotesRequest(
            query_state=query_state_message(query_state),
            item_id=item_id,
            seen_item_ids=seen.item_ids,
            turned_down_item_ids=seen.turned_down,
        )
        response = await self._call("ExplainVotes", request, timeout_s)
        return votes_of(response)

    async def served(self, timeout_s: float) -> ServedIndex:
        return _served(await self._call("GetIndexInfo", candidates_pb2.GetIndexInfoRequest(), timeout_s))

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        response = await self._peer.call(_CandidatesStub, method, request, timeout_s=timeout_s, peer=self._name)
        self._check(response)
        return response

    def _check(self, response: Any) -> None:
        found = (response.shard.index, response.shard.count or 1)
        if found != (self._shard.index, self._shard.count):
            raise PreconditionFailed(
                f"{self._name}: it holds shard {found[0]}/{found[1]}; "
                f"allowed: {self._shard}, as FRESHET_CANDIDATES_ADDRESS has it"
            )


class RemoteReranker:
    """Implements `ports.Reranker`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def rerank(self, query_state: PackedQueryState, pool: Pool, wanted: RerankQuery, timeout_s: float) -> Ranking:
        """Call Rerank, with only those seen items that are in the pool."""
        discounts = wanted.discounts
        request = reranker_pb2.RerankRequest(
            query_state=query_state_message(query_state),
            candidate_item_ids=pool.item_ids,
            bound=pool.bound,
            k=wanted.k,
            filter=filter_message(wanted.filter),
            seen_item_ids=set(pool.item_ids).intersection(wanted.seen) if wanted.filter.exclude_seen else (),
            max_per_category=wanted.max_per_category,
            diversity=wanted.diversity,
            index_version=pool.index_version,
            deltas_offset=None if pool.index_freshness is None else pool.index_freshness.deltas_offset,
            votes=pool.votes,
            model_share=pool.model_share,
            discounts=[discounts.get(item_id, 0.0) for item_id in pool.item_ids] if discounts else (),
            rules=map(rule_message, wanted.rules),
        )
        response = await self._peer.call(_RerankerStub, "Rerank", request, timeout_s=timeout_s, peer="reranker")
        return Ranking(
            items=[
                ScoredItem(item.item_id, item.score, item.source or "mol", rules=tuple(item.rules))
                for item in response.items
            ],
            certificate=certificate_of(response.certificate),
            index_version=response.index_version or pool.index_version,
            index_freshness=pool.index_freshness,
            queue_ms=response.queue_ms,
            stage_ms=response.rerank_ms,
        )

    async def explain(
        self, query_state: PackedQueryState, item_id: str, *, max_pairs: int, rules: Sequence[Rule], timeout_s: float
    ) -> ExplainedScore:
        request = reranker_pb2.ExplainScoreRequest(
            query_state=query_state_message(query_state),
            item_id=item_id,
            max_pairs=max_pairs,
            rules=map(rule_message, rules),
        )
        response = await self._peer.call(_RerankerStub, "ExplainScore", request, timeout_s=timeout_s, peer="reranker")
        return explained_of(response)

    async def served(self, timeout_s: float) -> ServedIndex:
        request = reranker_pb2.GetRerankerInfoRequest()
        call = self._peer.call
        return _served(await call(_RerankerStub, "GetRerankerInfo", request, timeout_s=timeout_s, peer="reranker"))
