"""ChangeExperiment, under the same conditions as `freshet experiments`."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.contracts.experiments import Experiment, Experiments
from services.gateway.domain import now_ms
from services.gateway.version_sets.routes import Routes
from services.gateway.write.operations import Operate
from services.platform.errors import InvalidRequest, NotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeExperiment:
    """The handler."""

    routes: Routes
    operate: Operate[Experiments]

    async def create(self, new: Experiment, expected_revision: int) -> tuple[int, bool]:
        """Add an experiment; return as `Operate`.

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
        """Start, stop or remove an experiment; return as `Operate`. step: "start", "stop" or "remove".

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
