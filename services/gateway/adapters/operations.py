"""Assemble `write.operations`: its topics, and the revisions that this gateway applies."""

import asyncio

from services.contracts.operation_log import Control
from services.contracts.topics import experiments, rules, version_sets
from services.contracts.topics.experiments import Experiments
from services.contracts.topics.version_sets import VersionSets
from services.gateway.config import GatewaySettings
from services.gateway.version_sets.routes import Routes
from services.gateway.write.operations import ChangeExperiment, ChangeVersionSet, Operate, Operations
from services.platform.errors import PreconditionFailed
from services.user_state.warmth import Warmth, measure
from services.user_state.writer import StateWriter


def operations(settings: GatewaySettings, routes: Routes) -> Operations:
    return Operations(
        rules=Operate(
            control=Control(settings.kafka, rules.OPERATIONS),
            initial=rules.StandingRules,
            applied=lambda: routes.standing.revision if routes.standing else 0,
        ),
        change_set=ChangeVersionSet(
            routes=routes,
            operate=Operate(
                control=Control(settings.kafka, version_sets.OPERATIONS),
                initial=_nothing_staged,
                applied=lambda: routes.sets.revision if routes.sets else 0,
            ),
            measure=lambda version: asyncio.to_thread(_measured, settings, version),
        ),
        change_experiment=ChangeExperiment(
            routes=routes,
            operate=Operate(
                control=Control(settings.kafka, experiments.OPERATIONS),
                initial=Experiments,
                applied=lambda: routes.experiments.revision,
            ),
        ),
    )


def _nothing_staged() -> VersionSets:
    raise PreconditionFailed("no set was ever staged: freshet model stage NAME --bundle DIR")


def _measured(settings: GatewaySettings, model_version: str) -> Warmth:
    store = StateWriter(settings.redis)
    try:
        return measure(store, model_version)
    finally:
        store.close()
