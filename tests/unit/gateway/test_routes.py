"""Version sets at the gateway: whom which set answers, what happens when the record changes, and the shadow beside."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random

import pytest
from freshet.v1 import events_pb2, gateway_pb2
from gateway_scene import Scene, memory_operations

from services.contracts.operations import Operation
from services.contracts.topics.experiments import Arm, Experiment, Experiments
from services.contracts.topics.version_sets import Share, VersionSet, VersionSets
from services.gateway.domain import RecommendQuery
from services.gateway.server import GatewayServicer
from services.gateway.version_sets.routes import Routes, ServedSet
from services.platform import request_context
from services.platform.errors import Conflict, DependencyUnavailable, InvalidRequest, NotFound, PreconditionFailed

A = VersionSet(name="a", model_version="m1", bundle="/a")
B = VersionSet(name="b", model_version="m2", bundle="/b")
BOTH = VersionSets.of_one(A).staged(B)


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Sets:
    """Two scenes, a set each; `opened`, `closed`: names."""

    def __init__(self) -> None:
        self.scenes = {"a": Scene(), "b": Scene()}
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.failure: Exception | None = None
        self.routes = Routes(own=self._held("a", "m1"), open_set=self._open, rng=Random(0))
        self.servicer = GatewayServicer(self.routes, memory_operations(self.routes))

    def _held(self, name: str, model_version: str) -> ServedSet:
        handlers = self.scenes[name].handlers

        async def close() -> None:
            self.closed.append(name)

        return ServedSet(
            handlers=handlers,
            model_version=model_version,
            refreshers=self.scenes[name].refreshers,
            shadowed=handlers.recommend,
            close=close,
        )

    async def _open(self, one: VersionSet) -> ServedSet:
        if self.failure is not None:
            raise self.failure
        self.opened.append(one.name)
        return self._held(one.name, one.model_version)

    async def ask(self, user_id: str) -> str:
        """The set that a Recommend of this user reached."""
        before = {name: len(scene.candidates.query_states) for name, scene in self.scenes.items()}
        await self.servicer.Recommend(gateway_pb2.RecommendRequest(user_id=user_id, k=2), None)
        (reached,) = (n for n, scene in self.scenes.items() if len(scene.candidates.query_states) > before[n])
        return reached


async def test_without_a_record_the_own_set_answers() -> None:
    sets = Sets()
    assert await sets.ask("ann") == "a"
    (report,) = await sets.routes.report()
    assert (report.of.model_version, report.problem, report.answered) == ("m1", "", 1)


async def test_the_record_says_who_answers_and_nothing_is_opened_twice() -> None:
    sets = Sets()
    await sets.routes.apply(BOTH)
    assert await sets.ask("ann") == "a"
    canary = BOTH.canaried("b", 1.0, "salt")
    await sets.routes.apply(canary)
    assert await sets.ask("ann") == "b"
    await sets.routes.apply(canary.promoted("b"))
    assert (await sets.ask("ann"), sets.routes.serving.model_version) == ("b", "m2")
    await sets.routes.apply(canary.promoted("b").rolled_back())
    assert await sets.ask("ann") == "a"
    assert (sets.opened, sets.closed) == (["b"], [])


async def test_a_retired_set_is_closed_once_its_last_calls_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.version_sets.routes._GRACE_S", 0.01)
    sets = Sets()
    await sets.routes.apply(BOTH)
    await sets.routes.apply(BOTH.retired("b"))
    assert sets.closed == []
    await until(lambda: sets.closed == ["b"])
    await sets.routes.apply(BOTH.promoted("b"))
    await sets.routes.apply(BOTH.promoted("b").retired("a"))
    await sets.routes.close()
    assert sets.closed == ["b", "b"]  # the own set is its process's to close


async def test_a_set_that_cannot_be_held_answers_nobody_and_says_why() -> None:
    sets = Sets()
    sets.failure = ValueError("/b: no manifest.json")
    await sets.routes.apply(BOTH.canaried("b", 1.0, "salt"))
    assert await sets.ask("ann") == "a"
    problems = {one.of.name: one.problem for one in await sets.routes.report()}
    assert problems == {"a": "", "b": "/b: no manifest.json"}
    # The next record tries again.
    sets.failure = None
    await sets.routes.apply(BOTH.canaried("b", 1.0, "salt").canaried("b", 0.9999, "salt"))
    assert await sets.ask("ann") == "b"


async def test_forgetting_asks_the_refreshers_of_both_sets() -> None:
    sets = Sets()
    await sets.routes.apply(BOTH)
    assert [held.refreshers for held in sets.routes.others] == [sets.scenes["b"].refreshers]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_shadow_is_asked_beside_and_counts_what_people_took_next(is_streamed: bool) -> None:
    sets = Sets()
    await sets.routes.apply(BOTH.shadowed("b", 1.0))
    answer = await sets.servicer.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2), None)
    shadow = sets.routes._shadow
    assert shadow is not None
    await until(lambda: shadow.report().requests == 1)
    taken = events_pb2.Interaction(user_id="ann", item_id=answer.items[0].item_id)
    if is_streamed:

        async def arriving() -> AsyncIterator[gateway_pb2.StreamInteractionsRequest]:
            for _ in range(2):
                yield gateway_pb2.StreamInteractionsRequest(interaction=taken)

        await sets.servicer.StreamInteractions(arriving(), None)
    else:
        await sets.servicer.RecordInteractions(gateway_pb2.RecordInteractionsRequest(interactions=[taken, taken]), None)
    said = await sets.servicer.GetVersionSets(gateway_pb2.GetVersionSetsRequest(), None)
    shadow = next(one.shadow for one in said.sets if one.set.name == "b")
    assert (shadow.requests, shadow.failed, shadow.overlap, shadow.score_shift) == (1, 0, 1.0, 0.0)
    assert (shadow.taken, shadow.taken_from_answer, shadow.taken_from_shadow) == (1, 1, 1)
    assert len(sets.scenes["b"].candidates.query_states) == 1
    assert (said.revision, said.serving, said.shadow.name, said.shadow.share) == (2, "a", "b", 1.0)


async def test_a_shadow_fails_by_itself_and_takes_no_more_than_its_part() -> None:
    sets = Sets()
    await sets.routes.apply(BOTH.shadowed("b", 1.0))
    shadow = sets.routes._shadow
    assert shadow is not None
    going = asyncio.Event()

    async def slow(query: RecommendQuery) -> None:
        await going.wait()
        raise DependencyUnavailable("candidates are away")

    shadow._ask = slow  # type: ignore[assignment]
    for _ in range(5):
        await sets.servicer.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2), None)
    await asyncio.sleep(0)
    going.set()
    await until(lambda: shadow.report().failed == 2)
    report = shadow.report()
    assert (report.requests, report.skipped) == (2, 3)


async def step(servicer: GatewayServicer, change: str, name: str = "", *, revision: int, share: float = 0.0) -> int:
    number = gateway_pb2.ChangeVersionSetRequest.Change.Value(f"CHANGE_{change}")
    request = gateway_pb2.ChangeVersionSetRequest(change=number, name=name, share=share, expected_revision=revision)
    return (await servicer.ChangeVersionSet(request, None)).revision


async def test_a_gateway_that_has_not_read_the_sets_promotes_none() -> None:
    sets = Sets()
    staged = Operation(after=BOTH, operation="stage b", operator="ann", operation_id="1", time_ms=1)
    servicer = GatewayServicer(sets.routes, memory_operations(sets.routes, staged))
    with pytest.raises(PreconditionFailed, match="no set was ever staged, or this gateway has not read it yet"):
        await step(servicer, "PROMOTE", "b", revision=1)


async def test_an_operator_takes_a_staged_set_to_all_users_and_back() -> None:
    sets = Sets()
    with pytest.raises(PreconditionFailed, match="no set was ever staged"):
        await step(sets.servicer, "PROMOTE", "b", revision=0)
    await sets.routes.apply(BOTH)
    made = Operation(after=BOTH, operation="stage b", operator="ann", operation_id="1", time_ms=1)
    operations = memory_operations(sets.routes, made)
    servicer, control = GatewayServicer(sets.routes, operations), operations.change_set.operate.control
    assert await step(servicer, "SHADOW", "b", revision=1, share=0.5) == 2
    request_context.caller.set("ops")
    assert await step(servicer, "CANARY", "b", revision=2, share=0.05) == 3
    last = control.read().last
    assert last is not None
    assert (last.operation, last.operator) == ("canary b 5.000%", "ops")
    assert (last.after.canary, last.after.shadow) == (Share(name="b", share=0.05), Share(name="b", share=0.5))
    with pytest.raises(Conflict, match="expected_revision=2 allowed: 3, the present one"):
        await step(servicer, "PROMOTE", "b", revision=2)
    assert await step(servicer, "PROMOTE", "b", revision=3) == 4
    assert await step(servicer, "ROLL_BACK", revision=4) == 5
    last = control.read().last
    assert last is not None
    assert last.after.serving == "a"
    with pytest.raises(PreconditionFailed, match="set 'a' serves: promote another one"):
        await step(servicer, "RETIRE", "a", revision=5)
    assert await step(servicer, "RETIRE", "b", revision=5) == 6


async def test_a_promotion_needs_a_ready_set_and_warm_users_and_a_retirement_no_arm() -> None:
    sets = Sets()
    both = VersionSets.of_one(A).staged(replace(B, model_version="m3"))
    await sets.routes.apply(both)
    with pytest.raises(PreconditionFailed, match=r"10 of 100 users are warm \(10.0%\).*: freshet model warm b"):
        await step(sets.servicer, "PROMOTE", "b", revision=1)
    sets.failure = DependencyUnavailable("no bundle here")
    await sets.routes.apply(BOTH)
    with pytest.raises(PreconditionFailed, match="set 'b': no bundle here"):
        await step(sets.servicer, "PROMOTE", "b", revision=1)
    with pytest.raises(NotFound, match="set='c' allowed: a, b"):
        await step(sets.servicer, "PROMOTE", "c", revision=1)
    arms = (Arm(name="control", share=0.5), Arm(name="new", share=0.5, version_set="b"))
    sets.routes.apply_experiments(Experiments().created(Experiment(name="one", arms=arms)).started("one", 1))
    with pytest.raises(PreconditionFailed, match="set 'b' answers an arm of running experiment 'one'"):
        await step(sets.servicer, "RETIRE", "b", revision=1)
    with pytest.raises(InvalidRequest, match="change=0 allowed: 1-5"):
        await step(sets.servicer, "UNSPECIFIED", "b", revision=1)
