"""Route users to version sets, by the operator's newest record.

A request uses one set from start to end. If a set cannot be opened, the gateway's own set answers its users, and
`report` gives the reason.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType

import structlog

from services.algorithms.indexes.protocol import ESTIMATE
from services.algorithms.rules.team_draft import BOTH, team_draft
from services.contracts.topics.experiments import Arm, Assignment, Experiment, Experiments
from services.contracts.topics.rules import StandingRules
from services.contracts.topics.version_sets import VersionSet, VersionSets
from services.gateway.domain import Recommendation, RecommendQuery
from services.gateway.handlers import Handlers
from services.gateway.ports import Refreshers
from services.gateway.version_sets.shadow import Shadow, ShadowReport
from services.platform.errors import FreshetError, InvalidRequest

log = structlog.get_logger()

# The grace period for calls in a retired set: longer than any call.
_GRACE_S = 5.0


async def _nothing() -> None:
    pass


async def _no_problem() -> str:
    return ""


@dataclass(eq=False, kw_only=True, slots=True)
class ServedSet:
    """An open set. shadowed: answers without side effects. check: returns why processes do not serve the set's model
    ("": they do). answered: the number of answers of Recommend.
    """

    handlers: Handlers
    model_version: str
    refreshers: Refreshers
    shadowed: Callable[[RecommendQuery], Awaitable[Recommendation]]
    check: Callable[[], Awaitable[str]] = _no_problem
    close: Callable[[], Awaitable[None]] = _nothing
    answered: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SetReport:
    """A recorded set's state in this gateway. problem: why the set is not ready, "" if it is."""

    of: VersionSet
    problem: str
    answered: int
    shadow: ShadowReport | None


