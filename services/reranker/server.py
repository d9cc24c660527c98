"""Where Protobuf ends: messages to dataclasses, the handler, dataclasses to messages."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from freshet.v1 import common_pb2, reranker_pb2, reranker_pb2_grpc

from services.algorithms.attributes import Comparison, Condition
from services.algorithms.filters import ItemFilter
from services.algorithms.packed_state import unpack_query_state
from services.algorithms.rules import Rule
from services.common.attributes import read_conditions
from services.common.errors import InvalidRequest
from services.common.query_state import unpacked
from services.reranker.domain import ExplainQuery, Ranked, RerankQuery
from services.reranker.handlers import Rerank

SERVICE = "freshet.v1.RerankerService"


class RerankerServicer(reranker_pb2_grpc.RerankerServiceServicer):
    """RerankerService over the handler. `check_ready` raises while nothing may be answered."""

    def __init__(self, rerank: Rerank, *, check_ready: Callable[[], None] = lambda: None) -> None:
        self._rerank, self._check_ready = rerank, check_ready

    async def Rerank(self, request: reranker_pb2.RerankRequest, context: Any) -> reranker_pb2.RerankResponse:
        """The pool in full, then rules and diversity."""
        self._check_ready()
        query = _rerank_query(request)
        ranked, queue_s = await self._rerank(query)
        return _response(ranked, queue_s, query.model_version)

    async def ExplainScore(
        self, request: reranker_pb2.ExplainScoreRequest, context: Any
    ) -> reranker_pb2.ExplainScoreResponse:
        """Where a score comes from."""
        self._check_ready()
        asked = ExplainQuery(
            query=unpacked(request.query_state, unpack_query_state),
            model_version=request.query_state.model_version,
            item_id=request.item_id,
            max_pairs=request.max_pairs,
            rules=_rules(request.rules),
        )
        explained = await asyncio.to_thread(self._rerank.explain, asked)
        return reranker_pb2.ExplainScoreResponse(**asdict(explained))

    async def GetRerankerInfo(
        self, request: reranker_pb2.GetRerankerInfoRequest, context: Any
    ) -> reranker_pb2.GetRerankerInfoResponse:
        """What is loaded, and how fresh it is."""
        info = self._rerank.info
        served = info.served
        freshness = common_pb2.IndexFreshness(deltas_offset=served.position, lag_seconds=served.lag_s)
        if served.newest_recorded_ms is not None:
            freshness.newest_recorded_time.FromMilliseconds(served.newest_recorded_ms)
        return reranker_pb2.GetRerankerInfoResponse(
            model_version=info.model_version,
            index_version=served.name,
            num_items=info.num_items,
            bytes_per_item=info.bytes_per_item,
            index_freshness=freshness,
        )


def _rerank_query(request: reranker_pb2.RerankRequest) -> RerankQuery:
    return RerankQuery(
        query=unpacked(request.query_state, unpack_query_state),
        model_version=request.query_state.model_version,
        candidate_item_ids=tuple(request.candidate_item_ids),
        bound=request.bound if request.HasField("bound") else None,
        k=request.k,
        filter=_filter(request.filter, request.seen_item_ids),
        max_per_category=request.max_per_category,
        diversity=request.diversity,
        index_version=request.index_version,
        position=request.deltas_offset if request.HasField("deltas_offset") else None,
        votes=tuple(request.votes),
        model_share=request.model_share,
        discounts=tuple(request.discounts),
        rules=_rules(request.rules),
    )


def _rules(messages: Sequence[common_pb2.Rule]) -> list[Rule]:
    return [_rule(message, f"rules[{position}]") for position, message in enumerate(messages)]


def _rule(message: common_pb2.Rule, name: str) -> Rule:
    try:
        conditions = read_conditions(message.where, f"{name}.where")
        which = ItemFilter(
            allow_item_ids=tuple(message.item_ids),
            allow_categories=tuple(message.categories),
            where=[Condition(attribute, Comparison(test), of) for attribute, test, of in conditions],
        )
    except ValueError as exc:
        raise InvalidRequest(f"{name}: {exc}") from exc
    for effect in (message.boost, message.bury):
        if not 0 <= effect < math.inf:
            raise InvalidRequest.of(f"{name}.{message.WhichOneof('effect')}", effect, "a finite number above 0")
    return Rule(name=message.name, which=which, boost=message.boost - message.bury, pin=message.pin, cap=message.cap)


def _filter(message: common_pb2.Filter, seen_item_ids: Any) -> ItemFilter:
    try:
        return ItemFilter(
            allow_item_ids=tuple(message.allow_item_ids),
            deny_item_ids=tuple(message.deny_item_ids),
            allow_categories=tuple(message.allow_categories),
            deny_categories=tuple(message.deny_categories),
            where=[Condition(name, Comparison(test), of) for name, test, of in read_conditions(message.where)],
            exclude_seen=message.exclude_seen,
            seen_item_ids=tuple(seen_item_ids),
        )
    except ValueError as exc:
        raise InvalidRequest(f"filter: {exc}") from exc


def _response(ranked: Ranked, queue_s: float, model_version: str) -> reranker_pb2.RerankResponse:
    certificate = ranked.certificate
    return reranker_pb2.RerankResponse(
        items=[
            common_pb2.ScoredItem(item_id=item_id, score=score, source="mol", rules=rules)
            for item_id, score, rules in zip(ranked.item_ids, ranked.scores, ranked.rules, strict=True)
        ],
        certificate=common_pb2.Certificate(kind=f"KIND_{certificate.kind.upper()}", gap=certificate.gap),
        dropped_items=ranked.dropped_items,
        model_version=model_version,
        queue_ms=queue_s * 1000,
        rerank_ms=ranked.rerank_s * 1000,
        index_version=ranked.index_version,
    )
