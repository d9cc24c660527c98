"""A whole gateway on in-memory ports: six items, one known user, everything well until a test breaks it."""

from dataclasses import dataclass, field, fields
from random import Random

import numpy as np
from fakes.gateway import (
    MemoryCandidates,
    MemoryControl,
    MemoryDeadLetters,
    MemoryEncoder,
    MemoryExposureLog,
    MemoryForgetLog,
    MemoryInteractionLog,
    MemoryItemLog,
    MemoryParts,
    MemoryRefreshers,
    MemoryReranker,
    MemorySessions,
    MemoryShownAnswers,
    MemoryStreamEnds,
    MemoryStreamStatus,
    MemoryTextSources,
    MemoryUserStates,
)
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.event_schema import EventSchema, default_schema
from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.rules.attributes import Kind
from services.contracts.operations import Operation
from services.contracts.topics.experiments import Experiments
from services.contracts.topics.rules import StandingRules
from services.contracts.topics.version_sets import VersionSet, VersionSets
from services.contracts.wire import PackedQueryState
from services.gateway.dependencies import AcknowledgedLag
from services.gateway.domain import Hit, ServedModel
from services.gateway.handlers import Handlers
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import PartitionProgress, Ports
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.pages import PageTokens
from services.gateway.recommend.popular import PopularItems
from services.gateway.server import GatewayServicer
from services.gateway.stages import Limits, Preferences
from services.gateway.version_sets.routes import Routes, ServedSet
from services.gateway.write.operations import ChangeExperiment, ChangeVersionSet, Operate, Operations
from services.platform.errors import PreconditionFailed
from services.user_state.values import StoredState, now_ms
from services.user_state.warmth import Warmth

ITEMS = ["a", "b", "c", "d", "e", "f"]
COUNTS = np.array([10, 60, 30, 60, 20, 20], dtype=np.int64)
CATEGORIES = [("x",), ("x",), ("y",), ("x", "y"), ("z",), ()]
TITLES = {item_id: item_id.upper() for item_id in ITEMS}
# Prices 0, 10, ... 40; the last item has none.
ATTRIBUTES = AttributeTable.of(
    {"price": Kind.NUMBER, "maker": Kind.TAG},
    [{"price": 10.0 * row, "maker": "xy"[row % 2]} if row < 5 else {} for row in range(6)],
)
# What every source finds, each in its own unit.
FOUND = {
    "text_mol": [Hit("c", 0.9), Hit("a", 0.8), Hit("new", 0.7)],
    "phrases": [Hit("c", -1.5, "Space Movies"), Hit("d", -2.5, "Space Opera")],
    "lexical": [Hit("a", 7.5), Hit("c", 3.0)],
}
# By count, ties by id.
POPULAR = ["b", "d", "c", "e", "f", "a"]


def only_set(handlers: Handlers, model_version: str) -> Routes:
    """One set answers everybody, for good."""

    async def refuse(one: VersionSet) -> ServedSet:
        raise ValueError(f"set {one.name!r}: this gateway holds one set")

    refreshers = handlers.forget_user.ports.refreshers
    own = ServedSet(handlers=handlers, model_version=model_version, refreshers=refreshers, shadowed=handlers.recommend)
    return Routes(own=own, open_set=refuse)


def memory_operations(routes: Routes, sets: Operation[VersionSets] | None = None) -> Operations:
    """What operators change, in memory; these routes apply rules at once. sets: what was done before."""
    return Operations(
        rules=Operate(
            control=MemoryControl(routes.apply_rules),  # type: ignore[arg-type]
            initial=StandingRules,
            applied=lambda: routes.standing.revision if routes.standing else 0,
        ),
        change_set=ChangeVersionSet(
            routes=routes,
            operate=Operate(
                control=MemoryControl(lambda after: None, sets),  # type: ignore[arg-type]
                initial=_nothing_staged,
                applied=lambda: 1 << 60,
            ),
            measure=_warm,
        ),
        change_experiment=ChangeExperiment(
            routes=routes,
            operate=Operate(
                control=MemoryControl(routes.apply_experiments),  # type: ignore[arg-type]
                initial=Experiments,
                applied=lambda: routes.experiments.revision,
            ),
        ),
    )


async def _warm(model_version: str) -> Warmth:
    """Of model m3 a tenth."""
    return Warmth(active=100, warm=10 if model_version == "m3" else 99)


