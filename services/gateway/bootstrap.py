"""Assemble the gateway: the only module that names concrete adapters."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from freshet.v1 import gateway_pb2, gateway_pb2_grpc
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.bundles.tensor_file import changed_in_place
from services.algorithms.rules.ranking_rules import Rule
from services.catalogue.follower import CatalogueFollower, catalogue_reader
from services.contracts.operation_log import Control, OperationFollower, operation_reader
from services.contracts.operations import OperationTopic
from services.contracts.pseudonyms import pseudonym_key
from services.contracts.shards import Shard
from services.contracts.topics import experiments, rules, version_sets
from services.contracts.topics.items import ITEMS
from services.contracts.topics.version_sets import VersionSet
from services.gateway.adapters.kafka_reads import KafkaDeadLetters, KafkaShownAnswers, KafkaStreamEnds
from services.gateway.adapters.peers import Peers, RemoteEncoder, RemoteRefreshers, RemoteTextSources
from services.gateway.adapters.probes import ProbedParts, ProbedStreamStatus
from services.gateway.adapters.processes import Peer, RemoteCandidates, RemoteReranker, Timed
from services.gateway.adapters.shards import ShardedCandidates
from services.gateway.adapters.topics import KafkaExposureLog, forget_log, interaction_log, item_log
from services.gateway.config import GatewaySettings
from services.gateway.dependencies import AcknowledgedLag, LoopStalls
from services.gateway.domain import ServedModel
from services.gateway.edge.door import admissions, opened_door
from services.gateway.handlers import Handlers
from services.gateway.health import check_processes
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Candidates, Ports
from services.gateway.recommend.exposures import Exposures, signing_key
from services.gateway.recommend.pages import PageTokens
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.popular_now import follow_popularity
from services.gateway.recommend.standing_rules import LiveRules, check_arms, standing_rules
from services.gateway.server import SERVICE, GatewayServicer
from services.gateway.stages import Limits
from services.gateway.version_sets.routes import Routes, ServedSet, own_set
from services.gateway.write.operations import ChangeExperiment, ChangeVersionSet, Operate, Operations
from services.platform.errors import PreconditionFailed
from services.platform.http.origins import origins
from services.platform.http.server import HttpServer
from services.platform.process import configure_tracing
from services.platform.request_context import Tracing
from services.platform.rpc import client as rpc_client
from services.platform.rpc.request_counts import OF_CLIENTS
from services.platform.rpc.server import HealthState, RpcServer, adding, serve
from services.platform.stream.event_producer import EventProducer
from services.user_state.reader import StateReader
from services.user_state.sessions import SessionStore
from services.user_state.warmth import Warmth, measure
from services.user_state.writer import StateWriter

# gRPC's default, which clients expect.
MAX_REQUEST_BYTES = 4 * 1024 * 1024
# How long a start waits for version sets, experiments and rules.
_SETS_KNOWN_S = 3.0

log = structlog.get_logger()

# The generated stubs carry no types.
_SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


def _candidates(
    peers: Sequence[Peer], limits: Limits, metrics: GatewayMetrics, stalled_s: Callable[[float], float]
) -> Candidates:
    shards = [RemoteCandidates(peer, Shard(number, len(peers))) for number, peer in enumerate(peers)]
    if len(shards) == 1:
        return shards[0]
    return ShardedCandidates(
        shards,
        patient_s=limits.stage_timeout_s,
        open_s=limits.breaker_s,
        stalled_s=stalled_s,
        count=metrics.count_shard,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _LoadedBundle:
    bundle: Bundle
    popular: PopularItems
    rules: Sequence[Rule]

    @classmethod
    def of(cls, folder: Path, settings: GatewaySettings) -> "_LoadedBundle":
        """Load a bundle. Raises: BundleError; ConfigError for rules that the attributes do not allow."""
        bundle = load_bundle(folder)
        popular = PopularItems(
            bundle.item_index,
            bundle.counts,
            bundle.categories,
            bundle.attributes,
            bundle.by_popularity,
            bundle.titles,
        )
        return cls(bundle=bundle, popular=popular, rules=standing_rules(settings.rules, bundle.attributes.kinds))


class _Stream:
    """Connections to Kafka and the encoder's status, which all version sets share."""

    def __init__(self, settings: GatewaySettings, tracing: Tracing, metrics: GatewayMetrics) -> None:
        key = pseudonym_key(settings) if settings.exposures else None
        self.exposures = KafkaExposureLog(settings.kafka, key, count=metrics.count_exposures) if key else None
        self.shown = KafkaShownAnswers(settings.kafka, key)
        self.producer = EventProducer(settings.kafka, client_id="freshet-gateway")
        self._encoder = rpc_client.channel(settings.encoder_address, tracing.client_interceptors, tls=settings.tls)
        self.status = ProbedStreamStatus(self._encoder, self.producer.brokers)
        self.ends, self.letters = KafkaStreamEnds(settings.kafka), KafkaDeadLetters(settings.kafka)

    async def start(self) -> None:
        self.producer.start()
        await self.status.start()
        if self.exposures is not None:
            self.exposures.start()
        self.ends.start()

    async def close(self) -> None:
        await self.status.close()
        self.letters.close()
        self.shown.close()
        self.ends.close()
        await self.producer.close()
        if self.exposures is not None:
            await self.exposures.close()
        await self._encoder.close()


