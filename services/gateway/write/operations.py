"""Handle PutRules, ChangeVersionSet and ChangeExperiment: write an operator's change to its topic.

The conditions are the same as in `freshet rules`, `freshet model` and `freshet experiments`.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Generic, TypeVar

from services.contracts.operation_log import Control
from services.contracts.operations import Revised
from services.contracts.topics.experiments import Experiment, Experiments
from services.contracts.topics.rules import StandingRules
from services.contracts.topics.version_sets import VersionSets
from services.gateway.version_sets.routes import Routes
from services.platform import request_context
from services.platform.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed
from services.user_state.values import now_ms
from services.user_state.warmth import WARM, Warmth

S = TypeVar("S", bound=Revised)
_APPLIED_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Operate(Generic[S]):
    """Writes to one topic. initial: returns the first state, or raises. applied: returns the revision in use here."""

    control: Control[S]
    initial: Callable[[], S]
    applied: Callable[[], int]

    async def __call__(self, expected_revision: int, change: Callable[[S], S], operation: str) -> tuple[int, bool]:
        """Write a change; return the new revision, and whether this gateway applies it.

        Raises: Conflict with the current revision; errors of `change` and `Control.write`.
        """
        revision = await asyncio.to_thread(self._written, expected_revision, change, operation)
        until = time.monotonic() + _APPLIED_S
        while True:
            if (is_applied := self.applied() >= revision) or time.monotonic() > until:
                return revision, is_applied
            await asyncio.sleep(0.02)

    def _written(self, expected: int, change: Callable[[S], S], operation: str) -> int:
        last = self.control.read().last
        present = self.initial() if last is None else last.after
        if present.revision != expected:
            raise Conflict(f"expected_revision={expected} allowed: {present.revision}, the present one")
        operator = request_context.caller.get() or "a caller without a key"
        return self.control.write(change(present), operation, operator).revision


class Change(IntEnum):
    """The numbers of Protobuf's `ChangeVersionSetRequest.Change`."""

    SHADOW = 1
    CANARY = 2
    PROMOTE = 3
    ROLL_BACK = 4
    RETIRE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeVersionSet:
    """The handler. measure: counts the users with current states of a model version."""

    routes: Routes
    operate: Operate[VersionSets]
    measure: Callable[[str], Awaitable[Warmth]]

    async def __call__(self, number: int, name: str, share: float, expected_revision: int) -> tuple[int, bool]:
        """Apply the change; return what `Operate` returns.

        Raises: InvalidRequest; NotFound; PreconditionFailed with what is missing; as `Operate`.
        """
        if number not in {int(one) for one in Change}:
            raise InvalidRequest.of("change", number, "1-5, see ChangeVersionSetRequest.Change")
        change, salt = Change(number), secrets.token_hex(8)
        if change is Change.PROMOTE:
            await self._check_promotion(name)
        elif change is Change.RETIRE:
            self.routes.experiments.check_no_arm(name)
        steps: dict[Change, Callable[[VersionSets], VersionSets]] = {
            Change.SHADOW: lambda sets: sets.shadowed(name, share),
            Change.CANARY: lambda sets: sets.canaried(name, share, salt),
            Change.PROMOTE: lambda sets: sets.promoted(name),
            Change.ROLL_BACK: lambda sets: sets.rolled_back(),
            Change.RETIRE: lambda sets: sets.retired(name),
        }
        shared = f" {share:.3%}" if change in (Change.SHADOW, Change.CANARY) else ""
        return await self.operate(expected_revision, steps[change], f"{change.name.lower()} {name}{shared}")

    async def _check_promotion(self, name: str) -> None:
        """Raise NotFound, or PreconditionFailed if the set is not ready or too few users have current states."""
        if self.routes.sets is None:
            raise PreconditionFailed(
                "no set was ever staged, or this gateway has not read it yet: "
                "freshet model stage NAME --bundle DIR, or try again"
            )
        model_version = self.routes.sets.find(name).model_version
        problem = next(one.problem for one in await self.routes.report() if one.of.name == name)
        if problem:
            raise PreconditionFailed(f"set {name!r}: {problem}")
        found = await self.measure(model_version)
        if found.share < WARM:
            raise PreconditionFailed(
                f"{found.warm:,} of {found.active:,} users are warm ({found.share:.1%}), with current states; "
                f"allowed: at least {WARM:.0%}; run: freshet model warm {name}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeExperiment:
    """The handler."""

    routes: Routes
    operate: Operate[Experiments]

    async def create(self, new: Experiment, expected_revision: int) -> tuple[int, bool]:
        """Add an experiment; return what `Operate` returns.

        Raises: InvalidRequest; NotFound for an unknown version set; PreconditionFailed; as `Operate`.
        """
        self.routes.check(new)
        staged = self.routes.sets.sets if self.routes.sets else {}
        for arm in new.arms:
            if arm.version_set and arm.version_set not in staged:
                raise NotFound(f"version_set={arm.version_set!r} allowed: {', '.join(staged) or 'none is staged'}")
        salted = replace(new, salt=secrets.token_hex(8))
        return await self.operate(expected_revision, lambda all_: all_.created(salted), f"create {new.name}")

    async def __call__(self, step: str, name: str, expected_revision: int) -> tuple[int, bool]:
        """Start, stop or remove an experiment; return what `Operate` returns. step: "start", "stop" or "remove".

        Raises: InvalidRequest; NotFound; PreconditionFailed; as `Operate`.
        """
        steps: dict[str, Callable[[Experiments], Experiments]] = {
            "start": lambda all_: all_.started(name, now_ms()),
            "stop": lambda all_: all_.stopped(name, now_ms()),
            "remove": lambda all_: all_.removed(name),
        }
        if step not in steps:
            raise InvalidRequest.of("change", step, "one of create, start, stop, remove")
        return await self.operate(expected_revision, steps[step], f"{step} {name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Operators' changes for all gateways."""

    rules: Operate[StandingRules]
    change_set: ChangeVersionSet
    change_experiment: ChangeExperiment
