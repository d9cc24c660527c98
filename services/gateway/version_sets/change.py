"""ChangeVersionSet, under the conditions of `freshet model`."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum

from services.contracts.topics.rules import StandingRules
from services.contracts.version_sets import VersionSets
from services.gateway.experiments.change import ChangeExperiment
from services.gateway.version_sets.routes import Routes
from services.gateway.write.operations import Operate
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.user_state.warmth import WARM, Warmth


class Change(IntEnum):
    """Numbers as in Protobuf's `ChangeVersionSetRequest.Change`."""

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
        """Apply the change; return as `Operate`.

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
        """Raises: NotFound; PreconditionFailed if the set is not ready, or too few users have current states."""
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
class Operations:
    """Operators' changes for all gateways."""

    rules: Operate[StandingRules]
    change_set: ChangeVersionSet
    change_experiment: ChangeExperiment