class _Gateway:
    """Connections, followers and version sets. Call `start`, then `close`. Raises: ConfigError for unusable keys."""

    def __init__(self, settings: GatewaySettings, tracing: Tracing) -> None:
        self._settings, self._tracing = settings, tracing
        self._key = signing_key(settings.signing_key.get_secret_value(), settings.signing_key_file)
        self.metrics = GatewayMetrics()
        # A Redis connection per concurrent call, so that a burst does not look like an outage.
        timeout_s, most = settings.state_timeout_ms / 1000, settings.max_in_flight
        count_read = self.metrics.minutes.of("redis").add
        self._states = StateReader(
            settings.redis, timeout_s=timeout_s, max_connections=most, with_traces=tracing.is_on, on_read=count_read
        )
        self._sessions = SessionStore(
            settings.redis, self._states.last_epoch, timeout_s=timeout_s, max_connections=most
        )
        self._stream = _Stream(settings, tracing, self.metrics)
        self._lag, self._stalls = AcknowledgedLag(), LoopStalls()
        self._followers: list[OperationFollower[Any]] = []
        self._looking: asyncio.Task[None] | None = None

    async def start(self, health: HealthState, near: Mapping[str, Peer]) -> Routes:
        """Start all parts and return the routes. Raises: BundleError, ConfigError."""
        opened = await asyncio.to_thread(_LoadedBundle.of, self._settings.bundle, self._settings)
        await self._stream.start()
        own, follower = self._make_set(own_set(opened.bundle.model_version), opened, near)
        self.metrics.watch_turns(follower.turns)
        health.watch("items", follower.turns)
        self.routes = Routes(
            own=own, open_set=self._open_set, check=partial(check_arms, opened.bundle.attributes.kinds)
        )
        loop, routes = asyncio.get_running_loop(), self.routes
        known = [
            self._follow(
                version_sets.OPERATIONS,
                lambda sets: asyncio.run_coroutine_threadsafe(routes.apply(sets), loop).result(),
            ),
            self._follow(
                experiments.OPERATIONS, lambda found: loop.call_soon_threadsafe(routes.apply_experiments, found)
            ),
            self._follow(rules.OPERATIONS, lambda found: loop.call_soon_threadsafe(routes.apply_rules, found)),
        ]
        # Sets, arms and rules are known before the first request, unless Kafka is unavailable.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETS_KNOWN_S):
                for one in known:
                    await one.wait()
        self._looking = asyncio.create_task(self._check_health_periodically())
        return self.routes

    async def close(self) -> None:
        self._stalls.stop()
        if self._looking is not None:
            self._looking.cancel()
        for follower in self._followers:
            await asyncio.to_thread(follower.stop)
        await self.routes.close()
        await self.routes.own.close()
        await self._stream.close()
        await self._states.close()
        await self._sessions.close()

    async def _check_health_periodically(self) -> None:
        while True:
            left_s = await self.routes.serving.handlers.get_health.look_now()
            await asyncio.sleep(left_s)

    def _follow(self, of: OperationTopic[Any], changed: Callable[[Any], Any]) -> asyncio.Event:
        """Return an event that is set once the topic was read to its end."""
        client_id, replicas = f"freshet-gateway-{of.name}", self._settings.replicas
        reader = operation_reader(self._settings.kafka, of, client_id, makes_topics=replicas)
        loop, known = asyncio.get_running_loop(), asyncio.Event()

        def ready() -> None:
            loop.call_soon_threadsafe(known.set)

        self._followers.append(OperationFollower(of, reader, changed, on_ready=ready))
        self._followers[-1].start()
        return known

    async def _open_set(self, one: VersionSet) -> ServedSet:
        opened = await asyncio.to_thread(_LoadedBundle.of, Path(one.bundle), self._settings)
        if (found := opened.bundle.model_version) != one.model_version:
            raise BundleError(f"{one.bundle} holds model {found}; allowed: {one.model_version}")
        served, _ = self._make_set(one, opened, {})
        return served

    def _make_set(
        self, one: VersionSet, opened: _LoadedBundle, near: Mapping[str, Peer]
    ) -> tuple[ServedSet, CatalogueFollower]:
        bundle, popular, settings = opened.bundle, opened.popular, self._settings
        peers = Peers(one, settings, self._tracing, bundle.model_version, near)
        follower = CatalogueFollower(
            catalogue_reader(settings.kafka, "freshet-gateway", ITEMS),
            popular,
            model_version=bundle.model_version,
            on_ready=popular.caught_up,
            follows_deltas=False,
            kinds=bundle.attributes.kinds,
        )
        ports = self._ports(peers, bundle.model_version, near)
        make = partial(
            Handlers,
            ports,
            model=ServedModel(
                version=bundle.model_version,
                schema=bundle.event_schema,
                kinds=bundle.attributes.kinds,
                tau=bundle.tau,
                absence=bundle.absence,
                warnings=popular.warnings,
            ),
            items=popular,
            pages=PageTokens(self._key),
            lag=self._lag,
            limits=settings.limits,
            preferences=settings.preferences,
            stalls=self._stalls,
            rules=LiveRules(bundle.attributes.kinds, opened.rules),
            others=lambda: [served.refreshers for served in self.routes.others],
            other_items=lambda: [served.handlers.put_items.items for served in self.routes.others],
        )
        unseen = make(metrics=GatewayMetrics(CollectorRegistry()), exposures=Exposures(self._key, None))

        async def close() -> None:
            following.cancel()
            await asyncio.to_thread(follower.stop)
            await peers.close()

        served = ServedSet(
            handlers=make(metrics=self.metrics, exposures=Exposures(self._key, self._stream.exposures)),
            model_version=bundle.model_version,
            refreshers=ports.refreshers,
            shadowed=unseen.recommend,
            check=partial(check_processes, ports, bundle.model_version),
            close=close,
        )
        follower.start()
        following = asyncio.create_task(follow_popularity(self._states.read_popular, popular))
        return served, follower

    def _ports(self, peers: Peers, model_version: str, near: Collection[str]) -> Ports:
        producer, tracing, calls = self._stream.producer, self._tracing, self.metrics.minutes.of
        candidates = [Timed(one, calls("candidates")) for one in peers.candidates]
        return Ports(
            states=self._states,
            sessions=self._sessions,
            encoder=RemoteEncoder(Timed(peers.encoder, calls("encoder")), model_version),
            candidates=_candidates(candidates, self._settings.limits, self.metrics, self._stalls.since),
            reranker=RemoteReranker(Timed(peers.reranker, calls("reranker"))),
            sources=RemoteTextSources(Timed(peers.generator, calls("generator"))),
            refreshers=RemoteRefreshers(peers.refreshers),
            ends=self._stream.ends,
            interactions=interaction_log(producer, tracing),
            items=item_log(producer, tracing),
            forgets=forget_log(producer, tracing),
            stream=self._stream.status,
            parts=ProbedParts(peers.checked, stream=self._stream.status, store=self._states.epoch, inside=tuple(near)),
            letters=self._stream.letters,
            shown=self._stream.shown,
        )


