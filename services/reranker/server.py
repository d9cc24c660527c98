"""Where Protobuf ends: messages to dataclasses, the handler, dataclasses to messages."""

from typing import Any

from freshet.v1 import common_pb2, reranker_pb2, reranker_pb2_grpc

from services.algorithms.filters import ItemFilter
from services.algorithms.packed_state import unpack_query_state
from services.algorithms.states import QueryStates
from services.common.errors import InvalidRequest
from services.reranker.domain import RerankAnswer, RerankQuery
from services.reranker.handlers import Rerank

SERVICE = "freshet.v1.RerankerService"
_KINDS = {
    "exact": common_pb2.Certificate.KIND_EXACT,
    "bounded": common_pb2.Certificate.KIND_BOUNDED,
    "estimate": common_pb2.Certificate.KIND_ESTIMATE,
}


class RerankerServicer(reranker_pb2_grpc.RerankerServiceServicer):
    """RerankerService over the handler."""

    def __init__(self, rerank: Rerank) -> None:
        self._rerank = rerank

    async def Rerank(self, request: reranker_pb2.RerankRequest, context: Any) -> reranker_pb2.RerankResponse:
        """The pool in full, then rules and diversity."""
        return _response(await self._rerank(_rerank_query(request)))


def _rerank_query(request: reranker_pb2.RerankRequest) -> RerankQuery:
    return RerankQuery(
        query=_query_state(request.query_state),
        model_version=request.query_state.model_version,
        candidate_item_ids=tuple(request.candidate_item_ids),
        bound=request.bound if request.HasField("bound") else None,
        k=request.k,
        filter=_filter(request.filter, request.seen_item_ids),
        max_per_category=request.max_per_category,
        diversity=request.diversity,
    )


def _query_state(state: common_pb2.QueryState) -> QueryStates:
    try:
        return unpack_query_state(
            state.components,
            state.gate,
            num_components=state.num_components,
            component_width=state.component_width,
        )
    except ValueError as exc:
        raise InvalidRequest(f"query_state: {exc}") from exc


def _filter(message: common_pb2.Filter, seen_item_ids: Any) -> ItemFilter:
    try:
        return ItemFilter(
            allow_item_ids=tuple(message.allow_item_ids),
            deny_item_ids=tuple(message.deny_item_ids),
            allow_categories=tuple(message.allow_categories),
            deny_categories=tuple(message.deny_categories),
            exclude_seen=message.exclude_seen,
            seen_item_ids=tuple(seen_item_ids),
        )
    except ValueError as exc:
        raise InvalidRequest(f"filter: {exc}") from exc


def _response(answer: RerankAnswer) -> reranker_pb2.RerankResponse:
    ranked = answer.ranked
    certificate = ranked.certificate
    return reranker_pb2.RerankResponse(
        items=[
            common_pb2.ScoredItem(item_id=item_id, score=score, source="mol")
            for item_id, score in zip(ranked.item_ids, ranked.scores, strict=True)
        ],
        certificate=common_pb2.Certificate(kind=_KINDS[certificate.kind], gap=certificate.gap or 0.0),
        dropped_items=ranked.dropped_items,
        model_version=answer.model_version,
        queue_ms=answer.queue_s * 1000,
        rerank_ms=ranked.rerank_s * 1000,
    )