@dataclass(eq=False, kw_only=True)
class Routes:
    """Routes requests. own: the set of the settings. open_set: opens another set. check: raises InvalidRequest for an
    experiment that the own set's model cannot apply.
    """

    own: ServedSet
    open_set: Callable[[VersionSet], Awaitable[ServedSet]]
    check: Callable[[Experiment], None] = lambda one: None
    rng: Random = field(default_factory=Random)
    sets: VersionSets | None = field(default=None, init=False)
    # experiments: the ones applied here. recorded: all. left_out: by name, why an experiment is not applied.
    experiments: Experiments = field(default_factory=Experiments, init=False)
    recorded: Experiments = field(default_factory=Experiments, init=False)
    left_out: dict[str, str] = field(default_factory=dict, init=False)
    standing: StandingRules | None = field(default=None, init=False)
    _sets: dict[str, ServedSet] = field(default_factory=dict, init=False)
    _problems: dict[str, str] = field(default_factory=dict, init=False)
    _shadow: Shadow | None = field(default=None, init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def of(self, user_id: str) -> ServedSet:
        """Return the set that answers this user ("": no user)."""
        if self.sets is None:
            return self.own
        return self._sets.get(self.sets.set_for(user_id), self.own)

    def assigned(
        self, user_id: str, context: Mapping[str, str] = MappingProxyType({}), forced: Mapping[str, str] | None = None
    ) -> tuple[ServedSet, tuple[Assignment, ...]]:
        """Return a request's set and arms, without arms whose set is not open here.

        Raises: InvalidRequest for impossible forced arms.
        """
        served, assignments = self.of(user_id), []
        for one in self.experiments.assigned(user_id, context, forced):
            arms = one.experiment.arms if one.arm is None else (one.arm,)
            if all(self.set_of(arm, served) is not None for arm in arms):
                served = (self.set_of(one.arm, served) or served) if one.arm is not None else served
                assignments.append(one)
        return served, tuple(assignments)

    def set_of(self, arm: Arm, default: ServedSet) -> ServedSet | None:
        """Return an arm's set; None if it is not open here."""
        return self._sets.get(arm.version_set) if arm.version_set else default

    def apply_experiments(self, experiments: Experiments) -> None:
        """Apply experiments. A running one that cannot be applied is left out and logged."""
        kept, self.recorded, self.left_out = dict(experiments.experiments), experiments, {}
        for one in experiments.running:
            try:
                self.check(one)
            except InvalidRequest as exc:
                log.error("experiment_not_held", experiment=one.name, reason=exc.message)
                self.left_out[one.name] = exc.message
                del kept[one.name]
        self.experiments = replace(experiments, experiments=kept)

    def apply_rules(self, standing: StandingRules) -> None:
        self.standing = standing
        for served in self.open:
            served.handlers.recommend.rules.apply(standing)

    @property
    def open(self) -> set[ServedSet]:
        return {self.own, *self._sets.values()}

    @property
    def serving(self) -> ServedSet:
        """The set for users outside the canary, and for requests without a user."""
        return self.of("")

    @property
    def others(self) -> Sequence[ServedSet]:
        serving = self.serving
        return [served for served in self._sets.values() if served is not serving]

    def answered(self, served: ServedSet, query: RecommendQuery, answer: Recommendation) -> None:
        served.answered += 1
        if self._shadow is not None and served is not self._sets.get(self._shadow.name):
            self._shadow.beside(query, answer)

    def took(self, user_id: str, item_id: str) -> None:
        if self._shadow is not None:
            self._shadow.took(user_id, item_id)

    async def interleaved(
        self, query: RecommendQuery, mixed: Assignment, default: ServedSet
    ) -> tuple[ServedSet, Recommendation]:
        """Return the first arm's set, and its answer with items drafted from both arms' answers, without certificate.

        Raises: as `Recommend`.
        """
        arms = mixed.experiment.arms
        first, second = (self.set_of(arm, default) or default for arm in arms)
        sides = [served.shadowed(_of_arm(query, mixed, arm)) for served, arm in zip((first, second), arms, strict=True)]
        one, other = await asyncio.gather(*sides)
        ranking, against = ([item.item_id for item in answer.items] for answer in (one, other))
        item_ids, teams = team_draft(ranking, against, query.k, self.rng)
        found = [{item.item_id: item for item in answer.items} for answer in (one, other)]
        found.append(found[1] | found[0])  # the items of `BOTH`
        items = [
            replace(found[team][item_id], propensity=1.0 if team == BOTH else 0.5)
            for item_id, team in zip(item_ids, teams, strict=True)
        ]
        recommend = first.handlers.recommend
        answer = replace(
            one,
            items=items,
            certificate=ESTIMATE,
            degradations=list(dict.fromkeys([*one.degradations, *other.degradations])),
            searched_share=min(one.searched_share, other.searched_share),
            token_honoured=one.token_honoured and other.token_honoured,
            assignments=query.assignments,
            exposure_id=recommend.exposures.shown(
                "recommend",
                query.user_id,
                items,
                model_version=one.model_version,
                index_version=one.index_version,
                context=query.context,
                absence_bucket=one.absence_bucket,
                assignments=query.assignments,
                teams=teams,
                rules_revision=one.rules_revision,
            ),
        )
        recommend.metrics.answered(answer, had_token=query.token is not None)
        return first, answer

    async def apply(self, sets: VersionSets) -> None:
        """Apply a record. Sets that cannot be opened are left out and reported."""
        served: dict[str, ServedSet] = {}
        problems: dict[str, str] = {}
        for name, one in sets.sets.items():
            before = self._sets.get(name)
            if one.model_version == self.own.model_version:
                served[name] = self.own
            elif before is not None and self.sets is not None and self.sets.sets[name] == one:
                served[name] = before
            else:
                try:
                    served[name] = await self.open_set(one)
                except (FreshetError, OSError, ValueError, MemoryError) as exc:
                    problems[name] = str(exc)
                    log.error("version_set_not_held", set=name, reason=str(exc))
        gone = [one for one in self._sets.values() if one is not self.own and one not in served.values()]
        # This must not `await`, so that a request sees one record.
        self._sets, self._problems, self.sets = served, problems, sets
        if self.standing is not None:
            self.apply_rules(self.standing)
        old, self._shadow = self._shadow, self._shadow_of(sets)
        if old is not None and old is not self._shadow:
            await old.close()
        for left in gone:
            task = asyncio.create_task(self._close(left))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def report(self) -> list[SetReport]:
        sets = self.sets or VersionSets.of_one(own_set(self.own.model_version))
        names = list(sets.sets)
        problems = await asyncio.gather(*(self._problem(name) for name in names))
        return [
            SetReport(
                of=sets.sets[name],
                problem=problem,
                answered=self._sets.get(name, self.own).answered if name not in self._problems else 0,
                shadow=self._shadow.report() if self._shadow is not None and self._shadow.name == name else None,
            )
            for name, problem in zip(names, problems, strict=True)
        ]

    async def close(self) -> None:
        if self._shadow is not None:
            await self._shadow.close()
        await asyncio.gather(*self._closing)
        for one in self._sets.values():
            if one is not self.own:
                await one.close()

    async def _problem(self, name: str) -> str:
        return self._problems.get(name) or await self._sets.get(name, self.own).check()

    def _shadow_of(self, sets: VersionSets) -> Shadow | None:
        wanted = sets.shadow
        if wanted is None or wanted.name not in self._sets:
            return None
        if self._shadow is not None and (self._shadow.name, self._shadow.share) == (wanted.name, wanted.share):
            return self._shadow
        return Shadow(wanted.name, self._sets[wanted.name].shadowed, share=wanted.share, rng=self.rng)

    async def _close(self, served: ServedSet) -> None:
        await asyncio.sleep(_GRACE_S)
        await served.close()


def own_set(model_version: str) -> VersionSet:
    """Return the set of a gateway without an operator's record."""
    return VersionSet(name=model_version, model_version=model_version, bundle="")


def _of_arm(query: RecommendQuery, mixed: Assignment, arm: Arm) -> RecommendQuery:
    own = replace(mixed, arm=arm)
    return replace(query, assignments=tuple(own if one is mixed else one for one in query.assignments))
