"""Where Protobuf ends: messages to dataclasses, handlers, dataclasses to messages."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from freshet.v1 import common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc

from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.interactions import Interaction, from_message
from services.contracts.topics.items import CatalogueItem, item_from_message
from services.contracts.topics.version_sets import set_message, share_message
from services.contracts.wire import (
    certificate_message,
    explained_message,
    filter_of,
    index_freshness_message,
    rules_of,
    votes_message,
)
from services.gateway.domain import (
    FreshnessToken,
    HistoryEvent,
    Impression,
    IndexFreshness,
    NotAgain,
    Receipt,
    Recommendation,
    RecommendQuery,
    SimilarAnswer,
    SimilarQuery,
    now_ms,
)
from services.gateway.edge.roles import Role
from services.gateway.freshness import FreshnessReport
from services.gateway.handlers import Handlers
from services.gateway.recommend.explanation import ExplainQuery, Explanation
from services.gateway.search.searching import SearchAnswer, SearchQuery
from services.gateway.version_sets.routes import Routes, SetReport
from services.platform.errors import InvalidRequest, PermissionDenied
from services.platform.large_requests import in_turn
from services.platform.rpc import request_context
from services.platform.stream.times import read_ms
from services.platform.tracing import OFF, Tracing

SERVICE = "freshet.v1.GatewayService"
_NO_FILTER = ItemFilter()


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """GatewayService over the handlers of the version set that answers a request's user."""

    def __init__(self, routes: Routes, tracing: Tracing = OFF) -> None:
        self.routes, self.tracing = routes, tracing

    async def Recommend(self, request: gateway_pb2.RecommendRequest, context: Any) -> gateway_pb2.RecommendResponse:
        """The top K items for a user, or for a history in the request."""
        query = await in_turn(_query, request)
        roles = request_context.roles.get()
        if query.as_of_ms is not None and roles is not None and Role.OPERATOR not in roles:
            key = request_context.caller.get()
            raise PermissionDenied(f"as_of needs the role operator; API key {key} has {', '.join(sorted(roles))}")
        held = self.routes.of(query.user_id)
        answer = await held.handlers.recommend(query)
        self.routes.answered(held, query, answer)
        if answer.state is not None:
            self.tracing.link(answer.state.traceparent, "state")
        return _answer_message(answer)

    async def Search(
        self, request: gateway_pb2.GatewayServiceSearchRequest, context: Any
    ) -> gateway_pb2.GatewayServiceSearchResponse:
        """The top K items for words, for everybody or for a user."""
        return _found_message(await self._of(request).search(await in_turn(_search_query, request)))

    async def Similar(
        self, request: gateway_pb2.GatewayServiceSimilarRequest, context: Any
    ) -> gateway_pb2.GatewayServiceSimilarResponse:
        """The top K items most like one item."""
        query = await in_turn(_similar_query, request)
        return _similar_message(await self._of(request).similar(query))

    async def RecordInteractions(
        self, request: gateway_pb2.RecordInteractionsRequest, context: Any
    ) -> gateway_pb2.RecordInteractionsResponse:
        """Writes interactions to the stream."""
        interactions = await in_turn(_interactions, request, now_ms())
        receipts = await self._serving.record(interactions)
        self._took(interactions)
        return gateway_pb2.RecordInteractionsResponse(receipts=map(_receipt_message, receipts))

    async def StreamInteractions(
        self, requests: AsyncIterator[gateway_pb2.StreamInteractionsRequest], context: Any
    ) -> gateway_pb2.StreamInteractionsResponse:
        """The same as a client stream."""

        taken: list[Interaction] = []

        async def arriving() -> AsyncIterator[Interaction]:
            position = 0
            async for request in requests:
                taken.append(_interaction(request.interaction, now_ms(), f"stream[{position}].interaction."))
                yield taken[-1]
                position += 1

        receipts = await self._serving.record.stream(arriving())
        self._took(taken)
        return gateway_pb2.StreamInteractionsResponse(receipts=map(_receipt_message, receipts))

    async def RecordImpressions(
        self, request: gateway_pb2.RecordImpressionsRequest, context: Any
    ) -> gateway_pb2.RecordImpressionsResponse:
        """Writes which slots of an answer were seen."""
        seen = [Impression(one.position, one.item_id) for one in request.impressions]
        receipts = await self._serving.record_impressions(request.user_id, request.exposure_id, seen)
        return gateway_pb2.RecordImpressionsResponse(receipts=map(_receipt_message, receipts))

    async def UndoInteraction(
        self, request: gateway_pb2.UndoInteractionRequest, context: Any
    ) -> gateway_pb2.UndoInteractionResponse:
        """Takes one earlier interaction back."""
        receipt = await self._serving.record.undo(request.user_id, request.event_id)
        return gateway_pb2.UndoInteractionResponse(receipt=_receipt_message(receipt))

    async def Explain(self, request: gateway_pb2.ExplainRequest, context: Any) -> gateway_pb2.ExplainResponse:
        """Why an item has the score that it has for a user."""
        query = await in_turn(_explain_query, request)
        return _explanation_message(await self._of(request).explain(query))

    async def GetFreshness(
        self, request: gateway_pb2.GetFreshnessRequest, context: Any
    ) -> gateway_pb2.GetFreshnessResponse:
        """How far every part of the system is."""
        return _freshness_message(await self._serving.get_freshness())

    async def PutItems(self, request: gateway_pb2.PutItemsRequest, context: Any) -> gateway_pb2.PutItemsResponse:
        """Adds items, changes their metadata, withdraws them or brings them back."""
        written = await self._serving.put_items(await in_turn(_items, request))
        return gateway_pb2.PutItemsResponse(num_written=written)

    async def ForgetUser(self, request: gateway_pb2.ForgetUserRequest, context: Any) -> gateway_pb2.ForgetUserResponse:
        """Removes a user's history, states and contributions."""
        report = await self._serving.forget_user(request.user_id, preview=request.preview)
        return gateway_pb2.ForgetUserResponse(**asdict(report))

    async def GetVersionSets(
        self, request: gateway_pb2.GetVersionSetsRequest, context: Any
    ) -> gateway_pb2.GetVersionSetsResponse:
        """Which version sets this gateway holds, and what each of them answers."""
        return _sets_message(self.routes, await self.routes.report())

    def _took(self, interactions: Sequence[Interaction]) -> None:
        for one in interactions:
            if self._serving.record.takes(one):
                self.routes.took(one.user_id, one.item_id)

    @property
    def _serving(self) -> Handlers:
        return self.routes.serving.handlers

    def _of(self, request: Any) -> Handlers:
        return self.routes.of(request.user_id).handlers