def _nothing_staged() -> VersionSets:
    raise PreconditionFailed("no set was ever staged")


def query_state(name: str) -> PackedQueryState:
    return PackedQueryState(model_version="m1", components=name.encode(), gate=b"", num_components=1, component_width=1)


STORED = StoredState(query_state=query_state("stored"), partition=3, offset=7, event_time_ms=1000, applied_ms=3500)


@dataclass
class Scene:
    states: MemoryUserStates = field(
        default_factory=lambda: MemoryUserStates(
            states={"ann": STORED}, seen={"ann": ["a"]}, watermarks={3: 7}, current_epoch="epoch-1"
        )
    )
    sessions: MemorySessions = field(default_factory=MemorySessions)
    encoder: MemoryEncoder = field(
        default_factory=lambda: MemoryEncoder(query_state=query_state("request"), known_items=set(ITEMS))
    )
    candidates: MemoryCandidates = field(default_factory=lambda: MemoryCandidates(item_ids=list(ITEMS)))
    reranker: MemoryReranker = field(default_factory=lambda: MemoryReranker(titles=dict(TITLES) | {"new": "New"}))
    interactions: MemoryInteractionLog = field(default_factory=MemoryInteractionLog)
    parts: MemoryParts = field(default_factory=MemoryParts)
    letters: MemoryDeadLetters = field(default_factory=MemoryDeadLetters)
    stream: MemoryStreamStatus = field(default_factory=MemoryStreamStatus)
    ends: MemoryStreamEnds = field(
        default_factory=lambda: MemoryStreamEnds(ends={3: 9, 4: 2}, num_attribution_partitions=2)
    )
    refreshers: MemoryRefreshers = field(
        default_factory=lambda: MemoryRefreshers(held=[PartitionProgress(partition=0, applied_offset=4, end_offset=5)])
    )
    items: MemoryItemLog = field(default_factory=MemoryItemLog)
    forgets: MemoryForgetLog = field(default_factory=MemoryForgetLog)
    exposures: MemoryExposureLog = field(default_factory=MemoryExposureLog)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    limits: Limits = field(default_factory=lambda: Limits(breaker_s=0.05))
    preferences: Preferences = field(default_factory=Preferences)
    sources: MemoryTextSources = field(default_factory=lambda: MemoryTextSources(found=dict(FOUND)))
    lag_grace_s: float = 2.0
    # What page tokens are judged by; 0: the clock.
    now_ms: int = 0
    schema: EventSchema = field(default_factory=default_schema)
    popular: PopularItems = field(
        default_factory=lambda: PopularItems(ITEMS, COUNTS, CATEGORIES, ATTRIBUTES, titles=list(TITLES.values()))
    )
    rng: Random | None = None
    absence: AbsenceRows | None = None

    def __post_init__(self) -> None:
        self.shown = MemoryShownAnswers(log=self.exposures)
        self.lag = AcknowledgedLag(grace_seconds=self.lag_grace_s)
        self.metrics = GatewayMetrics(self.registry)
        self.popular.caught_up()
        self.items.follower = self.popular.describe
        self.ports = Ports(
            **{one.name: getattr(self, one.name) for one in fields(Ports)},
        )
        self.handlers = Handlers(
            self.ports,
            model=ServedModel(
                version="m1",
                schema=self.schema,
                kinds=ATTRIBUTES.kinds,
                absence=self.absence,
                warnings=self.popular.warnings,
            ),
            limits=self.limits,
            preferences=self.preferences,
            lag=self.lag,
            items=self.popular,
            metrics=self.metrics,
            exposures=Exposures(b"key", self.exposures),
            pages=PageTokens(b"key", lambda: self.now_ms or now_ms()),
            rng=self.rng,
        )
        self.routes = only_set(self.handlers, "m1")
        self.operations = memory_operations(self.routes)
        self.servicer = GatewayServicer(self.routes, self.operations)
        self.search, self.recommend, self.explain = self.handlers.search, self.handlers.recommend, self.handlers.explain
        self.record, self.get_freshness = self.handlers.record, self.handlers.get_freshness
        self.record_impressions = self.handlers.record_impressions
        self.put_items, self.forget_user = self.handlers.put_items, self.handlers.forget_user
