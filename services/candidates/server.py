"""The RPCs of candidates.proto: messages become dataclasses and answers become messages."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, common_pb2

from services.algorithms.indexes.protocol import EXACT
from services.algorithms.items.live_catalogue import Served
from services.algorithms.scoring.packed_state import unpack_query_state
from services.algorithms.scoring.states import FloatArray
from services.candidates.domain import SearchQuery, SearchResult, Stage, VotesQuery
from services.candidates.handlers import Search
from services.contracts.shards import Shard
from services.contracts.wire import certificate_message, filter_of, index_freshness_message, unpacked, votes_message
from services.platform import request_context
from services.platform.errors import InvalidRequest
from services.platform.request_context import OFF, Tracing

SERVICE = "freshet.v1.CandidatesService"
_STAGES = {candidates_pb2.STAGE_FIRST: Stage.FIRST, candidates_pb2.STAGE_FULL: Stage.FULL}


class CandidatesServicer(candidates_pb2_grpc.CandidatesServiceServicer):
    """CandidatesService. check_ready: raises before the index is ready. applied_in: returns the traceparent of the span
    that applied deltas up to a position.
    """

    def __init__(
        self,
        search: Search,
        *,
        check_ready: Callable[[], None] = lambda: None,
        tracing: Tracing = OFF,
        applied_in: Callable[[int], str] = lambda position: "",
    ) -> None:
        self._search, self.check_ready = search, check_ready
        self._tracing, self._applied_in = tracing, applied_in

    async def Search(self, request: candidates_pb2.SearchRequest, context: Any) -> candidates_pb2.SearchResponse:
        self.check_ready()
        found = await self._search(_search_query(request))
        if self._tracing.is_on:
            self._tracing.link(self._applied_in(found.served.position), "deltas")
        return _response(found, self._search.shard)

    async def GetIndexInfo(
        self, request: candidates_pb2.GetIndexInfoRequest, context: Any
    ) -> candidates_pb2.GetIndexInfoResponse:
        info = self._search.info
        return candidates_pb2.GetIndexInfoResponse(
            model_version=info.model_version,
            index_version=info.served.name,
            algorithm=info.algorithm,
            num_items=info.num_items,
            bytes_per_item=info.bytes_per_item,
            num_remembered=info.num_remembered,
            bytes_per_remembered=info.bytes_per_remembered,
            algorithms=[
                candidates_pb2.LoadedAlgorithm(name=name, added_bytes_per_item=added)
                for name, added in info.added_bytes_per_item.items()
            ],
            index_freshness=_freshness(info.served),
            shard=_shard(info.shard, info.num_items),
        )

    async def ExplainVotes(
        self, request: candidates_pb2.ExplainVotesRequest, context: Any
    ) -> candidates_pb2.ExplainVotesResponse:
        self.check_ready()
        asked = VotesQuery(
            query=unpacked(request.query_state, unpack_query_state),
            model_version=request.query_state.model_version,
            item_id=request.item_id,
            seen_item_ids=tuple(request.seen_item_ids),
            turned_down_item_ids=tuple(request.turned_down_item_ids),
        )
        response = votes_message(await asyncio.to_thread(self._search.explain_votes, asked))
        response.shard.CopyFrom(_shard(self._search.shard))
        return response

    async def Similar(self, request: candidates_pb2.SimilarRequest, context: Any) -> candidates_pb2.SimilarResponse:
        self.check_ready()
        wanted = filter_of(request.filter, request.seen_item_ids)
        shard = self._search.shard
        data = _components(request.components)
        answer = await asyncio.to_thread(self._search.similar, request.item_id, request.k, wanted, data)
        return candidates_pb2.SimilarResponse(
            components=b"" if shard.is_all else answer.components.astype("<f4").tobytes(),
            shard=_shard(shard, answer.served.version.num_items),
            item_ids=answer.found.item_ids,
            similarities=answer.found.similarities,
            certificate=certificate_message(EXACT),
            model_version=answer.model_version,
            index_version=answer.served.name,
            search_ms=answer.search_s * 1000,
            index_freshness=_freshness(answer.served),
        )


def _search_query(request: candidates_pb2.SearchRequest) -> SearchQuery:
    stage = _STAGES.get(request.stage)
    if stage is None:
        raise InvalidRequest.of("stage", request.stage, "STAGE_FIRST or STAGE_FULL")
    return SearchQuery(
        query=unpacked(request.query_state, unpack_query_state),
        model_version=request.query_state.model_version,
        k=request.k,
        stage=stage,
        filter=filter_of(request.filter, request.seen_item_ids),
        turned_down_item_ids=tuple(request.turned_down_item_ids),
        algorithm=request.algorithm,
        deadline=request_context.deadline.get(),
        index_version=request.index_version,
        max_gap=request.max_gap if request.HasField("max_gap") else None,
    )


def _components(data: bytes) -> FloatArray | None:
    if len(data) % 4:
        raise InvalidRequest.of("components", f"{len(data)} bytes", "a multiple of 4")
    return np.frombuffer(data, "<f4").astype(np.float32) if data else None


def _shard(shard: Shard, num_items: int = 0) -> candidates_pb2.Shard:
    return candidates_pb2.Shard(index=shard.index, count=shard.count, num_items=num_items)


def _response(found: SearchResult, shard: Shard) -> candidates_pb2.SearchResponse:
    return candidates_pb2.SearchResponse(
        item_ids=found.item_ids,
        scores=found.scores,
        bound=found.bound,
        certificate=None if found.certificate is None else certificate_message(found.certificate),
        model_version=found.model_version,
        index_version=found.served.name,
        queue_ms=found.queue_s * 1000,
        search_ms=found.search_s * 1000,
        algorithm=found.algorithm,
        passes=[
            candidates_pb2.SearchPass(name=one.name, milliseconds=one.seconds * 1000, items_touched=int(one.touched[0]))
            for one in found.passes
        ],
        votes=found.votes,
        model_share=found.model_share,
        index_freshness=_freshness(found.served),
        shard=_shard(shard, found.served.version.num_items),
    )


def _freshness(served: Served) -> common_pb2.IndexFreshness:
    return index_freshness_message(served.position, served.newest_recorded_ms, served.lag_s)
