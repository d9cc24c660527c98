"""The other processes over gRPC: one RPC per port method. Query states stay bytes."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import structlog
from freshet.v1 import (
    candidates_pb2,
    candidates_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    refresher_pb2,
    refresher_pb2_grpc,
    reranker_pb2,
    reranker_pb2_grpc,
)

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
    query_state_of,
    rule_message,
    votes_of,
)
from services.gateway.adapters.peer import Peer
from services.gateway.domain import (
    Encoded,
    Event,
    Hit,
    IndexFreshness,
    Pool,
    Ranking,
    RerankQuery,
    ScoredItem,
    Seen,
    SourceHits,
)
from services.gateway.ports import Contributions, ItemProgress, PartitionProgress, ServedIndex, StoredUser
from services.platform.errors import FreshetError, PreconditionFailed
from services.platform.rpc import client as rpc_client
from services.platform.stream.records import set_ms

log = structlog.get_logger()

# The generated stubs carry no types.
_EncoderStub: Any = encoder_pb2_grpc.EncoderServiceStub
_CandidatesStub: Any = candidates_pb2_grpc.CandidatesServiceStub
_RerankerStub: Any = reranker_pb2_grpc.RerankerServiceStub
_GeneratorStub: Any = generator_pb2_grpc.GeneratorServiceStub
_RefresherStub: Any = refresher_pb2_grpc.RefresherServiceStub

# Seen items sent for the votes of item neighbours.
_RECENT = 100


def offsets_of(positions: Any) -> dict[int, int]:
    return {position.partition: position.offset for position in positions}


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


class RemoteEncoder:
    """Implements `ports.Encoder`."""

    def __init__(self, peer: Peer, model_version: str) -> None:
        self._peer, self._model_version = peer, model_version

    async def encode(self, user_id: str, history: Sequence[Event], timeout_s: float) -> Encoded:
        """Call Encode. Raises: PreconditionFailed for an answer of another model."""
        request = encoder_pb2.EncodeRequest(user_id=user_id, model_version=self._model_version)
        for event in history:
            message = request.history.add(item_id=event.item_id, type=event.type, value=event.value)
            set_ms(message.event_time, event.event_time_ms or 0)
        response = await self._peer.call(_EncoderStub, "Encode", request, timeout_s=timeout_s, peer="encoder")
        state = query_state_of(response.query_state) if response.HasField("query_state") else None
        if state is not None and state.model_version != self._model_version:
            raise PreconditionFailed(
                f"encoder: it encodes for model {state.model_version!r}; this gateway serves {self._model_version!r}"
            )
        return Encoded(query_state=state, queue_ms=response.queue_ms, encode_ms=response.encode_ms)

    async def describe_user(self, user_id: str, timeout_s: float) -> StoredUser:
        request = encoder_pb2.DescribeUserRequest(user_id=user_id)
        response = await self._peer.call(_EncoderStub, "DescribeUser", request, timeout_s=timeout_s, peer="encoder")
        return StoredUser(
            pseudonym=response.user_pseudonym,
            history_events=response.history_events,
            seen_items=response.seen_items,
            in_model=response.in_model,
            query_states=len(response.state_model_versions),
            forgotten_up_to=offsets_of(response.forgotten_up_to),
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
        """Call Similar; return the item's components too. components: of its shard's answer, for other shards."""
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


class RemoteTextSources:
    """Implements `ports.TextSources`: one RPC for all sources."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def find(
        self, sources: Sequence[str], query: str, *, k: int, filter: ItemFilter, timeout_s: float
    ) -> Mapping[str, SourceHits | FreshetError]:
        request = generator_pb2.FindByWordsRequest(query=query, k=k, filter=filter_message(filter), sources=sources)
        request.filter.ClearField("exclude_seen")  # sources have no data of users
        call = self._peer.call
        response = await call(_GeneratorStub, "FindByWords", request, timeout_s=timeout_s, peer="generator")
        return {answer.source: _to_hits(answer, response.text_version) for answer in response.answers}


def _to_hits(answer: Any, text_version: str) -> SourceHits | FreshetError:
    if answer.status:
        return rpc_client.translate_status(answer.status, answer.reason, "generator")
    items = [Hit(item.item_id, item.score, item.identifier) for item in answer.items]
    return SourceHits(items=items, text_version=text_version, milliseconds=answer.milliseconds)


class RemoteRefreshers:
    """Implements `ports.Refreshers`, one channel per address."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._stubs = {address: _RefresherStub(channel) for address, channel in channels.items()}

    async def folded(self, timeout_s: float) -> tuple[list[PartitionProgress], bool]:
        answers, all_answered = await self._ask_all("GetStatus", refresher_pb2.GetStatusRequest(), timeout_s)
        return [
            PartitionProgress(
                partition=partition.partition, applied_offset=partition.folded_offset, end_offset=partition.end_offset
            )
            for answer in answers
            for partition in answer.partitions
        ], all_answered

    async def contributions(self, pseudonym: str, timeout_s: float) -> tuple[list[Contributions], bool]:
        request = refresher_pb2.DescribeContributionsRequest(user_pseudonym=pseudonym)
        answers, all_answered = await self._ask_all("DescribeContributions", request, timeout_s)
        return [
            Contributions(
                summed_interactions=answer.interactions,
                remembered_interactions=answer.remembered,
                forgotten_up_to=offsets_of(answer.forgotten_up_to),
                partitions=tuple(answer.partitions),
            )
            for answer in answers
        ], all_answered

    async def item(self, item_id: str, timeout_s: float) -> tuple[list[ItemProgress], bool]:
        request = refresher_pb2.DescribeItemRequest(item_id=item_id)
        answers, all_answered = await self._ask_all("DescribeItem", request, timeout_s)
        return [
            ItemProgress(
                num_interactions=answer.num_interactions,
                num_users=answer.num_users,
                min_users=answer.min_users,
                is_published=answer.is_published,
                reason=answer.reason,
            )
            for answer in answers
        ], all_answered

    async def _ask_all(self, method: str, request: Any, timeout_s: float) -> tuple[list[Any], bool]:
        """Call all refreshers concurrently; return the answers, and whether all answered (False without refreshers)."""

        async def ask(address: str, stub: Any) -> Any:
            try:
                return await rpc_client.call(getattr(stub, method), request, timeout_s=timeout_s, peer="refresher")
            except FreshetError as exc:
                log.info("refresher_silent", address=address, error=type(exc).__name__, reason=exc.message)
                return None

        answers = await asyncio.gather(*(ask(address, stub) for address, stub in self._stubs.items()))
        return [answer for answer in answers if answer is not None], bool(answers) and None not in answers
