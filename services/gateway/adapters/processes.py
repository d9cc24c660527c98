"""The encoder, candidates and reranker processes over gRPC: one RPC each, bytes handed on as they are."""

from collections.abc import Sequence
from typing import Any

import grpc
from freshet.v1 import (
    candidates_pb2,
    candidates_pb2_grpc,
    common_pb2,
    encoder_pb2,
    encoder_pb2_grpc,
    reranker_pb2,
    reranker_pb2_grpc,
)

from services.common import rpc_client
from services.common.query_state import PackedQueryState, from_message, to_message
from services.common.stream.times import set_ms
from services.gateway.domain import (
    Certificate,
    CertificateKind,
    Encoded,
    Filter,
    HistoryEvent,
    IndexFreshness,
    Pool,
    Ranking,
    ScoredItem,
)
from services.gateway.explanation import PairPart, Similarity, Voters, Votes
from services.gateway.freshness import ServedIndex

# The generated stubs carry no types.
_EncoderStub: Any = encoder_pb2_grpc.EncoderServiceStub
_CandidatesStub: Any = candidates_pb2_grpc.CandidatesServiceStub
_RerankerStub: Any = reranker_pb2_grpc.RerankerServiceStub


def _filter_message(wanted: Filter) -> Any:
    return common_pb2.Filter(
        exclude_seen=wanted.exclude_seen,
        allow_item_ids=wanted.allow_item_ids,
        deny_item_ids=wanted.deny_item_ids,
        allow_categories=wanted.allow_categories,
        deny_categories=wanted.deny_categories,
    )


def _index_freshness(message: Any) -> IndexFreshness:
    return IndexFreshness(
        deltas_offset=message.deltas_offset,
        newest_recorded_ms=message.newest_recorded_time.ToMilliseconds()
        if message.HasField("newest_recorded_time")
        else None,
        lag_seconds=message.lag_seconds if message.HasField("lag_seconds") else None,
    )


def _served(info: Any) -> ServedIndex:
    freshness = _index_freshness(info.index_freshness) if info.HasField("index_freshness") else IndexFreshness()
    return ServedIndex(index_version=info.index_version, freshness=freshness)


class RemoteEncoder:
    """Implements `ports.Encoder`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._encode = _EncoderStub(channel).Encode

    async def encode(self, user_id: str, history: Sequence[HistoryEvent], timeout_s: float) -> Encoded:
        """One Encode call."""
        request = encoder_pb2.EncodeRequest(user_id=user_id)
        for event in history:
            message = request.history.add(item_id=event.item_id)
            set_ms(message.event_time, event.event_time_ms or 0)
        response = await rpc_client.call(self._encode, request, timeout_s=timeout_s, peer="encoder")
        state = from_message(response.query_state) if response.HasField("query_state") else None
        return Encoded(query_state=state, queue_ms=response.queue_ms, encode_ms=response.encode_ms)


class RemoteCandidates:
    """Implements `ports.Candidates`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = _CandidatesStub(channel)
        self._search = stub.Search
        self._explain_votes = stub.ExplainVotes
        self._info = stub.GetIndexInfo

    async def search(
        self, query_state: PackedQueryState, *, pool_size: int, filter: Filter, seen: Sequence[str], timeout_s: float
    ) -> Pool:
        """One Search call of the first stage."""
        request = candidates_pb2.SearchRequest(
            query_state=to_message(query_state),
            k=pool_size,
            stage=candidates_pb2.STAGE_FIRST,
            filter=_filter_message(filter),
            seen_item_ids=seen if filter.exclude_seen else (),
        )
        response = await rpc_client.call(self._search, request, timeout_s=timeout_s, peer="candidates")
        return Pool(
            item_ids=response.item_ids,
            scores=response.scores,
            bound=response.bound if response.HasField("bound") else None,
            votes=response.votes,
            model_share=response.model_share if response.votes else 1.0,
            index_version=response.index_version,
            index_freshness=_index_freshness(response.index_freshness)
            if response.HasField("index_freshness")
            else None,
            queue_ms=response.queue_ms,
            search_ms=response.search_ms,
        )

    async def explain_votes(self, query_state: PackedQueryState, item_id: str, *, timeout_s: float) -> Votes:
        """One ExplainVotes call."""
        request = candidates_pb2.ExplainVotesRequest(query_state=to_message(query_state), item_id=item_id)
        response = await rpc_client.call(self._explain_votes, request, timeout_s=timeout_s, peer="candidates")
        return Votes(
            vote=response.vote,
            num_neighbours=response.num_neighbours,
            model_share=response.model_share if response.num_neighbours else 1.0,
            voters=[
                Voters(
                    type=voters.type,
                    count=voters.count,
                    newest_age_seconds=voters.newest_age_seconds,
                    oldest_age_seconds=voters.oldest_age_seconds,
                    vote=voters.vote,
                )
                for voters in response.voters
            ],
            index_version=response.index_version,
        )

    async def served(self, timeout_s: float) -> ServedIndex:
        """One GetIndexInfo call."""
        request = candidates_pb2.GetIndexInfoRequest()
        return _served(await rpc_client.call(self._info, request, timeout_s=timeout_s, peer="candidates"))


