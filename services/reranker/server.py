"""The RPCs of reranker.proto: messages become dataclasses and answers become messages."""

import asyncio
from collections.abc import Callable
from typing import Any

from freshet.v1 import common_pb2, reranker_pb2, reranker_pb2_grpc

from services.algorithms.scoring.packed_state import unpack_query_state
from services.contracts.wire import (
    certificate_message,
    explained_message,
    filter_of,
    index_freshness_message,
    rules_of,
    unpacked,
)
from services.reranker.domain import ExplainQuery, Ranked, RerankQuery
from services.reranker.handlers import Rerank

SERVICE = "freshet.v1.RerankerService"


class RerankerServicer(reranker_pb2_grpc.RerankerServiceServicer):
    """RerankerService. check_ready: raises before the index is ready."""

    def __init__(self, rerank: Rerank, *, check_ready: Callable[[], None] = lambda: None) -> None:
        self._rerank, self._check_ready = rerank, check_ready

    async def Rerank(self, request: reranker_pb2.RerankRequest, context: Any) -> reranker_pb2.RerankResponse:
        self._check_ready()
        query = _rerank_query(request)
        ranked, queue_s = await self._rerank(query)
        return _response(ranked, queue_s, query.model_version)

    async def ExplainScore(
        self, request: reranker_pb2.ExplainScoreRequest, context: Any
    ) -> reranker_pb2.ExplainScoreResponse:
        self._check_ready()
        asked = ExplainQuery(
            query=unpacked(request.query_state, unpack_query_state),
            model_version=request.query_state.model_version,
            item_id=request.item_id,
            max_pairs=request.max_pairs,
            rules=rules_of(request.rules),
        )
        explained = await asyncio.to_thread(self._rerank.explain, asked)
        return explained_message(explained)

    async def GetRerankerInfo(
        self, request: reranker_pb2.GetRerankerInfoRequest, context: Any
    ) -> reranker_pb2.GetRerankerInfoResponse:
        catalogue = self._rerank.catalogue
        served = catalogue.served
        return reranker_pb2.GetRerankerInfoResponse(
            model_version=catalogue.base.model_version,
            index_version=served.name,
            num_items=(items := served.version.num_items),
            bytes_per_item=catalogue.index.memory.total / max(1, items),
            index_freshness=index_freshness_message(served.position, served.newest_recorded_ms, served.lag_s),
        )


def _rerank_query(request: reranker_pb2.RerankRequest) -> RerankQuery:
    return RerankQuery(
        query=unpacked(request.query_state, unpack_query_state),
        model_version=request.query_state.model_version,
        candidate_item_ids=tuple(request.candidate_item_ids),
        bound=request.bound if request.HasField("bound") else None,
        k=request.k,
        filter=filter_of(request.filter, request.seen_item_ids),
        max_per_category=request.max_per_category,
        diversity=request.diversity,
        index_version=request.index_version,
        position=request.deltas_offset if request.HasField("deltas_offset") else None,
        votes=tuple(request.votes),
        model_share=request.model_share,
        discounts=tuple(request.discounts),
        rules=rules_of(request.rules),
    )


def _response(ranked: Ranked, queue_s: float, model_version: str) -> reranker_pb2.RerankResponse:
    return reranker_pb2.RerankResponse(
        items=[
            common_pb2.ScoredItem(item_id=item_id, score=score, source="mol", rules=rules)
            for item_id, score, rules in zip(ranked.item_ids, ranked.scores, ranked.rules, strict=True)
        ],
        certificate=certificate_message(ranked.certificate),
        dropped_items=ranked.dropped_items,
        model_version=model_version,
        queue_ms=queue_s * 1000,
        rerank_ms=ranked.rerank_s * 1000,
        index_version=ranked.index_version,
    )
