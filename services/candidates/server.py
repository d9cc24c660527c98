"""Where Protobuf ends: messages to dataclasses, the handler, dataclasses to messages."""

from typing import Any

from freshet.v1 import candidates_pb2, candidates_pb2_grpc, common_pb2

from services.algorithms.filters import ItemFilter
from services.algorithms.indexes.protocol import Certificate
from services.algorithms.packed_state import unpack_query_state
from services.algorithms.states import QueryStates
from services.candidates.domain import SearchAnswer, SearchQuery, Stage
from services.candidates.handlers import Search
from services.common.errors import InvalidRequest

SERVICE = "freshet.v1.CandidatesService"
_STAGES = {candidates_pb2.STAGE_FIRST: Stage.FIRST, candidates_pb2.STAGE_FULL: Stage.FULL}
_KINDS = {
    "exact": common_pb2.Certificate.KIND_EXACT,
    "bounded": common_pb2.Certificate.KIND_BOUNDED,
    "estimate": common_pb2.Certificate.KIND_ESTIMATE,
}


class CandidatesServicer(candidates_pb2_grpc.CandidatesServiceServicer):
    """CandidatesService over the handler."""

    def __init__(self, search: Search) -> None:
        self._search = search

    async def Search(self, request: candidates_pb2.SearchRequest, context: Any) -> candidates_pb2.SearchResponse:
        """First-stage or full top-K."""
        return _response(await self._search(_search_query(request)))

    async def GetIndexInfo(
        self, request: candidates_pb2.GetIndexInfoRequest, context: Any
    ) -> candidates_pb2.GetIndexInfoResponse:
        """What is loaded."""
        info = self._search.info
        return candidates_pb2.GetIndexInfoResponse(
            model_version=info.model_version,
            index_version=info.index_version,
            algorithm=info.algorithm,
            num_items=info.num_items,
            bytes_per_item=info.bytes_per_item,
            algorithms=[
                candidates_pb2.LoadedAlgorithm(name=name, added_bytes_per_item=added)
                for name, added in info.added_bytes_per_item.items()
            ],
        )


def _search_query(request: candidates_pb2.SearchRequest) -> SearchQuery:
    stage = _STAGES.get(request.stage)
    if stage is None:
        raise InvalidRequest.of("stage", request.stage, "STAGE_FIRST or STAGE_FULL")
    return SearchQuery(
        query=_query_state(request.query_state),
        model_version=request.query_state.model_version,
        k=request.k,
        stage=stage,
        filter=_filter(request.filter, request.seen_item_ids),
        algorithm=request.algorithm,
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


def _response(answer: SearchAnswer) -> candidates_pb2.SearchResponse:
    found = answer.found
    return candidates_pb2.SearchResponse(
        item_ids=found.item_ids,
        scores=found.scores,
        bound=found.bound,
        certificate=None if found.certificate is None else _certificate(found.certificate),
        model_version=answer.model_version,
        index_version=answer.index_version,
        queue_ms=answer.queue_s * 1000,
        search_ms=found.search_s * 1000,
        algorithm=found.algorithm,
        passes=[
            candidates_pb2.SearchPass(
                name=one.name, milliseconds=one.seconds * 1000, items_touched=int(one.touched[found.query])
            )
            for one in found.passes
        ],
    )


def _certificate(certificate: Certificate) -> common_pb2.Certificate:
    return common_pb2.Certificate(kind=_KINDS[certificate.kind], gap=certificate.gap or 0.0)
