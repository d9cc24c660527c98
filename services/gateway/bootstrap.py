"""Puts the gateway together: the only module that names concrete adapters."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

import grpc
import structlog
from freshet.v1 import gateway_pb2, gateway_pb2_grpc
from grpc_health.v1 import health_pb2

from services.algorithms.attributes import Kinds
from services.algorithms.bundle import Bundle, load_bundle
from services.algorithms.event_schema import EventSchema
from services.common import rpc_client
from services.common.admission import Admission
from services.common.catalogue_follower import CatalogueFollower, catalogue_reader
from services.common.config import ConfigError
from services.common.errors import InvalidRequest
from services.common.http_server import HttpServer
from services.common.kafka import EventProducer
from services.common.pseudonyms import pseudonym_key, read_key
from services.common.rpc_server import HealthState, RpcServer, serve
from services.common.rule_file import read_rules
from services.common.session_store import SessionStore
from services.common.state_store import StateReader
from services.common.stream.topics.items import ITEMS
from services.common.tracing import OFF, Tracing, configure_tracing
from services.gateway.adapters.exposure_log import KafkaExposureLog
from services.gateway.adapters.peer import Peer
from services.gateway.adapters.processes import (
    RemoteCandidates,
    RemoteEncoder,
    RemoteRefreshers,
    RemoteReranker,
    RemoteTextSources,
)
from services.gateway.adapters.replicas import Replicas
from services.gateway.adapters.state_store import RedisUserStates
from services.gateway.adapters.stream_ends import KafkaStreamEnds
from services.gateway.adapters.stream_status import ProbedStreamStatus
from services.gateway.adapters.topics import KafkaForgetLog, KafkaInteractionLog, KafkaItemLog
from services.gateway.api_keys import read_keys
from services.gateway.audit import AuditLog
from services.gateway.catalogue import DescribedItems
from services.gateway.config import GatewaySettings
from services.gateway.domain import AskedRule
from services.gateway.door import Door, follow_keys
from services.gateway.exposures import Exposures
from services.gateway.handlers.explain import Explain
from services.gateway.handlers.forget import ForgetUser
from services.gateway.handlers.get_freshness import GetFreshness
from services.gateway.handlers.impressions import RecordImpressions
from services.gateway.handlers.items import PutItems
from services.gateway.handlers.recommend import Recommend
from services.gateway.handlers.record import RecordInteractions
from services.gateway.handlers.search import Search
from services.gateway.handlers.similar import Similar
from services.gateway.lag import AcknowledgedLag
from services.gateway.loop_stalls import LoopStalls
from services.gateway.metrics import GatewayMetrics
from services.gateway.pages import PageTokens
from services.gateway.popular import PopularItems
from services.gateway.popular_now import FollowedPopularity
from services.gateway.ports import Ports
from services.gateway.server import SERVICE, GatewayServicer, rule_of
from services.gateway.stages import Limits, Stages
from services.gateway.text_retrieval import TextRetrieval
from services.gateway.token_waits import TokenWaits
from services.gateway.validation import MAX_RULES, check_rule

# gRPC's own default: what clients expect to be able to send.
MAX_REQUEST_BYTES = 4 * 1024 * 1024
# A median that leaves most answers within a tenth of a second; a search refused is answered nothing.
QUICK_S, QUICK_WRITE_S, QUICK_SEARCH_S = 0.04, 0.05, 0.1

log = structlog.get_logger()

# The generated stubs carry no types.
_add_servicer: Any = gateway_pb2_grpc.add_GatewayServiceServicer_to_server
_SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


def _open_bundle(settings: GatewaySettings) -> tuple[Bundle, PopularItems]:
    bundle = load_bundle(settings.bundle)
    return bundle, PopularItems(bundle.item_ids, bundle.counts, bundle.categories, bundle.attributes)


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
        "Search": Admission("searches", smallest=4, largest=128, quick_s=QUICK_SEARCH_S),
        "RecordInteractions": writes,
        "RecordImpressions": writes,
        "UndoInteraction": writes,
        "StreamInteractions": streams,
        **dict.fromkeys(("Similar", "Explain", "GetFreshness", "PutItems", "ForgetUser"), rest),
    }


def make_servicer(
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
    stalled_s: Callable[[float], float] = lambda since: 0.0,
    tracing: Tracing = OFF,
    rng: Random | None = None,
    rules: Sequence[AskedRule] = (),
) -> GatewayServicer:
    """Every handler on these ports. `titles`: by item id, live. `kinds`: of attributes. `tau`: of the model's scores.
    `stalled_s`: see `Breaker`."""
    stages = Stages(ports, limits, stalled_s, metrics.component_failed)
    text = TextRetrieval(ports.sources, limits)
    record = RecordInteractions(
        ports=ports, lag=lag, metrics=metrics, exposures=exposures, schema=schema, limits=limits
    )
    return GatewayServicer(
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
        ),
        get_freshness=GetFreshness(ports=ports, model_version=model_version),
        put_items=PutItems(log=ports.items, kinds=kinds, append_timeout_s=limits.append_timeout_s),
        forget_user=ForgetUser(ports=ports, append_timeout_s=limits.append_timeout_s),
        tracing=tracing,
    )


def standing_rules(settings: GatewaySettings, kinds: Kinds) -> list[AskedRule]:
    """Raises: ConfigError naming file, rule, key and what is allowed."""
    if settings.rules is None:
        return []
    try:
        rules = [rule_of(message, "where") for message in read_rules(settings.rules)]
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
    door = Door(
        await asyncio.to_thread(read_keys, path), AuditLog(settings.audit_log), shared_rates=settings.shared_rates
    )
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
    bundle, popular = await asyncio.to_thread(_open_bundle, settings)
    rules = standing_rules(settings, bundle.attributes.kinds)
    channels = {
        peer: rpc_client.channel(address, tracing.client_interceptors, tls=settings.tls)
        for peer, address in (("encoder", settings.encoder_address), ("generator", settings.generator_address))
    }
    peers: dict[str, Peer] = {
        peer: in_process.get(peer)
        or Replicas(partial(rpc_client.channel, address, tracing.client_interceptors, shares=False, tls=settings.tls))
        for peer, address in (
            ("encoder", settings.encoder_address),
            ("candidates", settings.candidates_address),
            ("reranker", settings.reranker_address),
        )
    }
    refresher_channels = {
        address: rpc_client.channel(address, tracing.client_interceptors, tls=settings.tls)
        for address in settings.refreshers
    }
    # A connection for each call that may be in flight: a burst must not read as an outage.
    reader = StateReader(
        settings.redis,
        timeout_s=settings.state_timeout_ms / 1000,
        max_connections=settings.max_in_flight,
        with_traces=tracing.is_on,
    )
    sessions = SessionStore(
        settings.redis,
        reader.home,
        timeout_s=settings.state_timeout_ms / 1000,
        max_connections=settings.max_in_flight,
    )
    producer = EventProducer(settings.kafka, client_id="freshet-gateway")
    producer.start()
    stream = ProbedStreamStatus(channels["encoder"], settings.kafka_bootstrap.split(","))
    await stream.start()
    metrics = GatewayMetrics()
    shown = None
    if settings.exposures:
        shown = KafkaExposureLog(settings.kafka, of_users, told=metrics.exposures_kept)
        shown.start()
    described = DescribedItems(dict(zip(bundle.item_ids, bundle.titles, strict=True)), popular)
    follower = CatalogueFollower(
        catalogue_reader(settings.kafka, "freshet-gateway", ITEMS),
        described,
        model_version=bundle.model_version,
        on_ready=described.caught_up,
        follows_deltas=False,
        kinds=bundle.attributes.kinds,
    )
    metrics.watch_turns(follower.turns)
    health.watch("items", follower.turns)
    follower.start()
    popular_now = FollowedPopularity(reader.read_popular, popular)
    popular_now.start()
    ends = KafkaStreamEnds(settings.kafka)
    ends.start()
    stalls = LoopStalls()
    stalls.start()
    servicer = make_servicer(
        Ports(
            states=RedisUserStates(reader, bundle.model_version),
            sessions=sessions,
            encoder=RemoteEncoder(peers["encoder"], bundle.model_version),
            candidates=RemoteCandidates(peers["candidates"]),
            reranker=RemoteReranker(peers["reranker"]),
            sources=RemoteTextSources(channels["generator"]),
            refreshers=RemoteRefreshers(refresher_channels),
            ends=ends,
            interactions=KafkaInteractionLog(producer, tracing),
            items=KafkaItemLog(producer, tracing),
            forgets=KafkaForgetLog(producer, tracing),
            stream=stream,
        ),
        limits=settings.limits,
        lag=AcknowledgedLag(grace_seconds=settings.lag_grace_ms / 1000),
        popular=popular,
        titles=described.titles,
        metrics=metrics,
        model_version=bundle.model_version,
        schema=bundle.event_schema,
        exposures=Exposures(key, shown),
        pages=PageTokens(key),
        kinds=bundle.attributes.kinds,
        tau=bundle.tau,
        rules=rules,
        stalled_s=stalls.since,
        tracing=tracing,
    )

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(servicer, server)
        return [SERVICE]

    async def on_drain() -> None:
        stalls.stop()
        await stream.close()
        await popular_now.close()
        await asyncio.to_thread(follower.stop)
        await ends.close()
        await producer.close()
        if shown is not None:
            await shown.close()
        await reader.close()
        await sessions.close()
        for connected in (*channels.values(), *refresher_channels.values(), *peers.values()):
            await connected.close()

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
        door=door,
        before_listening=before_listening,
        beside=by_http if settings.resolved_http_port else None,
    )