def _interactions(request: gateway_pb2.RecordInteractionsRequest, arrived_ms: int) -> list[Interaction]:
    return [
        _interaction(message, arrived_ms, f"interactions[{position}].")
        for position, message in enumerate(request.interactions)
    ]


def _items(request: gateway_pb2.PutItemsRequest) -> list[CatalogueItem]:
    return [_item(message, f"items[{position}].") for position, message in enumerate(request.items)]


def _interaction(message: events_pb2.Interaction, arrived_ms: int, prefix: str) -> Interaction:
    if message.HasField("event_time"):
        read_ms(message.event_time, f"{prefix}event_time")
    return from_message(message, missing_time_ms=arrived_ms)


def _item(message: events_pb2.Item, prefix: str) -> CatalogueItem:
    try:
        return item_from_message(message)
    except InvalidRequest as exc:
        raise InvalidRequest(prefix + exc.message) from exc


def _query(request: gateway_pb2.RecommendRequest) -> RecommendQuery:
    token = None
    if request.HasField("freshness_token"):
        found = request.freshness_token
        token = FreshnessToken(found.epoch, found.partition, found.offset)
    return RecommendQuery(
        user_id=request.user_id,
        k=request.k,
        filter=filter_of(request.filter, excludes_seen=True) if request.HasField("filter") else _NO_FILTER,
        context=dict(request.context) if request.context else {},
        history=tuple(_history(request)) if request.history else (),
        token=token,
        max_per_category=request.max_per_category,
        diversity=request.diversity,
        query=request.query,
        page_depth=request.page_depth,
        page_token=request.page_token,
        not_again=NotAgain(request.not_again.answers, request.not_again.minutes)
        if request.HasField("not_again")
        else None,
        rules=rules_of(request.rules),
        as_of_ms=read_ms(request.as_of, "as_of") if request.HasField("as_of") else None,
        max_gap=request.max_gap if request.HasField("max_gap") else None,
    )


