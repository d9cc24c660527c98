"""Puts the gateway together: the only module that names concrete adapters."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import grpc
import structlog
from freshet.v1 import gateway_pb2, gateway_pb2_grpc
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from services.algorithms.absence import AbsenceRows
from services.algorithms.attributes import Kinds
from services.algorithms.bundle import Bundle, load_bundle
from services.algorithms.event_schema import EventSchema
from services.algorithms.manifest import BundleError
from services.algorithms.rules import Rule
from services.catalogue.follower import CatalogueFollower, catalogue_reader
from services.contracts.processes import PROCESSES
from services.contracts.pseudonyms import pseudonym_key, read_key
from services.contracts.rule_file import read_rules
from services.contracts.shards import Shard
from services.contracts.topics.items import ITEMS
from services.contracts.version_set_follower import VersionSetFollower, version_set_reader
from services.contracts.version_sets import VersionSet
from services.contracts.wire import rules_of
from services.gateway.adapters.exposure_log import KafkaExposureLog
from services.gateway.adapters.peer import Peer, Remote
from services.gateway.adapters.processes import (
    RemoteCandidates,
    RemoteEncoder,
    RemoteRefreshers,
    RemoteReranker,
    RemoteTextSources,
)
from services.gateway.adapters.shards import ShardedCandidates
from services.gateway.adapters.state_store import RedisUserStates
from services.gateway.adapters.stream_ends import KafkaStreamEnds
from services.gateway.adapters.stream_status import ProbedStreamStatus
from services.gateway.adapters.topics import KafkaForgetLog, KafkaInteractionLog, KafkaItemLog
from services.gateway.config import GatewaySettings, shard_addresses
from services.gateway.edge.api_keys import read_keys
from services.gateway.edge.audit import AuditLog
from services.gateway.edge.door import Door, follow_keys
from services.gateway.freshness import ServedIndex
from services.gateway.get_freshness import GetFreshness
from services.gateway.loop_stalls import LoopStalls
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Candidates, Ports, Refreshers
from services.gateway.recommend.catalogue import DescribedItems
from services.gateway.recommend.explain import Explain
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.pages import PageTokens
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.popular_now import FollowedPopularity
from services.gateway.recommend.recommend import Recommend
from services.gateway.recommend.similar import Similar
from services.gateway.recommend.token_waits import TokenWaits
from services.gateway.search.search import Search
from services.gateway.search.text_retrieval import TextRetrieval
from services.gateway.server import SERVICE, GatewayServicer
from services.gateway.stages import Limits, Stages
from services.gateway.validation import MAX_RULES, check_rule
from services.gateway.version_sets.routes import Handlers, Held, Routes, own_set
from services.gateway.write.forget import ForgetUser
from services.gateway.write.impressions import RecordImpressions
from services.gateway.write.items import PutItems
from services.gateway.write.lag import AcknowledgedLag
from services.gateway.write.record import RecordInteractions
from services.platform.config import ConfigError
from services.platform.errors import FreshetError, InvalidRequest
from services.platform.http.server import HttpServer
from services.platform.process import configure_tracing
from services.platform.rpc import client as rpc_client
from services.platform.rpc.admission import Admission
from services.platform.rpc.request_counts import OF_CLIENTS
from services.platform.rpc.server import HealthState, RpcServer, serve
from services.platform.stream.event_producer import EventProducer
from services.platform.tracing import Tracing
from services.user_state.reader import StateReader
from services.user_state.sessions import SessionStore

# gRPC's own default: what clients expect to be able to send.
MAX_REQUEST_BYTES = 4 * 1024 * 1024
# A median that leaves most answers within a tenth of a second; a search refused is answered nothing.
# The record of version sets is waited for so long at the start; a set's processes say so soon what they serve.
_SETS_KNOWN_S, _CHECK_S = 3.0, 4.0
QUICK_S, QUICK_WRITE_S, QUICK_SEARCH_S = 0.04, 0.05, 0.1

log = structlog.get_logger()

# The generated stubs carry no types.
_add_servicer: Any = gateway_pb2_grpc.add_GatewayServiceServicer_to_server
_SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


def _open_bundle(folder: Path) -> tuple[Bundle, PopularItems]:
    bundle = load_bundle(folder)
    return bundle, PopularItems(bundle.item_ids, bundle.counts, bundle.categories, bundle.attributes)


def _remote(
    settings: GatewaySettings, tracing: Tracing, process: str, address: str, model_version: str, shard: str = ""
) -> Remote:
    """The replicas at an address that serve this model."""
    row = PROCESSES[process]
    return Remote(
        rpc_client.channel(
            address,
            tracing.client_interceptors,
            shares=False,
            tls=settings.tls,
            service=row.health_service,
            health=row.health_of(model_version, shard),
        ),
        of=f" of model {model_version}",
    )


def _candidates(
    peers: Sequence[Peer], limits: Limits, metrics: GatewayMetrics, stalled_s: Callable[[float], float]
) -> Candidates:
    """Over the shards in their order, or the one process that holds all."""
    shards = [RemoteCandidates(peer, Shard(number, len(peers))) for number, peer in enumerate(peers)]
    if len(shards) == 1:
        return shards[0]
    return ShardedCandidates(
        shards,
        patient_s=limits.stage_timeout_s,
        open_s=limits.breaker_s,
        stalled_s=stalled_s,
        told=metrics.shard_told,
    )


async def check_processes(ports: Ports, model_version: str) -> str:
    """Why candidates, the reranker and the refreshers of these ports do not answer for this model; "": they do."""

    async def ask(name: str, asked: Awaitable[ServedIndex]) -> str:
        try:
            await asked
        except FreshetError as exc:
            return f"{name}: no process that serves model {model_version} answers: {exc.message}"
        return ""

    *problems, (_, all_refreshers) = await asyncio.gather(
        ask("candidates", ports.candidates.served(_CHECK_S)),
        ask("reranker", ports.reranker.served(_CHECK_S)),
        ports.refreshers.folded(_CHECK_S),
    )
    return "; ".join(filter(None, (*problems, "" if all_refreshers else "refresher: not every one answers")))


def admissions() -> dict[str, Admission]:
    """What limits each RPC: a measured limit for reads and writes each, streams and administration apart from them."""
    # Fewer are quicker than more that are late: two at a time are some 200 a second.
    reads = Admission("recommendations", smallest=2, largest=512, surplus=32, quick_s=QUICK_S)
    # A write mostly waits for Kafka: what piles up while the machine stands still for a moment is no overload.
    writes = Admission("writes", smallest=128, largest=2048, standing_back=2, quick_s=QUICK_WRITE_S)
    streams = Admission("streams", smallest=128, largest=128, per_caller=64)
    rest = Admission("administration", smallest=32, largest=32)
    return {
        "Recommend": reads,
        # There is no cheaper answer to a search, so that 32 wait (60 ms of work on two cores) before one is refused.
        "Search": Admission("searches", smallest=4, largest=128, queue=32, quick_s=QUICK_SEARCH_S),
        "RecordInteractions": writes,
        "RecordImpressions": writes,
        "UndoInteraction": writes,
        "StreamInteractions": streams,
        **dict.fromkeys(("Similar", "Explain", "GetFreshness", "GetVersionSets", "PutItems", "ForgetUser"), rest),
    }


def make_handlers(
    ports: Ports,
    *,
    limits: Limits,
    lag: AcknowledgedLag,
    popular: PopularItems,
    titles: Mapping[str, str],
    metrics: GatewayMetrics,
    model_version: str,
    schema: EventSchema,
    exposures: Exposures,
    pages: PageTokens,
    kinds: Kinds = MappingProxyType({}),
    tau: float = 1.0,
    stalls: LoopStalls | None = None,
    rng: Random | None = None,
    rules: Sequence[Rule] = (),
    others: Callable[[], Sequence[Refreshers]] = tuple,
    absence: AbsenceRows | None = None,
) -> Handlers:
    """Every handler on these ports. `titles`: by item id, live. `kinds`: of attributes. `tau`: of the model's scores.
    `stalls`: of this event loop. `others`: refreshers of other version sets. `absence`: the model's rows."""
    stages = Stages(ports, limits, stalls, metrics.component_failed, absence)
    text = TextRetrieval(ports.sources, limits)
    record = RecordInteractions(
        ports=ports, lag=lag, metrics=metrics, exposures=exposures, schema=schema, limits=limits
    )
    return Handlers(
        recommend=Recommend(
            ports=ports,
            stages=stages,
            text=text,
            tokens=TokenWaits(stages.read_watermark, poll_s=limits.token_poll_s),
            lag=lag,
            popular=popular,
            metrics=metrics,
            model_version=model_version,
            schema=schema,
            exposures=exposures,
            pages=pages,
            kinds=kinds,
            tau=tau,
            limits=limits,
            rules=rules,
            rng=rng or Random(),
        ),
        search=Search(
            stages=stages,
            text=text,
            metrics=metrics,
            titles=titles,
            model_version=model_version,
            exposures=exposures,
            kinds=kinds,
            limits=limits,
        ),
        similar=Similar(
            ports=ports,
            stages=stages,
            titles=titles,
            model_version=model_version,
            exposures=exposures,
            kinds=kinds,
            limits=limits,
        ),
        record=record,
        record_impressions=RecordImpressions(exposures=exposures, record=record, schema=schema),
        explain=Explain(
            ports=ports,
            titles=titles,
            model_version=model_version,
            schema=schema,
            kinds=kinds,
            limits=limits,
            rules=rules,
            absence=absence,
        ),
        get_freshness=GetFreshness(ports=ports, model_version=model_version),
        put_items=PutItems(log=ports.items, kinds=kinds, append_timeout_s=limits.append_timeout_s),
        forget_user=ForgetUser(ports=ports, others=others, append_timeout_s=limits.append_timeout_s),
    )


