"""Puts the gateway together: the only module that names concrete adapters."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc
from freshet.v1 import gateway_pb2_grpc

from services.algorithms.bundle import Bundle, load_bundle
from services.common import rpc_client
from services.common.catalogue_follower import CatalogueFollower, catalogue_reader
from services.common.kafka import EventProducer
from services.common.rpc_server import HealthState, serve
from services.common.state_store import StateReader
from services.common.stream.topics.items import ITEMS
from services.common.tracing import configure_tracing
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
from services.gateway.catalogue import DescribedItems
from services.gateway.config import GatewaySettings
from services.gateway.handlers.explain import Explain
from services.gateway.handlers.forget import ForgetUser
from services.gateway.handlers.get_freshness import GetFreshness
from services.gateway.handlers.items import PutItems
from services.gateway.handlers.recommend import Recommend
from services.gateway.handlers.record import RecordInteractions
from services.gateway.handlers.search import Search
from services.gateway.lag import AcknowledgedLag
from services.gateway.metrics import GatewayMetrics
from services.gateway.popular import PopularItems
from services.gateway.ports import Ports
from services.gateway.server import SERVICE, GatewayServicer
from services.gateway.stages import Limits, Stages
from services.gateway.text_retrieval import TextRetrieval

# The generated stubs carry no types.
_add_servicer: Any = gateway_pb2_grpc.add_GatewayServiceServicer_to_server


def _open_bundle(settings: GatewaySettings) -> tuple[Bundle, PopularItems]:
    bundle = load_bundle(settings.bundle)
    return bundle, PopularItems(bundle.item_ids, bundle.counts, bundle.categories)


def make_servicer(
    ports: Ports,
    *,
    limits: Limits,
    lag: AcknowledgedLag,
    popular: PopularItems,
    titles: Mapping[str, str],
    metrics: GatewayMetrics,
    model_version: str,
) -> GatewayServicer:
    """Every handler on these ports. `titles`: by item id, live."""
    stages = Stages(ports, limits)
    text = TextRetrieval(ports.sources, limits)
    return GatewayServicer(
        recommend=Recommend(
            ports=ports,
            stages=stages,
            text=text,
            lag=lag,
            popular=popular,
            metrics=metrics,
            model_version=model_version,
            limits=limits,
        ),
        search=Search(
            stages=stages,
            text=text,
            metrics=metrics,
            titles=titles,
            model_version=model_version,
            limits=limits,
        ),
        record=RecordInteractions(ports=ports, lag=lag, metrics=metrics, limits=limits),
        explain=Explain(ports=ports, titles=titles, model_version=model_version, limits=limits),
        get_freshness=GetFreshness(ports=ports, model_version=model_version),
        put_items=PutItems(log=ports.items, append_timeout_s=limits.append_timeout_s),
        forget_user=ForgetUser(ports=ports, append_timeout_s=limits.append_timeout_s),
    )


async def run(settings: GatewaySettings) -> None:
    """Serve until a signal.

    Raises: BundleError for an unusable bundle, PortTaken for a taken port. Redis, Kafka and the other processes may
    be away at start: answers are marked until they come.
    """
    bundle, popular = await asyncio.to_thread(_open_bundle, settings)
    tracing = configure_tracing("gateway", settings.otlp_endpoint)
    channels = {
        peer: rpc_client.channel(address, tracing.client_interceptors, tls=settings.tls)
        for peer, address in (("encoder", settings.encoder_address), ("generator", settings.generator_address))
    }
    replicas = {
        peer: Replicas(
            partial(rpc_client.channel, address, tracing.client_interceptors, shares=False, tls=settings.tls)
        )
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
        settings.redis, timeout_s=settings.state_timeout_ms / 1000, max_connections=settings.max_in_flight
    )
    producer = EventProducer(settings.kafka, client_id="freshet-gateway")
    producer.start()
    stream = ProbedStreamStatus(channels["encoder"], settings.kafka_bootstrap.split(","))
    await stream.start()
    metrics = GatewayMetrics()
    described = DescribedItems(dict(zip(bundle.item_ids, bundle.titles, strict=True)), popular)
    follower = CatalogueFollower(
        catalogue_reader(settings.kafka, "freshet-gateway", ITEMS),
        described,
        model_version=bundle.model_version,
        on_ready=described.caught_up,
        follows_deltas=False,
    )
    metrics.watch_turns(follower.turns)
    health = HealthState(ready=True)
    health.watch("catalogue", follower.turns)
    follower.start()
    ends = KafkaStreamEnds(settings.kafka)
    ends.start()
    servicer = make_servicer(
        Ports(
            states=RedisUserStates(reader, bundle.model_version),
            encoder=RemoteEncoder(replicas["encoder"], bundle.model_version),
            candidates=RemoteCandidates(replicas["candidates"]),
            reranker=RemoteReranker(replicas["reranker"]),
            sources=RemoteTextSources(channels["generator"]),
            refreshers=RemoteRefreshers(refresher_channels),
            ends=ends,
            interactions=KafkaInteractionLog(producer),
            items=KafkaItemLog(producer),
            forgets=KafkaForgetLog(producer),
            stream=stream,
        ),
        limits=settings.limits,
        lag=AcknowledgedLag(grace_seconds=settings.lag_grace_ms / 1000),
        popular=popular,
        titles=described.titles,
        metrics=metrics,
        model_version=bundle.model_version,
    )

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(servicer, server)
        return [SERVICE]

    async def on_drain() -> None:
        await stream.close()
        await asyncio.to_thread(follower.stop)
        await ends.close()
        await producer.close()
        await reader.close()
        for connected in (*channels.values(), *refresher_channels.values(), *replicas.values()):
            await connected.close()

    await serve(
        process="gateway",
        settings=settings,
        add_services=add_services,
        on_drain=on_drain,
        health_state=health,
        tracing=tracing,
    )