def operations(settings: GatewaySettings, routes: Routes) -> Operations:
    """Assemble the handlers of operators' changes."""
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
                initial=experiments.Experiments,
                applied=lambda: routes.experiments.revision,
            ),
        ),
    )


def _nothing_staged() -> version_sets.VersionSets:
    raise PreconditionFailed("no set was ever staged: freshet model stage NAME --bundle DIR")


def _measured(settings: GatewaySettings, model_version: str) -> Warmth:
    with contextlib.closing(StateWriter(settings.redis)) as store:
        return measure(store, model_version)


async def run(
    settings: GatewaySettings,
    *,
    tracing: Tracing | None = None,
    health: HealthState | None = None,
    in_process: Mapping[str, Peer] | None = None,
    before_listening: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until a signal. Redis, Kafka and other processes may be unavailable at the start.

    in_process: candidates and reranker, if inside this process; `health` then tells when they are ready.
    before_listening: as in `serve`. Raises: BundleError, PortTaken, ConfigError.
    """
    tracing = tracing or configure_tracing("gateway", settings.otlp_endpoint)
    health = health or HealthState(ready=True, check=changed_in_place)
    async with opened_door(settings.api_keys, settings.audit_log) as door:
        gateway = _Gateway(settings, tracing)
        routes = await gateway.start(health, in_process or {})
        servicer = GatewayServicer(routes, operations(settings, routes), tracing, lambda: health.is_draining)

        server = RpcServer(
            process="gateway",
            settings=settings,
            add_services=adding(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, servicer, SERVICE),
            health_state=health,
            tracing=tracing,
            admissions=admissions(),
            max_request_bytes=MAX_REQUEST_BYTES,
            limits=OF_CLIENTS,
            door=door,
            told=gateway.metrics.called,
        )
        by_http = HttpServer(
            settings=settings,
            port=settings.resolved_http_port,
            services={_SERVICE: servicer, _HEALTH: server.health_servicer},
            guards=server.guards,
            max_request_bytes=MAX_REQUEST_BYTES,
            knows_callers=door is not None,
            origins=origins(settings.origins),
        )
        await serve(
            server,
            on_drain=gateway.close,
            before_listening=before_listening,
            beside=by_http if settings.resolved_http_port else None,
        )