def standing_rules(settings: GatewaySettings, kinds: Kinds) -> list[Rule]:
    """Raises: ConfigError naming file, rule, key and what is allowed."""
    if settings.rules is None:
        return []
    try:
        rules = list(rules_of(read_rules(settings.rules)))
        for position, rule in enumerate(rules):
            check_rule(rule, f"rules[{position}]", kinds)
        if len(rules) > MAX_RULES:
            raise InvalidRequest.of("rules", f"{len(rules)} rules", f"at most {MAX_RULES}")
    except InvalidRequest as exc:
        raise ConfigError(f"FRESHET_GATEWAY_RULES: {exc.message}") from exc
    return rules


def signing_key(settings: GatewaySettings) -> bytes:
    """The key of what clients bring back. Raises: ConfigError for a file that holds none."""
    key = settings.signing_key.get_secret_value()
    if not key and settings.signing_key_file is not None:
        key = read_key("FRESHET_GATEWAY_SIGNING_KEY_FILE", settings.signing_key_file)
    if not key:
        log.warning(
            "random_signing_key",
            reason="neither FRESHET_GATEWAY_SIGNING_KEY nor _FILE is set: exposure ids and page tokens of this process "
            "end with it, and no other gateway takes them",
        )
        key = secrets.token_urlsafe(32)
    return key.encode()