def _similar_query(request: gateway_pb2.GatewayServiceSimilarRequest) -> SimilarQuery:
    wanted = filter_of(request.filter, excludes_seen=True) if request.HasField("filter") else _NO_FILTER
    return SimilarQuery(item_id=request.item_id, user_id=request.user_id, k=request.k, filter=wanted)


def _explain_query(request: gateway_pb2.ExplainRequest) -> ExplainQuery:
    return ExplainQuery(
        user_id=request.user_id,
        item_id=request.item_id,
        history=tuple(_history(request)) if request.history else (),
        max_pairs=request.max_pairs,
        rules=rules_of(request.rules),
    )


def _search_query(request: gateway_pb2.GatewayServiceSearchRequest) -> SearchQuery:
    query = SearchQuery(query=request.query, user_id=request.user_id, k=request.k)
    return (
        replace(query, filter=filter_of(request.filter, excludes_seen=False)) if request.HasField("filter") else query
    )


def _history(request: gateway_pb2.RecommendRequest | gateway_pb2.ExplainRequest) -> list[HistoryEvent]:
    history = []
    for position, event in enumerate(request.history):
        field = f"history[{position}].event_time"
        time_ms = read_ms(event.event_time, field) if event.HasField("event_time") else None
        history.append(HistoryEvent(event.item_id, time_ms, event.type, event.value))
    return history


def _receipt_message(receipt: Receipt) -> gateway_pb2.InteractionReceipt:
    token = receipt.token
    return gateway_pb2.InteractionReceipt(
        event_id=receipt.event_id,
        token=common_pb2.FreshnessToken(epoch=token.epoch, partition=token.partition, offset=token.offset),
    )


def _answer_message(answer: Recommendation) -> gateway_pb2.RecommendResponse:
    times = answer.stage_times
    # The numbers are the wire's own; the stubs' types want their enum classes, which exist for type checkers only.
    degradations: list[Any] = [int(kind) for kind in answer.degradations]
    message = gateway_pb2.RecommendResponse(
        items=[
            common_pb2.ScoredItem(item_id=item.item_id, score=item.score, source=item.source, rules=item.rules)
            for item in answer.items
        ],
        model_version=answer.model_version,
        index_version=answer.index_version,
        token_honoured=answer.token_honoured,
        degradations=degradations,
        certificate=certificate_message(answer.certificate),
        stage_times=gateway_pb2.StageTimes(
            queue_ms=times.queue_ms,
            encode_ms=times.encode_ms,
            first_stage_ms=times.first_stage_ms,
            rerank_ms=times.rerank_ms,
            transport_ms=times.transport_ms,
            total_ms=times.total_ms,
        ),
        state_source=answer.state_source,
        request_id=request_context.request_id.get(),
        exposure_id=answer.exposure_id,
        next_page_token=answer.next_page_token,
        searched_share=answer.searched_share,
        absence_bucket=answer.absence_bucket,
    )
    if answer.max_gap is not None:
        message.certificate.asked_gap = answer.max_gap
        message.certificate.items_touched = answer.items_touched
    state = answer.state
    if state is not None:
        message.state_age_seconds = max(0, now_ms() - state.applied_ms) / 1000
        message.state_position.partition = state.partition
        message.state_position.offset = state.offset
    if answer.index_freshness is not None:
        message.index_freshness.CopyFrom(_freshness_of(answer.index_freshness))
    return message


