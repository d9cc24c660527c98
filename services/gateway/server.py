"""Where Protobuf ends: messages to dataclasses, handlers, dataclasses to messages."""

import time
from collections.abc import AsyncIterator
from typing import Any

from freshet.v1 import common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc

from services.common import request_context
from services.common.errors import InvalidRequest
from services.common.events import Interaction, from_message
from services.gateway.domain import Filter, FreshnessToken, HistoryEvent, Receipt, Recommendation, RecommendQuery
from services.gateway.handlers.recommend import Recommend
from services.gateway.handlers.record import RecordInteractions

SERVICE = "freshet.v1.GatewayService"
_NO_FILTER = Filter()


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """GatewayService over the handlers."""

    def __init__(self, recommend: Recommend, record: RecordInteractions) -> None:
        self._recommend = recommend
        self._record = record

    async def Recommend(self, request: gateway_pb2.RecommendRequest, context: Any) -> gateway_pb2.RecommendResponse:
        """The top K items for a user, or for a history in the request."""
        return _answer_message(await self._recommend(_query(request)))

    async def RecordInteractions(
        self, request: gateway_pb2.RecordInteractionsRequest, context: Any
    ) -> gateway_pb2.RecordInteractionsResponse:
        """Writes interactions to the stream."""
        now_ms = _now_ms()
        interactions = [
            _interaction(message, now_ms, f"interactions[{place}].")
            for place, message in enumerate(request.interactions)
        ]
        receipts = await self._record(interactions)
        return gateway_pb2.RecordInteractionsResponse(receipts=map(_receipt_message, receipts))

    async def StreamInteractions(
        self, requests: AsyncIterator[gateway_pb2.StreamInteractionsRequest], context: Any
    ) -> gateway_pb2.StreamInteractionsResponse:
        """The same as a client stream."""

        async def arriving() -> AsyncIterator[Interaction]:
            place = 0
            async for request in requests:
                yield _interaction(request.interaction, _now_ms(), f"stream[{place}].interaction.")
                place += 1

        receipts = await self._record.stream(arriving())
        return gateway_pb2.StreamInteractionsResponse(receipts=map(_receipt_message, receipts))

    async def UndoInteraction(
        self, request: gateway_pb2.UndoInteractionRequest, context: Any
    ) -> gateway_pb2.UndoInteractionResponse:
        """Takes one earlier interaction back."""
        receipt = await self._record.undo(request.user_id, request.event_id)
        return gateway_pb2.UndoInteractionResponse(receipt=_receipt_message(receipt))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _timestamp_ms(stamp: Any, field: str) -> int:
    """Milliseconds of a Timestamp whose parts are what Protobuf allows (a raw client may send anything)."""
    if not 0 <= stamp.nanos < 1_000_000_000:
        raise InvalidRequest.of(f"{field}.nanos", stamp.nanos, "0-999999999")
    return int(stamp.seconds * 1000 + stamp.nanos // 1_000_000)


def _interaction(message: events_pb2.Interaction, now_ms: int, prefix: str) -> Interaction:
    if message.HasField("event_time"):
        _timestamp_ms(message.event_time, f"{prefix}event_time")
    return from_message(message, missing_time_ms=now_ms)


def _query(request: gateway_pb2.RecommendRequest) -> RecommendQuery:
    token = None
    if request.HasField("freshness_token"):
        found = request.freshness_token
        token = FreshnessToken(found.epoch, found.partition, found.offset)
    return RecommendQuery(
        user_id=request.user_id,
        k=request.k,
        filter=_filter(request.filter) if request.HasField("filter") else _NO_FILTER,
        context=dict(request.context) if request.context else {},
        history=tuple(_history(request)) if request.history else (),
        token=token,
        max_per_category=request.max_per_category,
        diversity=request.diversity,
    )


def _history(request: gateway_pb2.RecommendRequest) -> list[HistoryEvent]:
    return [
        HistoryEvent(
            event.item_id,
            _timestamp_ms(event.event_time, f"history[{place}].event_time") if event.HasField("event_time") else None,
            event.type,
            event.value,
        )
        for place, event in enumerate(request.history)
    ]


def _filter(message: common_pb2.Filter) -> Filter:
    return Filter(
        exclude_seen=message.exclude_seen if message.HasField("exclude_seen") else True,
        allow_item_ids=tuple(message.allow_item_ids),
        deny_item_ids=tuple(message.deny_item_ids),
        allow_categories=tuple(message.allow_categories),
        deny_categories=tuple(message.deny_categories),
    )


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
    kind: Any = int(answer.certificate.kind)
    message = gateway_pb2.RecommendResponse(
        items=[
            common_pb2.ScoredItem(item_id=item.item_id, score=item.score, source=item.source) for item in answer.items
        ],
        model_version=answer.model_version,
        index_version=answer.index_version,
        token_honoured=answer.token_honoured,
        degradations=degradations,
        certificate=common_pb2.Certificate(kind=kind, gap=answer.certificate.gap),
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
    )
    state = answer.state
    if state is not None:
        message.state_age_seconds = max(0, time.time_ns() // 1_000_000 - state.applied_ms) / 1000
        message.state_position.partition = state.position.partition
        message.state_position.offset = state.position.offset
    return message