@contextlib.asynccontextmanager
async def opened_door(settings: GatewaySettings) -> AsyncIterator[Door | None]:
    """The door, its keys as the file has them while the block runs; None where everybody may call everything.

    Raises: ConfigError for a keys file or an audit log that cannot be used.
    """
    path = settings.api_keys
    if path is None:
        log.warning("no_api_keys", reason="FRESHET_API_KEYS names no file: everybody on this machine may call all")
        yield None
        return
    door = Door(await asyncio.to_thread(read_keys, path), AuditLog(settings.audit_log))
    following = asyncio.create_task(follow_keys(path, door))
    try:
        yield door
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        door.audit.end_windows(now=True)


async def run(
    settings: GatewaySettings,
    *,
    tracing: Tracing | None = None,
    health: HealthState | None = None,
    in_process: Mapping[str, Peer] | None = None,
    before_listening: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until a signal.

    in_process: candidates and the reranker by name, where this process answers for them itself; `health` then says
    when they are ready. before_listening: as of `serve`.

    Raises: BundleError for an unusable bundle, PortTaken for a taken port, ConfigError as `opened_door`, `signing_key`
    and, where exposures are written, `pseudonym_key`. Redis, Kafka and the other processes may be away at start:
    answers are marked until they come.
    """
    async with opened_door(settings) as door:
        await _serve(
            settings,
            door,
            tracing or configure_tracing("gateway", settings.otlp_endpoint),
            health or HealthState(ready=True),
            in_process or {},
            before_listening,
        )


async def _serve(
    settings: GatewaySettings,
    door: Door | None,
    tracing: Tracing,
    health: HealthState,
    in_process: Mapping[str, Peer],
    before_listening: Callable[[], Awaitable[None]] | None,
) -> None:
    of_users = pseudonym_key(settings) if settings.exposures else b""
    key = signing_key(settings)
    bundle, popular = await asyncio.to_thread(_open_bundle, settings.bundle)
    rules = standing_rules(settings, bundle.attributes.kinds)
    encoder_channel = rpc_client.channel(settings.encoder_address, tracing.client_interceptors, tls=settings.tls)
    # A connection for each call that may be in flight: a burst must not read as an outage.
    reader = StateReader(
        settings.redis,
        timeout_s=settings.state_timeout_ms / 1000,
        max_connections=settings.max_in_flight,
        with_traces=tracing.is_on,
    )
    sessions = SessionStore(
        settings.redis,
        reader.last_epoch,
        timeout_s=settings.state_timeout_ms / 1000,
        max_connections=settings.max_in_flight,
    )
    producer = EventProducer(settings.kafka, client_id="freshet-gateway")
    producer.start()
    stream = ProbedStreamStatus(encoder_channel, producer.brokers)
    await stream.start()
    metrics = GatewayMetrics()
    shown = None
    if settings.exposures:
        shown = KafkaExposureLog(settings.kafka, of_users, told=metrics.exposures_kept)
        shown.start()
    ends = KafkaStreamEnds(settings.kafka)
    ends.start()
    stalls = LoopStalls()
    lag = AcknowledgedLag(grace_seconds=settings.lag_grace_ms / 1000)
    pages, loop = PageTokens(key), asyncio.get_running_loop()

    async def hold(
        one: VersionSet, bundle: Bundle, popular: PopularItems, rules: Sequence[Rule], near: Mapping[str, Peer]
    ) -> tuple[Held, CatalogueFollower]:
        """A set's handlers on the processes that it names, or that the gateway was started with."""
        remote = partial(_remote, settings, tracing, model_version=bundle.model_version)
        if "candidates" in near:
            candidates = [near["candidates"]]
        else:
            addresses = shard_addresses(one.candidates or settings.candidates_address)
            candidates = [
                remote("candidates", address, shard=str(Shard(number, len(addresses))))
                for number, address in enumerate(addresses)
            ]
        reranker = near.get("reranker") or remote("reranker", one.reranker or settings.reranker_address)
        encoder = remote("encoder", settings.encoder_address)
        generator = rpc_client.channel(
            one.generator or settings.generator_address, tracing.client_interceptors, tls=settings.tls
        )
        refresher_channels = {
            address: rpc_client.channel(address, tracing.client_interceptors, tls=settings.tls)
            for address in one.refreshers or settings.refreshers
        }
        described = DescribedItems(dict(zip(bundle.item_ids, bundle.titles, strict=True)), popular)
        follower = CatalogueFollower(
            catalogue_reader(settings.kafka, "freshet-gateway", ITEMS),
            described,
            model_version=bundle.model_version,
            on_ready=described.caught_up,
            follows_deltas=False,
            kinds=bundle.attributes.kinds,
        )
        popular_now = FollowedPopularity(reader.read_popular, popular)
        ports = Ports(
            states=RedisUserStates(reader, bundle.model_version),
            sessions=sessions,
            encoder=RemoteEncoder(encoder, bundle.model_version),
            candidates=_candidates(candidates, settings.limits, metrics, stalls.since),
            reranker=RemoteReranker(reranker),
            sources=RemoteTextSources(generator),
            refreshers=RemoteRefreshers(refresher_channels),
            ends=ends,
            interactions=KafkaInteractionLog(producer, tracing),
            items=KafkaItemLog(producer, tracing),
            forgets=KafkaForgetLog(producer, tracing),
            stream=stream,
        )
        make = partial(
            make_handlers,
            ports,
            limits=settings.limits,
            lag=lag,
            popular=popular,
            titles=described.titles,
            model_version=bundle.model_version,
            schema=bundle.event_schema,
            pages=pages,
            kinds=bundle.attributes.kinds,
            tau=bundle.tau,
            rules=rules,
            stalls=stalls,
            others=lambda: [held.refreshers for held in routes.others],
            absence=bundle.absence,
        )
        unseen = make(metrics=GatewayMetrics(CollectorRegistry()), exposures=Exposures(key, None))

        async def close() -> None:
            await popular_now.close()
            await asyncio.to_thread(follower.stop)
            for connected in (generator, *refresher_channels.values(), *candidates, reranker, encoder):
                await connected.close()

        held = Held(
            handlers=make(metrics=metrics, exposures=Exposures(key, shown)),
            model_version=bundle.model_version,
            refreshers=ports.refreshers,
            shadowed=unseen.recommend,
            check=partial(check_processes, ports, bundle.model_version),
            close=close,
        )
        follower.start()
        popular_now.start()
        return held, follower

    async def open_set(one: VersionSet) -> Held:
        other, popular = await asyncio.to_thread(_open_bundle, Path(one.bundle))
        if other.model_version != one.model_version:
            raise BundleError(f"{one.bundle} holds model {other.model_version}; allowed: {one.model_version}")
        held, _ = await hold(one, other, popular, standing_rules(settings, other.attributes.kinds), {})
        return held

    own, follower = await hold(own_set(bundle.model_version), bundle, popular, rules, in_process)
    metrics.watch_turns(follower.turns)
    health.watch("items", follower.turns)
    routes = Routes(own=own, open_set=open_set)
    known = asyncio.Event()

    def said(what: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(what)

    sets = VersionSetFollower(
        version_set_reader(settings.kafka, "freshet-gateway-version-sets", makes_topics=settings.replicas),
        lambda changed: asyncio.run_coroutine_threadsafe(routes.apply(changed), loop).result(),
        on_ready=lambda: said(known.set),
    )
    sets.start()
    # Whom which set answers is known before anybody asks, unless Kafka is away.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SETS_KNOWN_S):
            await known.wait()
    servicer = GatewayServicer(routes, tracing)

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(servicer, server)
        return [SERVICE]

    async def on_drain() -> None:
        stalls.stop()
        await asyncio.to_thread(sets.stop)
        await routes.close()
        await own.close()
        await stream.close()
        await ends.close()
        await producer.close()
        if shown is not None:
            await shown.close()
        await reader.close()
        await sessions.close()
        await encoder_channel.close()

    def by_http(server: RpcServer) -> HttpServer:
        return HttpServer(
            settings=settings,
            port=settings.resolved_http_port,
            services={_SERVICE: servicer, _HEALTH: server.health_servicer},
            guards=server.guards,
            max_request_bytes=MAX_REQUEST_BYTES,
            knows_callers=door is not None,
        )

    await serve(
        process="gateway",
        settings=settings,
        add_services=add_services,
        on_drain=on_drain,
        health_state=health,
        tracing=tracing,
        admissions=admissions(),
        max_request_bytes=MAX_REQUEST_BYTES,
        limits=OF_CLIENTS,
        door=door,
        before_listening=before_listening,
        beside=by_http if settings.resolved_http_port else None,
    )