def _found_message(answer: SearchAnswer) -> gateway_pb2.GatewayServiceSearchResponse:
    return gateway_pb2.GatewayServiceSearchResponse(**asdict(answer), request_id=request_context.request_id.get())


def _similar_message(answer: SimilarAnswer) -> gateway_pb2.GatewayServiceSimilarResponse:
    found = answer.found
    degradations: list[Any] = [int(one) for one in answer.degradations]
    message = gateway_pb2.GatewayServiceSimilarResponse(
        items=[
            gateway_pb2.SimilarItem(item_id=item.item_id, title=title, similarity=item.score)
            for item, title in zip(found.items, answer.titles, strict=True)
        ],
        model_version=answer.model_version,
        index_version=found.index_version,
        certificate=certificate_message(found.certificate),
        degradations=degradations,
        total_ms=answer.total_ms,
        request_id=request_context.request_id.get(),
        exposure_id=answer.exposure_id,
    )
    if found.index_freshness is not None:
        message.index_freshness.CopyFrom(_freshness_of(found.index_freshness))
    return message


def _freshness_of(index: IndexFreshness) -> common_pb2.IndexFreshness:
    return index_freshness_message(index.deltas_offset, index.newest_recorded_ms, index.lag_seconds)


def _explanation_message(answer: Explanation) -> gateway_pb2.ExplainResponse:
    of_model, of_refreshed, of_votes = answer.shares
    return gateway_pb2.ExplainResponse(
        score=answer.score,
        similarity=None if answer.similarity is None else explained_message(replace(answer.similarity, rules=())),
        votes=None if answer.votes is None else votes_message(answer.votes),
        share_of_model=of_model,
        share_of_refreshed=of_refreshed,
        share_of_votes=of_votes,
        history=[gateway_pb2.PastInteraction(**asdict(past)) for past in answer.history],
        model_version=answer.model_version,
        state_source=answer.state_source,
        rules=[
            gateway_pb2.ExplainedRule(name=rule.name, adds=rule.adds, pin=rule.pin, cap=rule.cap)
            for rule in answer.rules
        ],
        score_with_rules=answer.score_with_rules,
        absence_bucket=answer.absence_bucket,
    )


def _freshness_message(report: FreshnessReport) -> gateway_pb2.GetFreshnessResponse:
    candidates, reranker = report.candidates, report.reranker
    degradations: list[Any] = [int(kind) for kind in report.degradations]
    return gateway_pb2.GetFreshnessResponse(
        model_version=report.model_version,
        index_version="" if candidates is None else candidates.index_version,
        epoch=report.epoch,
        interactions=[gateway_pb2.PartitionProgress(**asdict(one)) for one in report.interactions],
        attributions=[gateway_pb2.PartitionProgress(**asdict(one)) for one in report.attributions],
        candidates=None if candidates is None else _freshness_of(candidates.freshness),
        reranker=None if reranker is None else _freshness_of(reranker.freshness),
        degradations=degradations,
    )


def _sets_message(routes: Routes, reports: Sequence[SetReport]) -> gateway_pb2.GetVersionSetsResponse:
    sets = routes.sets
    return gateway_pb2.GetVersionSetsResponse(
        revision=0 if sets is None else sets.revision,
        serving=reports[0].of.name if sets is None else sets.serving,
        before="" if sets is None else sets.before,
        canary=None if sets is None else share_message(sets.canary),
        shadow=None if sets is None else share_message(sets.shadow),
        sets=[
            gateway_pb2.HeldSet(
                set=set_message(one.of),
                ready=not one.problem,
                problem=one.problem,
                answered=one.answered,
                shadow=None if one.shadow is None else gateway_pb2.ShadowReport(**asdict(one.shadow)),
            )
            for one in reports
        ],
    )
