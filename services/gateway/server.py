"""The RPCs of gateway.proto: messages become dataclasses and answers become messages."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from freshet.v1 import gateway_pb2 as pb
from freshet.v1 import gateway_pb2_grpc

from services.contracts.topics.experiments import experiment_message, experiment_of
from services.contracts.topics.interactions import Interaction
from services.contracts.wire import rule_message, rules_of
from services.gateway.domain import Impression, Recommendation, RecommendQuery
from services.gateway.edge.roles import Role
from services.gateway.handlers import Handlers
from services.gateway.item_messages import item_message, items_message, items_query
from services.gateway.messages import (
    answer_message,
    catalogue_message,
    explain_query,
    explanation_message,
    found_message,
    freshness_message,
    health_message,
    interaction_of,
    interactions_of,
    items_of,
    letters_message,
    looked_message,
    receipt_message,
    recommend_query,
    replayed_message,
    search_query,
    sets_message,
    shown_message,
    similar_message,
    similar_query,
    tailed_message,
    user_message,
)
from services.gateway.recommend.recommend import rules_of_arms
from services.gateway.version_sets.routes import Routes, ServedSet
from services.gateway.write.operations import Operations
from services.platform import request_context
from services.platform.errors import PermissionDenied
from services.platform.request_context import OFF, Tracing
from services.platform.stream.records import Position
from services.platform.threads import in_turn
from services.user_state.values import now_ms

SERVICE = "freshet.v1.GatewayService"


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """GatewayService. A request's user decides which version set answers."""

    def __init__(
        self, routes: Routes, operations: Operations, tracing: Tracing = OFF, stops: Callable[[], bool] = lambda: False
    ) -> None:
        """stops: returns whether the process is stopping, so that streams end."""
        self.routes, self.operations, self.tracing, self.stops = routes, operations, tracing, stops

    async def Recommend(self, request: pb.RecommendRequest, context: Any) -> pb.RecommendResponse:
        query = await in_turn(recommend_query, request)
        roles = request_context.roles.get()
        for name, is_asked in (
            ("as_of", query.as_of_ms is not None),
            ("arms", bool(query.arms)),
            ("without_standing_rules", query.without_standing_rules),
        ):
            if is_asked and roles is not None and Role.OPERATOR not in roles:
                key = request_context.caller.get()
                raise PermissionDenied(f"{name} needs the role operator; API key {key} has {', '.join(sorted(roles))}")
        served, answer = await self._recommended(query)
        self.routes.answered(served, query, answer)
        if answer.state is not None:
            self.tracing.link(answer.state.traceparent, "state")
        details = served.handlers.describe_catalogue.details if request.with_details else None
        return answer_message(answer, details)

    async def _recommended(self, query: RecommendQuery) -> tuple[ServedSet, Recommendation]:
        """Answer by one set, or interleave two arms' answers. Requests with pages, `not_again` or `max_gap` need one
        ranking, so interleaved experiments leave them out.
        """
        served, assignments = self.routes.assigned(query.user_id, query.context, query.arms)
        mixed = next((one for one in assignments if one.arm is None), None)
        asks_one = query.page_depth or query.page_token or query.not_again or query.max_gap is not None
        if mixed is not None and asks_one:
            assignments, mixed = tuple(one for one in assignments if one.arm is not None), None
        query = replace(query, assignments=assignments)
        if mixed is None:
            return served, await served.handlers.recommend(query)
        return await self.routes.interleaved(query, mixed, served)

    async def Search(self, request: pb.GatewayServiceSearchRequest, context: Any) -> pb.GatewayServiceSearchResponse:
        query = await in_turn(search_query, request)
        served, assignments = self.routes.assigned(query.user_id, query.context)
        return found_message(await served.handlers.search(replace(query, assignments=assignments)))

    async def Similar(self, request: pb.GatewayServiceSimilarRequest, context: Any) -> pb.GatewayServiceSimilarResponse:
        query = await in_turn(similar_query, request)
        served, assignments = self.routes.assigned(query.user_id, query.context)
        return similar_message(await served.handlers.similar(replace(query, assignments=assignments)))

    async def RecordInteractions(
        self, request: pb.RecordInteractionsRequest, context: Any
    ) -> pb.RecordInteractionsResponse:
        interactions = await in_turn(interactions_of, request, now_ms())
        receipts = await self._serving.record(interactions)
        self._took(interactions)
        return pb.RecordInteractionsResponse(receipts=map(receipt_message, receipts))

    async def StreamInteractions(
        self, requests: AsyncIterator[pb.StreamInteractionsRequest], context: Any
    ) -> pb.StreamInteractionsResponse:
        taken: list[Interaction] = []

        async def arriving() -> AsyncIterator[Interaction]:
            position = 0
            async for request in requests:
                taken.append(interaction_of(request.interaction, now_ms(), f"stream[{position}].interaction."))
                yield taken[-1]
                position += 1

        receipts = await self._serving.record.stream(arriving())
        self._took(taken)
        return pb.StreamInteractionsResponse(receipts=map(receipt_message, receipts))

    async def RecordImpressions(
        self, request: pb.RecordImpressionsRequest, context: Any
    ) -> pb.RecordImpressionsResponse:
        seen = [Impression(one.position, one.item_id) for one in request.impressions]
        receipts = await self._serving.record_impressions(request.user_id, request.exposure_id, seen)
        return pb.RecordImpressionsResponse(receipts=map(receipt_message, receipts))

    async def UndoInteraction(self, request: pb.UndoInteractionRequest, context: Any) -> pb.UndoInteractionResponse:
        receipt = await self._serving.record.undo(request.user_id, request.event_id)
        return pb.UndoInteractionResponse(receipt=receipt_message(receipt))

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        query = await in_turn(explain_query, request)
        served, assignments = self.routes.assigned(query.user_id)
        query = replace(query, arm_rules=rules_of_arms(assignments))
        return explanation_message(await served.handlers.explain(query))

    async def GetFreshness(self, request: pb.GetFreshnessRequest, context: Any) -> pb.GetFreshnessResponse:
        return freshness_message(await self._serving.get_freshness())

    async def PutItems(self, request: pb.PutItemsRequest, context: Any) -> pb.PutItemsResponse:
        written = await self._serving.put_items(await in_turn(items_of, request), request.fields)
        return pb.PutItemsResponse(num_written=written)

    async def ForgetUser(self, request: pb.ForgetUserRequest, context: Any) -> pb.ForgetUserResponse:
        report = await self._serving.forget_user(request.user_id, preview=request.preview)
        return pb.ForgetUserResponse(**asdict(report))

    async def DescribeCatalogue(
        self, request: pb.DescribeCatalogueRequest, context: Any
    ) -> pb.DescribeCatalogueResponse:
        message = catalogue_message(await self._serving.describe_catalogue(request.max_categories))
        roles = request_context.roles.get()
        message.roles.extend(sorted(Role if roles is None else roles))
        return message

    async def GetItem(self, request: pb.GetItemRequest, context: Any) -> pb.GetItemResponse:
        return item_message(await self._serving.get_item(request.item_id))

    async def ListItems(self, request: pb.ListItemsRequest, context: Any) -> pb.ListItemsResponse:
        return items_message(*await self._serving.list_items(items_query(request)))

    async def GetUser(self, request: pb.GetUserRequest, context: Any) -> pb.GetUserResponse:
        served, _ = self.routes.assigned(request.user_id)
        found = await served.handlers.get_user(request.user_id, request.max_events, request.skip_events)
        return user_message(found)

    async def ListExposures(self, request: pb.ListExposuresRequest, context: Any) -> pb.ListExposuresResponse:
        handlers = self._serving
        found = await handlers.shown_to.newest(request.user_id, request.max_answers)
        return looked_message(found, handlers.shown_to.items)

    async def GetExposure(self, request: pb.GetExposureRequest, context: Any) -> pb.GetExposureResponse:
        handlers = self._serving
        found = await handlers.shown_to.one(request.user_id, request.exposure_id)
        return pb.GetExposureResponse(answer=shown_message(found, handlers.shown_to.items))

    async def TailInteractions(
        self, request: pb.TailInteractionsRequest, context: Any
    ) -> AsyncIterator[pb.TailInteractionsResponse]:
        roles = request_context.roles.get()
        shows_users = roles is None or Role.SUPPORT in roles
        async for found in self._serving.tail(shows_users=shows_users, stops=lambda: self.stops()):
            yield tailed_message(found)

    async def GetHealth(self, request: pb.GetHealthRequest, context: Any) -> pb.GetHealthResponse:
        return health_message(await self._serving.get_health(request.minutes))

    async def ListDeadLetters(self, request: pb.ListDeadLettersRequest, context: Any) -> pb.ListDeadLettersResponse:
        return letters_message(*await self._serving.dead_letters.newest(request.topic, request.max_letters))

    async def ReplayDeadLetter(self, request: pb.ReplayDeadLetterRequest, context: Any) -> pb.ReplayDeadLetterResponse:
        place = Position(request.position.partition, request.position.offset)
        return replayed_message(await self._serving.dead_letters.replay(request.topic, place, preview=request.preview))

    async def GetVersionSets(self, request: pb.GetVersionSetsRequest, context: Any) -> pb.GetVersionSetsResponse:
        return sets_message(self.routes, await self.routes.report())

    async def ChangeVersionSet(self, request: pb.ChangeVersionSetRequest, context: Any) -> pb.ChangeVersionSetResponse:
        revision, is_applied = await self.operations.change_set(
            request.change, request.name, request.share, request.expected_revision
        )
        return pb.ChangeVersionSetResponse(revision=revision, is_applied=is_applied)

    async def ListRules(self, request: pb.ListRulesRequest, context: Any) -> pb.ListRulesResponse:
        found = self._serving.recommend.rules
        return pb.ListRulesResponse(
            revision=found.whole.revision, rules=map(rule_message, found.whole.rules), problems=found.problems
        )

    async def PutRules(self, request: pb.PutRulesRequest, context: Any) -> pb.PutRulesResponse:
        rules = rules_of(request.rules)
        for served in self.routes.open:
            served.handlers.recommend.rules.check(rules)
        revision, is_applied = await self.operations.rules(
            request.expected_revision, lambda standing: standing.replaced_by(rules), f"put {len(rules)} rules"
        )
        return pb.PutRulesResponse(revision=revision, is_applied=is_applied)

    async def ListExperiments(self, request: pb.ListExperimentsRequest, context: Any) -> pb.ListExperimentsResponse:
        found = self.routes.recorded
        return pb.ListExperimentsResponse(
            revision=found.revision,
            experiments=map(experiment_message, found.experiments.values()),
            problems=self.routes.left_out,
        )

    async def ChangeExperiment(self, request: pb.ChangeExperimentRequest, context: Any) -> pb.ChangeExperimentResponse:
        change, step = self.operations.change_experiment, request.WhichOneof("change") or ""
        if step == "create":
            new = request.create
            for name in ("started_time", "stopped_time", "first"):
                new.ClearField(name)
            new.state = new.STATE_CREATED
            revision, is_applied = await change.create(experiment_of(new), request.expected_revision)
        else:
            name = getattr(request, step) if step else ""
            revision, is_applied = await change(step, name, request.expected_revision)
        return pb.ChangeExperimentResponse(revision=revision, is_applied=is_applied)

    def _took(self, interactions: Sequence[Interaction]) -> None:
        for one in interactions:
            if self._serving.record.takes(one):
                self.routes.took(one.user_id, one.item_id)

    @property
    def _serving(self) -> Handlers:
        return self.routes.serving.handlers
