"""Experiments at the gateway: an arm's settings reach its users' answers, and exposures say so."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from freshet.v1 import common_pb2, gateway_pb2
from gateway_scene import Scene, memory_operations

from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.topics.experiments import Arm, Experiment, Experiments, experiment_message
from services.contracts.topics.exposures import Exposure
from services.contracts.topics.version_sets import VersionSet, VersionSets
from services.gateway.domain import RecommendQuery
from services.gateway.recommend.recommend import with_arms
from services.gateway.server import GatewayServicer
from services.gateway.version_sets.routes import Routes, ServedSet
from services.platform import request_context
from services.platform.errors import Conflict, InvalidRequest, NotFound, PermissionDenied

BURIED = Rule(name="bury-x", which=ItemFilter(exclude_seen=False, allow_categories=("x",)), bury=900.0)
A = VersionSet(name="a", model_version="m1", bundle="/a")
B = VersionSet(name="b", model_version="m2", bundle="/b")


def experiment(other: Arm, **changes: object) -> Experiment:
    arms = (Arm(name="control", share=0.5), other)
    return replace(Experiment(name="one", arms=arms, salt="salt"), **changes)  # type: ignore[arg-type]


def running(one: Experiment) -> Experiments:
    return Experiments().created(one).started(one.name, 1)


def user_of(arm: str, experiments: Experiments) -> str:
    """A user who has this arm."""
    users = (f"user-{number}" for number in range(1_000))
    return next(
        u
        for u in users
        if experiments.assigned(u, {})[0].arm
        == next(one for one in experiments.experiments["one"].arms if one.name == arm)
    )


class Gateway:
    """Two sets, `a` serving; `b` is a scene of its own, whose candidates rank the other way round."""

    def __init__(self, experiments: Experiments, check: Callable[[Experiment], None] = lambda one: None) -> None:
        self.scenes = {"a": Scene(), "b": Scene()}
        self.scenes["b"].candidates.item_ids.reverse()
        self.routes = Routes(own=self._held("a", "m1"), open_set=self._open, rng=Random(0), check=check)
        self.routes.apply_experiments(experiments)
        self.servicer = GatewayServicer(self.routes, memory_operations(self.routes))

    def _held(self, name: str, model_version: str) -> ServedSet:
        scene = self.scenes[name]
        unseen = Scene(candidates=scene.candidates)
        return ServedSet(
            handlers=scene.handlers,
            model_version=model_version,
            refreshers=scene.refreshers,
            shadowed=unseen.handlers.recommend,
        )

    async def _open(self, one: VersionSet) -> ServedSet:
        return self._held(one.name, one.model_version)

    async def ask(self, user_id: str, **asked: object) -> gateway_pb2.RecommendResponse:
        return await self.servicer.Recommend(gateway_pb2.RecommendRequest(user_id=user_id, k=4, **asked), None)  # type: ignore[arg-type]

    def exposures(self, name: str = "a") -> list[Exposure]:
        return [exposure for _, exposure in self.scenes[name].exposures.written]


def said(answer: gateway_pb2.RecommendResponse) -> list[tuple[str, str, float]]:
    return [(one.experiment, one.arm, one.share) for one in answer.assignments]


async def test_an_arm_s_rules_change_its_users_answers_and_exposures_name_it() -> None:
    experiments = running(experiment(Arm(name="buried", share=0.5, rules=(BURIED,))))
    gateway = Gateway(experiments)
    # Nobody has a state but "ann"; a request's own history gives one.
    history = [gateway_pb2.HistoryEvent(item_id="f")]
    answers = {arm: await gateway.ask(user_of(arm, experiments), history=history) for arm in ("control", "buried")}
    assert {arm: said(answer) for arm, answer in answers.items()} == {
        "control": [("one", "control", 0.5)],
        "buried": [("one", "buried", 0.5)],
    }
    changed = [item for item in answers["buried"].items if "bury-x" in item.rules]
    assert {item.item_id for item in answers["control"].items} & {"a", "b", "d"}
    assert all(item.score < -800 for item in changed)
    assert [one.assignments for one in gateway.exposures()] == [
        (("one", "control", 0.5),),
        (("one", "buried", 0.5),),
    ]


def test_a_request_s_own_settings_stay() -> None:
    arm = Arm(
        name="arm", share=0.5, diversity=0.3, max_per_category=2, new_item_share=0.2, max_gap=0.1, rules=(BURIED,)
    )
    (assigned,) = running(experiment(arm)).assigned("user", {}, {"one": "arm"})
    plain = with_arms(RecommendQuery(user_id="user", assignments=(assigned,)))
    assert (plain.diversity, plain.max_per_category, plain.new_item_share) == (0.3, 2, 0.2)
    assert (plain.max_gap, plain.rules) == (0.1, (BURIED,))
    own = with_arms(
        RecommendQuery(user_id="user", diversity=0.9, max_per_category=1, max_gap=0.0, assignments=(assigned,))
    )
    assert (own.diversity, own.max_per_category, own.max_gap) == (0.9, 1, 0.0)
    page = with_arms(RecommendQuery(user_id="user", page_token="p", assignments=(assigned,)))
    assert page.max_gap is None


async def test_an_arm_s_version_set_answers_all_of_its_users_calls() -> None:
    experiments = running(experiment(Arm(name="next", share=0.5, version_set="b")))
    gateway = Gateway(experiments)
    await gateway.routes.apply(VersionSets.of_one(A).staged(B))
    user = user_of("next", experiments)
    await gateway.ask(user)
    await gateway.servicer.Search(gateway_pb2.GatewayServiceSearchRequest(user_id=user, query="space", k=2), None)
    await gateway.servicer.Similar(gateway_pb2.GatewayServiceSimilarRequest(user_id=user, item_id="a", k=2), None)
    assert [(one.surface, one.assignments) for one in gateway.exposures("b")] == [
        (surface, (("one", "next", 0.5),)) for surface in ("recommend", "search", "similar")
    ]
    assert gateway.exposures("a") == []


async def test_a_search_s_context_is_recorded_and_limits_experiments_as_a_recommendation_s() -> None:
    experiments = running(experiment(Arm(name="next", share=0.5), context={"device": "tv"}))
    gateway = Gateway(experiments)
    user = "ann"
    for context in ({"device": "tv"}, {"surface": "console"}):
        search = gateway_pb2.GatewayServiceSearchRequest(user_id=user, query="space", k=2, context=context)
        await gateway.servicer.Search(search, None)
        similar = gateway_pb2.GatewayServiceSimilarRequest(user_id=user, item_id="a", k=2, context=context)
        await gateway.servicer.Similar(similar, None)
    assert [(one.surface, one.context, len(one.assignments)) for one in gateway.exposures()] == [
        (surface, context, number)
        for context, number in (({"device": "tv"}, 1), ({"surface": "console"}, 0))
        for surface in ("search", "similar")
    ]


async def test_an_arm_whose_set_is_not_held_answers_nobody_and_no_exposure_names_it() -> None:
    experiments = running(experiment(Arm(name="next", share=0.5, version_set="b")))
    gateway = Gateway(experiments)
    assert said(await gateway.ask(user_of("next", experiments))) == []
    assert [one.assignments for one in gateway.exposures()] == [()]


async def test_an_experiment_that_the_model_cannot_answer_by_is_left_out() -> None:
    def refuse(one: Experiment) -> None:
        raise InvalidRequest.of("arms[1].rules[0].where", "colour", "price, maker")

    gateway = Gateway(running(experiment(Arm(name="buried", share=0.5, rules=(BURIED,)))), refuse)
    assert said(await gateway.ask("user-1")) == []


async def test_an_interleaved_answer_is_drafted_from_both_arms() -> None:
    experiments = running(experiment(Arm(name="next", share=0.5, version_set="b"), interleaved=True))
    gateway = Gateway(experiments)
    await gateway.routes.apply(VersionSets.of_one(A).staged(B))
    answer = await gateway.ask("ann")
    (exposure,) = gateway.exposures("a")
    assert gateway.exposures("b") == []
    assert exposure.exposure_id == answer.exposure_id
    assert list(exposure.item_ids) == [item.item_id for item in answer.items]
    assert sorted(exposure.teams) == [0, 0, 1, 1]
    assert list(exposure.propensities) == [0.5] * 4
    assert (said(answer), exposure.assignments) == ([("one", "", 1.0)], (("one", "", 1.0),))
    assert answer.certificate == common_pb2.Certificate(kind="KIND_ESTIMATE", interleaved=True)
    rankings = [
        [item.item_id for item in (await gateway.scenes[name].recommend(RecommendQuery(user_id="ann", k=4))).items]
        for name in "ab"
    ]
    assert rankings[0] != rankings[1]
    for team, ranking in enumerate(rankings):
        picked = [item for item, of in zip(exposure.item_ids, exposure.teams, strict=True) if of == team]
        assert picked == [item for item in ranking if item in picked]


async def test_a_list_of_pages_takes_no_part_in_interleaving() -> None:
    experiments = running(experiment(Arm(name="next", share=0.5, version_set="b"), interleaved=True))
    gateway = Gateway(experiments)
    await gateway.routes.apply(VersionSets.of_one(A).staged(B))
    first = await gateway.ask("ann", page_depth=5)
    second = await gateway.ask("ann", page_token=first.next_page_token)
    assert (said(first), said(second)) == ([], [])
    assert [one.teams for one in gateway.exposures()] == [(), ()]


@pytest.mark.parametrize(("roles", "is_allowed"), [(None, True), ({"operator"}, True), ({"recommend"}, False)])
async def test_only_an_operator_chooses_an_arm(roles: set[str] | None, is_allowed: bool) -> None:
    gateway = Gateway(running(experiment(Arm(name="buried", share=0.5, rules=(BURIED,)))))
    token = request_context.roles.set(None if roles is None else frozenset(roles))
    try:
        if is_allowed:
            assert said(await gateway.ask("ann", arms={"one": "buried"})) == [("one", "buried", 0.0)]
        else:
            with pytest.raises(PermissionDenied, match="arms needs the role operator"):
                await gateway.ask("ann", arms={"one": "buried"})
    finally:
        request_context.roles.reset(token)


async def test_an_operator_creates_starts_stops_and_removes_by_revision() -> None:
    gateway = Gateway(Experiments())
    new = experiment_message(
        experiment(Arm(name="few", share=0.5, max_per_category=1, max_gap=0.0), first=0.3, started_ms=5)
    )

    async def change(expected: int, **step: object) -> gateway_pb2.ChangeExperimentResponse:
        request = gateway_pb2.ChangeExperimentRequest(expected_revision=expected, **step)  # type: ignore[arg-type]
        return await gateway.servicer.ChangeExperiment(request, None)

    async def listed() -> gateway_pb2.ListExperimentsResponse:
        return await gateway.servicer.ListExperiments(gateway_pb2.ListExperimentsRequest(), None)

    assert (await listed()).revision == 0
    created = await change(0, create=new)
    assert (created.revision, created.is_applied) == (1, True)
    (one,) = (await listed()).experiments
    assert (one.name, one.state, one.first, one.HasField("started_time")) == ("one", one.STATE_CREATED, 0.0, False)
    assert one.salt not in ("", "salt")
    assert said(await gateway.ask("user-1")) == []
    await change(1, start="one")
    assert said(await gateway.ask("user-1")) != []
    with pytest.raises(Conflict, match="expected_revision=1 allowed: 2"):
        await change(1, stop="one")
    await change(2, stop="one")
    assert said(await gateway.ask("user-1")) == []
    await change(3, remove="one")
    found = await listed()
    assert (found.revision, len(found.experiments)) == (4, 0)


async def test_a_bad_change_of_an_experiment_changes_nothing() -> None:
    def refuse(one: Experiment) -> None:
        if one.arms[1].rules:
            raise InvalidRequest.of("arms[1].rules[0].where", "colour", "price, maker")

    gateway = Gateway(Experiments(), refuse)
    for arm, error, match in (
        (Arm(name="b", share=0.4), InvalidRequest, "shares that add up to 0.9"),
        (Arm(name="b", share=0.5, version_set="gone"), NotFound, "version_set='gone' allowed: none is staged"),
        (Arm(name="b", share=0.5, rules=(BURIED,)), InvalidRequest, "colour"),
    ):
        with pytest.raises(error, match=match):
            await gateway.servicer.ChangeExperiment(
                gateway_pb2.ChangeExperimentRequest(create=experiment_message(experiment(arm))), None
            )
    for request, error in (({"start": "one"}, NotFound), ({}, InvalidRequest)):
        with pytest.raises(error):
            await gateway.servicer.ChangeExperiment(gateway_pb2.ChangeExperimentRequest(**request), None)
    assert gateway.routes.recorded == Experiments()
    # As another gateway's operator made it, whose model has colours.
    gateway.routes.apply_experiments(running(experiment(Arm(name="buried", share=0.5, rules=(BURIED,)))))
    found = await gateway.servicer.ListExperiments(gateway_pb2.ListExperimentsRequest(), None)
    assert [one.name for one in found.experiments] == list(found.problems) == ["one"]