class RemoteReranker:
    """Implements `ports.Reranker`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = _RerankerStub(channel)
        self._rerank = stub.Rerank
        self._explain = stub.ExplainScore
        self._info = stub.GetRerankerInfo

    async def rerank(
        self,
        query_state: PackedQueryState,
        pool: Pool,
        *,
        k: int,
        filter: Filter,
        seen: Sequence[str],
        max_per_category: int,
        diversity: float,
        timeout_s: float,
    ) -> Ranking:
        """One Rerank call. Of the seen items only those in the pool travel: the others change nothing."""
        request = reranker_pb2.RerankRequest(
            query_state=to_message(query_state),
            candidate_item_ids=pool.item_ids,
            bound=pool.bound,
            k=k,
            filter=_filter_message(filter),
            seen_item_ids=set(pool.item_ids).intersection(seen) if filter.exclude_seen else (),
            max_per_category=max_per_category,
            diversity=diversity,
            index_version=pool.index_version,
            votes=pool.votes,
            model_share=pool.model_share,
        )
        response = await rpc_client.call(self._rerank, request, timeout_s=timeout_s, peer="reranker")
        found = response.certificate
        return Ranking(
            items=[ScoredItem(item.item_id, item.score, item.source or "mol") for item in response.items],
            certificate=Certificate(CertificateKind(found.kind), found.gap),
            index_version=response.index_version or pool.index_version,
            queue_ms=response.queue_ms,
            rerank_ms=response.rerank_ms,
        )

    async def explain(
        self, query_state: PackedQueryState, item_id: str, *, max_pairs: int, timeout_s: float
    ) -> Similarity:
        """One ExplainScore call."""
        request = reranker_pb2.ExplainScoreRequest(
            query_state=to_message(query_state), item_id=item_id, max_pairs=max_pairs
        )
        response = await rpc_client.call(self._explain, request, timeout_s=timeout_s, peer="reranker")
        return Similarity(
            score=response.score,
            from_model=response.from_model,
            from_interactions=response.from_interactions,
            model_share=response.model_share,
            num_interactions=response.num_interactions,
            pairs=[
                PairPart(
                    query_component=pair.query_component,
                    item_component=pair.item_component,
                    weight=pair.weight,
                    cosine=pair.cosine,
                    contribution=pair.contribution,
                    from_model=pair.from_model,
                )
                for pair in response.pairs
            ],
            title=response.title,
            index_version=response.index_version,
        )

    async def served(self, timeout_s: float) -> ServedIndex:
        """One GetRerankerInfo call."""
        request = reranker_pb2.GetRerankerInfoRequest()
        return _served(await rpc_client.call(self._info, request, timeout_s=timeout_s, peer="reranker"))
