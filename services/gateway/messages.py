"""Convert requests from Protobuf, and answers to Protobuf."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from freshet.v1 import common_pb2, events_pb2
from freshet.v1 import gateway_pb2 as pb

from services.algorithms.rules.filters import ItemFilter
from services.contracts.dead_letters import Replayed
from services.contracts.topics.dead_letters import StoredLetter
from services.contracts.topics.exposures import assignment_message
from services.contracts.topics.interactions import DEFAULT_TYPE, Interaction, from_message
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
from services.gateway.describe.items import CatalogueDescription, ItemDetails
from services.gateway.describe.users import DescribedUser, Tailed
from services.gateway.domain import (
    ExplainQuery,
    FreshnessToken,
    HistoryEvent,
    IndexFreshness,
    NotAgain,
    Receipt,
    Recommendation,
    RecommendQuery,
    SearchAnswer,
    SearchQuery,
    SimilarAnswer,
    SimilarQuery,
)
from services.gateway.health import FreshnessReport, HealthReport
from services.gateway.ports import Looked, Shown
from services.gateway.recommend.explain import Explanation
from services.gateway.recommend.exposures import assigned_texts
from services.gateway.recommend.popular import PopularItems
from services.gateway.version_sets.routes import Routes, SetReport
from services.platform import request_context
from services.platform.errors import InvalidRequest
from services.platform.stream.records import Position, read_ms, set_ms
from services.user_state.values import now_ms

_NO_FILTER = ItemFilter()


def interactions_of(request: pb.RecordInteractionsRequest, arrived_ms: int) -> list[Interaction]:
    return [
        interaction_of(message, arrived_ms, f"interactions[{position}].")
        for position, message in enumerate(request.interactions)
    ]


def items_of(request: pb.PutItemsRequest) -> list[CatalogueItem]:
    return [_item(message, f"items[{position}].") for position, message in enumerate(request.items)]


def interaction_of(message: events_pb2.Interaction, arrived_ms: int, prefix: str) -> Interaction:
    if message.HasField("event_time"):
        read_ms(message.event_time, f"{prefix}event_time")
    return from_message(message, missing_time_ms=arrived_ms)


def _item(message: events_pb2.Item, prefix: str) -> CatalogueItem:
    try:
        return item_from_message(message)
    except InvalidRequest as exc:
        raise InvalidRequest(prefix + exc.message) from exc


def recommend_query(request: pb.RecommendRequest) -> RecommendQuery:
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
        arms=dict(request.arms) if request.arms else {},
        without_standing_rules=request.without_standing_rules,
    )


def similar_query(request: pb.GatewayServiceSimilarRequest) -> SimilarQuery:
    wanted = filter_of(request.filter, excludes_seen=True) if request.HasField("filter") else _NO_FILTER
    context = dict(request.context)
    return SimilarQuery(item_id=request.item_id, user_id=request.user_id, k=request.k, filter=wanted, context=context)


def explain_query(request: pb.ExplainRequest) -> ExplainQuery:
    return ExplainQuery(
        user_id=request.user_id,
        item_id=request.item_id,
        history=tuple(_history(request)) if request.history else (),
        max_pairs=request.max_pairs,
        rules=rules_of(request.rules),
    )


def search_query(request: pb.GatewayServiceSearchRequest) -> SearchQuery:
    query = SearchQuery(query=request.query, user_id=request.user_id, k=request.k, context=dict(request.context))
    return (
        replace(query, filter=filter_of(request.filter, excludes_seen=False)) if request.HasField("filter") else query
    )


def _history(request: pb.RecommendRequest | pb.ExplainRequest) -> list[HistoryEvent]:
    history = []
    for position, event in enumerate(request.history):
        field = f"history[{position}].event_time"
        time_ms = read_ms(event.event_time, field) if event.HasField("event_time") else None
        history.append(HistoryEvent(event.item_id, time_ms, event.type, event.value))
    return history


def receipt_message(receipt: Receipt) -> pb.InteractionReceipt:
    token = receipt.token
    return pb.InteractionReceipt(
        event_id=receipt.event_id,
        token=common_pb2.FreshnessToken(epoch=token.epoch, partition=token.partition, offset=token.offset),
    )


def answer_message(
    answer: Recommendation, details: Callable[[Sequence[str]], Sequence[ItemDetails]] | None = None
) -> pb.RecommendResponse:
    """Convert an answer. details: returns the details of items; None if the request does not ask for them."""
    times = answer.stage_times
    # The stubs ask for enum classes that exist for type checkers only.
    degradations: list[Any] = [int(kind) for kind in answer.degradations]
    message = pb.RecommendResponse(
        items=[
            common_pb2.ScoredItem(item_id=item.item_id, score=item.score, source=item.source, rules=item.rules)
            for item in answer.items
        ],
        model_version=answer.model_version,
        index_version=answer.index_version,
        token_honoured=answer.token_honoured,
        degradations=degradations,
        certificate=certificate_message(answer.certificate),
        stage_times=pb.StageTimes(
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
        assignments=map(assignment_message, assigned_texts(answer.assignments)),
        warnings=answer.warnings,
        rules_revision=answer.rules_revision,
        index_freshness=_freshness_of(answer.index_freshness),
    )
    if details is not None:
        for item, known in zip(message.items, details([one.item_id for one in answer.items]), strict=True):
            item.title = known.title
            item.categories.extend(known.categories)
    if answer.max_gap is not None:
        message.certificate.asked_gap = answer.max_gap
        message.certificate.items_touched = answer.items_touched
    message.certificate.interleaved = any(one.arm is None for one in answer.assignments)
    state = answer.state
    if state is not None:
        message.state_age_seconds = max(0, now_ms() - state.applied_ms) / 1000
        message.state_position.partition = state.partition
        message.state_position.offset = state.offset
    return message


def found_message(answer: SearchAnswer) -> pb.GatewayServiceSearchResponse:
    return pb.GatewayServiceSearchResponse(**asdict(answer), request_id=request_context.request_id.get())


def similar_message(answer: SimilarAnswer) -> pb.GatewayServiceSimilarResponse:
    found = answer.found
    degradations: list[Any] = [int(one) for one in answer.degradations]
    return pb.GatewayServiceSimilarResponse(
        items=[
            pb.SimilarItem(item_id=item.item_id, title=title, similarity=item.score)
            for item, title in zip(found.items, answer.titles, strict=True)
        ],
        model_version=answer.model_version,
        index_version=found.index_version,
        certificate=certificate_message(found.certificate),
        degradations=degradations,
        total_ms=answer.total_ms,
        request_id=request_context.request_id.get(),
        exposure_id=answer.exposure_id,
        warnings=answer.warnings,
        index_freshness=_freshness_of(found.index_freshness),
    )


def _freshness_of(index: IndexFreshness | None) -> common_pb2.IndexFreshness | None:
    if index is None:
        return None
    return index_freshness_message(index.deltas_offset, index.newest_recorded_ms, index.lag_seconds)


def explanation_message(answer: Explanation) -> pb.ExplainResponse:
    of_model, of_refreshed, of_votes = answer.shares
    return pb.ExplainResponse(
        score=answer.score,
        similarity=None if answer.similarity is None else explained_message(replace(answer.similarity, rules=())),
        votes=None if answer.votes is None else votes_message(answer.votes),
        share_of_model=of_model,
        share_of_refreshed=of_refreshed,
        share_of_votes=of_votes,
        history=[pb.PastInteraction(**asdict(past)) for past in answer.history],
        model_version=answer.model_version,
        state_source=answer.state_source,
        rules=[pb.ExplainedRule(name=rule.name, adds=rule.adds, pin=rule.pin, cap=rule.cap) for rule in answer.rules],
        score_with_rules=answer.score_with_rules,
        absence_bucket=answer.absence_bucket,
    )


def freshness_message(report: FreshnessReport) -> pb.GetFreshnessResponse:
    candidates, reranker = report.candidates, report.reranker
    degradations: list[Any] = [int(kind) for kind in report.degradations]
    return pb.GetFreshnessResponse(
        model_version=report.model_version,
        index_version="" if candidates is None else candidates.index_version,
        epoch=report.epoch,
        interactions=[pb.PartitionProgress(**asdict(one)) for one in report.interactions],
        attributions=[pb.PartitionProgress(**asdict(one)) for one in report.attributions],
        candidates=None if candidates is None else _freshness_of(candidates.freshness),
        reranker=None if reranker is None else _freshness_of(reranker.freshness),
        degradations=degradations,
    )


def catalogue_message(found: CatalogueDescription) -> pb.DescribeCatalogueResponse:
    return pb.DescribeCatalogueResponse(
        model_version=found.model.version,
        items=found.num_items,
        withdrawn_items=found.num_withdrawn,
        categories=[pb.CategoryCount(name=name, items=items) for name, items in found.categories],
        num_categories=found.num_categories,
        attributes=[pb.CatalogueAttribute(name=name, kind=str(kind)) for name, kind in found.model.kinds.items()],
        event_types=[
            pb.EventTypeMeaning(type=name, role=str(one.role), seen=one.seen, history=one.history)
            for name, one in found.model.schema.types.items()
        ],
    )


def tailed_message(found: Tailed) -> pb.TailInteractionsResponse:
    message = pb.TailInteractionsResponse(left_out=found.left_out)
    for one in found.interactions:
        plain = {name: getattr(one.interaction, name) for name in ("user_id", "item_id", "type", "value")}
        set_ms(message.interactions.add(title=one.title, **plain).written_time, one.written_ms)
    return message


def user_message(found: DescribedUser) -> pb.GetUserResponse:
    message = pb.GetUserResponse(
        num_events=found.num_events,
        num_seen=found.num_seen,
        model_version=found.model_version,
        state_reaches_history=found.state is not None and found.reaches_history,
    )
    for one in found.events:
        event = message.events.add(
            item_id=one.event.item_id,
            title=one.title,
            type=one.event.type or DEFAULT_TYPE,
            value=one.event.value,
            role=one.role,
        )
        if one.event.event_time_ms is not None:
            set_ms(event.event_time, one.event.event_time_ms)
    if found.state is not None:
        message.state_position.partition = found.state.partition
        message.state_position.offset = found.state.offset
        set_ms(message.state_time, found.state.applied_ms)
    return message


def health_message(found: HealthReport) -> pb.GetHealthResponse:
    message = pb.GetHealthResponse(last_minute_seconds=found.last_s)
    set_ms(message.since, found.since_ms)
    set_ms(message.first_minute, found.first_ms)
    for part in found.parts:
        columns = {name: part.minutes[name].tolist() for name in part.minutes.dtype.names}
        message.parts.add(
            name=part.name,
            ready=not part.problem,
            problem=part.problem,
            started=part.started,
            effect=part.effect,
            lag_unit=part.lag_unit,
            **columns,
        )
    return message


def letters_message(letters: Sequence[StoredLetter], has_older: bool) -> pb.ListDeadLettersResponse:
    message = pb.ListDeadLettersResponse(has_older=has_older)
    for letter in letters:
        added = message.letters.add(
            topic=letter.topic,
            position=_position(letter.position),
            reason=letter.reason,
            replayed_to=_position(letter.replayed_to),
        )
        set_ms(added.written_time, letter.written_ms)
    return message


def replayed_message(found: Replayed) -> pb.ReplayDeadLetterResponse:
    return pb.ReplayDeadLetterResponse(
        left_out=found.left_out, event_id=found.event_id, written_to=_position(found.written_to)
    )


def looked_message(found: Looked, items: PopularItems) -> pb.ListExposuresResponse:
    message = pb.ListExposuresResponse(
        answers=[shown_message(one, items) for one in found.answers], is_complete=found.is_complete
    )
    if found.oldest_ms is not None:
        set_ms(message.looked_back_to, found.oldest_ms)
    return message


def shown_message(found: Shown, items: PopularItems) -> pb.ShownAnswer:
    shown = found.exposure
    message = pb.ShownAnswer(
        exposure_id=shown.exposure_id,
        surface=shown.surface,
        model_version=shown.model_version,
        index_version=shown.index_version,
        first_position=shown.first_position,
        context=shown.context,
        assignments=map(assignment_message, shown.assignments),
        position=_position(found.position),
    )
    set_ms(message.shown_time, shown.shown_ms)
    columns = zip(shown.item_ids, items.titles_of(shown.item_ids), shown.scores, shown.sources, strict=True)
    for item_id, title, score, source in columns:
        message.items.add(item_id=item_id, title=title, score=score, source=source)
    return message


def _position(place: Position | None) -> common_pb2.StreamPosition | None:
    return None if place is None else common_pb2.StreamPosition(partition=place.partition, offset=place.offset)


def sets_message(routes: Routes, reports: Sequence[SetReport]) -> pb.GetVersionSetsResponse:
    sets = routes.sets
    return pb.GetVersionSetsResponse(
        revision=0 if sets is None else sets.revision,
        serving=reports[0].of.name if sets is None else sets.serving,
        before="" if sets is None else sets.before,
        canary=None if sets is None else share_message(sets.canary),
        shadow=None if sets is None else share_message(sets.shadow),
        sets=[
            pb.HeldSet(
                set=set_message(one.of),
                ready=not one.problem,
                problem=one.problem,
                answered=one.answered,
                shadow=None if one.shadow is None else pb.ShadowReport(**asdict(one.shadow)),
            )
            for one in reports
        ],
    )
