"""The RPCs of gateway.proto: messages become dataclasses and answers become messages."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from freshet.v1 import gateway_pb2, gateway_pb2_grpc

from services.contracts.topics.experiments import experiment_message, experiment_of
from services.contracts.topics.interactions import Interaction
from services.contracts.wire import rule_message, rules_of
from services.gateway.domain import (
    Impression,
    Recommendation,
    RecommendQuery,
    rules_of_arms,
)
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
from services.gateway.version_sets.interleaved import Interleaved
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
        """stops: whether the process is stopping, so that streams end."""
        self.routes, self.operations, self.tracing, self.stops = routes, operations, tracing, stops
        self.interleaved = Interleaved(rng=routes.rng)

    async def Recommend(self, request: gateway_pb2.RecommendRequest, context: Any) -> gateway_pb2.RecommendResponse:
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
        first, second = (self.routes.set_of(arm, served) or served for arm in mixed.experiment.arms)
        return first, await self.interleaved(query, mixed, first, second)

    async def Search(
        self, request: gateway_pb2.GatewayServiceSearchRequest, context: Any
    ) -> gateway_pb2.GatewayServiceSearchResponse:
        query = await in_turn(search_query, request)
        served, assignments = self.routes.assigned(query.user_id, query.context)
        return found_message(await served.handlers.search(replace(query, assignments=assignments)))

    async def Similar(
        self, request: gateway_pb2.GatewayServiceSimilarRequest, context: Any
    ) -> gateway_pb2.GatewayServiceSimilarResponse:
        query = await in_turn(similar_query, request)
        served, assignments = self.routes.assigned(query.user_id, query.context)
        return similar_message(await served.handlers.similar(replace(query, assignments=assignments)))

    async def RecordInteractions(
        self, request: gateway_pb2.RecordInteractionsRequest, context: Any
    ) -> gateway_pb2.RecordInteractionsResponse:
        interactions = await in_turn(interactions_of, request, now_ms())
        receipts = await self._serving.record(interactions)
        self._took(interactions)
        return gateway_pb2.RecordInteractionsResponse(receipts=map(receipt_message, receipts))

    async def StreamInteractions(
        self, requests: AsyncIterator[gateway_pb2.StreamInteractionsRequest], context: Any
    ) -> gateway_pb2.StreamInteractionsResponse:
        taken: list[Interaction] = []

        async def arriving() -> AsyncIterator[Interaction]:
            position = 0
            async for request in requests:
                taken.append(interaction_of(request.interaction, now_ms(), f"stream[{position}].interaction."))
                yield taken[-1]
                position += 1

        receipts = await self._serving.record.stream(arriving())
        self._took(taken)
        return gateway_pb2.StreamInteractionsResponse(receipts=map(receipt_message, receipts))

    async def RecordImpressions(
        self, request: gateway_pb2.RecordImpressionsRequest, context: Any
    ) -> gateway_pb2.RecordImpressionsResponse:
        seen = [Impression(one.position, one.item_id) for one in request.impressions]
        receipts = await self._serving.record_impressions(request.user_id, request.exposure_id, seen)
        return gateway_pb2.RecordImpressionsResponse(receipts=map(receipt_message, receipts))

    async def UndoInteraction(
        self, request: gateway_pb2.UndoInteractionRequest, context: Any
    ) -> gateway_pb2.UndoInteractionResponse:
        receipt = await self._serving.record.undo(request.user_id, request.event_id)
        return gateway_pb2.UndoInteractionResponse(receipt=receipt_message(receipt))

    async def Explain(self, request: gateway_pb2.ExplainRequest, context: Any) -> gateway_pb2.ExplainResponse:
        query = await in_turn(explain_query, request)
        served, assignments = self.routes.assigned(query.user_id)
        query = replace(query, arm_rules=rules_of_arms(assignments))
        return explanation_message(await served.handlers.explain(query))

    async def GetFreshness(
        self, request: gateway_pb2.GetFreshnessRequest, context: Any
    ) -> gateway_pb2.GetFreshnessResponse:
        return freshness_message(await self._serving.get_freshness())

    async def PutItems(self, request: gateway_pb2.PutItemsRequest, context: Any) -> gateway_pb2.PutItemsResponse:
        written = await self._serving.put_items(await in_turn(items_of, request), request.fields)
        return gateway_pb2.PutItemsResponse(num_written=written)

    async def ForgetUser(self, request: gateway_pb2.ForgetUserRequest, context: Any) -> gateway_pb2.ForgetUserResponse:
        report = await self._serving.forget_user(request.user_id, preview=request.preview)
        return gateway_pb2.ForgetUserResponse(**asdict(report))

    async def DescribeCatalogue(
        self, request: gateway_pb2.DescribeCatalogueRequest, context: Any
    ) -> gateway_pb2.DescribeCatalogueResponse:
        message = catalogue_message(await self._serving.describe_catalogue(request.max_categories))
        roles = request_context.roles.get()
        message.roles.extend(sorted(Role if roles is None else roles))
        return message

    async def GetItem(self, request: gateway_pb2.GetItemRequest, context: Any) -> gateway_pb2.GetItemResponse:
        return item_message(await self._serving.get_item(request.item_id))

    async def ListItems(self, request: gateway_pb2.ListItemsRequest, context: Any) -> gateway_pb2.ListItemsResponse:
        return items_message(*await self._serving.list_items(items_query(request)))

    async def GetUser(self, request: gateway_pb2.GetUserRequest, context: Any) -> gateway_pb2.GetUserResponse:
        served, _ = self.routes.assigned(request.user_id)
        found = await served.handlers.get_user(request.user_id, request.max_events, request.skip_events)
        return user_message(found)

    async def ListExposures(
        self, request: gateway_pb2.ListExposuresRequest, context: Any
    ) -> gateway_pb2.ListExposuresResponse:
        handlers = self._serving
        found = await handlers.shown_to.newest(request.user_id, request.max_answers)
        return looked_message(found, handlers.shown_to.titles)

    async def GetExposure(
        self, request: gateway_pb2.GetExposureRequest, context: Any
    ) -> gateway_pb2.GetExposureResponse:
        handlers = self._serving
        found = await handlers.shown_to.one(request.user_id, request.exposure_id)
        return gateway_pb2.GetExposureResponse(answer=shown_message(found, handlers.shown_to.titles))

    async def TailInteractions(
        self, request: gateway_pb2.TailInteractionsRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.TailInteractionsResponse]:
        roles = request_context.roles.get()
        shows_users = roles is None or Role.SUPPORT in roles
        async for found in self._serving.tail(shows_users=shows_users, stops=lambda: self.stops()):
            yield tailed_message(found)

    async def GetHealth(self, request: gateway_pb2.GetHealthRequest, context: Any) -> gateway_pb2.GetHealthResponse:
        return health_message(await self._serving.get_health(request.minutes))

    async def ListDeadLetters(
        self, request: gateway_pb2.ListDeadLettersRequest, context: Any
    ) -> gateway_pb2.ListDeadLettersResponse:
        return letters_message(*await self._serving.dead_letters.newest(request.topic, request.max_letters))

    async def ReplayDeadLetter(
        self, request: gateway_pb2.ReplayDeadLetterRequest, context: Any
    ) -> gateway_pb2.ReplayDeadLetterResponse:
        place = Position(request.position.partition, request.position.offset)
        return replayed_message(await self._serving.dead_letters.replay(request.topic, place, preview=request.preview))

    async def GetVersionSets(
        self, request: gateway_pb2.GetVersionSetsRequest, context: Any
    ) -> gateway_pb2.GetVersionSetsResponse:
        return sets_message(self.routes, await self.routes.report())

    async def ChangeVersionSet(
        self, request: gateway_pb2.ChangeVersionSetRequest, context: Any
    ) -> gateway_pb2.ChangeVersionSetResponse:
        revision, is_applied = await self.operations.change_set(
            request.change, request.name, request.share, request.expected_revision
        )
        return gateway_pb2.ChangeVersionSetResponse(revision=revision, is_applied=is_applied)

    async def ListRules(self, request: gateway_pb2.ListRulesRequest, context: Any) -> gateway_pb2.ListRulesResponse:
        found = self._serving.recommend.rules
        return gateway_pb2.ListRulesResponse(
            revision=found.whole.revision, rules=map(rule_message, found.whole.rules), problems=found.problems
        )

    async def PutRules(self, request: gateway_pb2.PutRulesRequest, context: Any) -> gateway_pb2.PutRulesResponse:
        rules = rules_of(request.rules)
        for served in self.routes.open:
            served.handlers.recommend.rules.check(rules)
        revision, is_applied = await self.operations.rules(
            request.expected_revision, lambda standing: standing.replaced_by(rules), f"put {len(rules)} rules"
        )
        return gateway_pb2.PutRulesResponse(revision=revision, is_applied=is_applied)

    async def ListExperiments(
        self, request: gateway_pb2.ListExperimentsRequest, context: Any
    ) -> gateway_pb2.ListExperimentsResponse:
        found = self.routes.recorded
        return gateway_pb2.ListExperimentsResponse(
            revision=found.revision,
            experiments=map(experiment_message, found.experiments.values()),
            problems=self.routes.left_out,
        )

    async def ChangeExperiment(
        self, request: gateway_pb2.ChangeExperimentRequest, context: Any
    ) -> gateway_pb2.ChangeExperimentResponse:
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
        return gateway_pb2.ChangeExperimentResponse(revision=revision, is_applied=is_applied)

    def _took(self, interactions: Sequence[Interaction]) -> None:
        for one in interactions:
            if self._serving.record.takes(one):
                self.routes.took(one.user_id, one.item_id)

    @property
    def _serving(self) -> Handlers:
        return self.routes.serving.handlers
