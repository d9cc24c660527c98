"""Puts the gateway together: the only module that names concrete adapters."""

import asyncio
from typing import Any

import grpc
from freshet.v1 import gateway_pb2_grpc

from services.algorithms.bundle import Bundle, load_bundle
from services.common import rpc_client
from services.common.catalogue_follower import CatalogueFollower
from services.common.catalogue_topics import KafkaCatalogueTopics
from services.common.kafka import EventProducer
from services.common.rpc_server import serve
from services.common.state_store import StateReader
from services.common.topics import NUM_PARTITIONS
from services.common.tracing import configure_tracing
from services.gateway.adapters.processes import (
    RemoteCandidates,
    RemoteEncoder,
    RemoteRefreshers,
    RemoteReranker,
    RemoteTextSources,
)
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
from services.gateway.server import SERVICE, GatewayServicer
from services.gateway.stages import Stages
from services.gateway.text_retrieval import TextRetrieval

# The generated stubs carry no types.
_add_servicer: Any = gateway_pb2_grpc.add_GatewayServiceServicer_to_server


def _open_bundle(settings: GatewaySettings) -> tuple[Bundle, PopularItems]:
    bundle = load_bundle(settings.bundle)
    return bundle, PopularItems(bundle.item_ids, bundle.counts, bundle.categories)


async def run(settings: GatewaySettings) -> None:
    """Serve until a signal.

    Raises: BundleError for an unusable bundle, PortTaken for a taken port. Redis, Kafka and the other processes may
    be away at start: answers are marked until they come.
    """
    bundle, popular = await asyncio.to_thread(_open_bundle, settings)
    tracing = configure_tracing("gateway", settings.otlp_endpoint)
    channels = {
        peer: rpc_client.channel(address, tracing.client_interceptors)
        for peer, address in (
            ("encoder", settings.encoder_address),
            ("candidates", settings.candidates_address),
            ("reranker", settings.reranker_address),
            ("generator", settings.generator_address),
        )
    }
    refresher_channels = {
        address: rpc_client.channel(address, tracing.client_interceptors) for address in settings.refreshers
    }
    # A connection for each call that may be in flight: a burst must not read as an outage.
    reader = StateReader(
        settings.redis_url, timeout_s=settings.state_timeout_ms / 1000, max_connections=settings.max_in_flight
    )
    producer = EventProducer(settings.kafka_bootstrap, client_id="freshet-gateway")
    producer.start()
    interactions = KafkaInteractionLog(producer)
    stream = ProbedStreamStatus(channels["encoder"], settings.kafka_bootstrap.split(","))
    await stream.start()
    states = RedisUserStates(reader, bundle.model_version)
    lag = AcknowledgedLag(grace_seconds=settings.lag_grace_ms / 1000)
    metrics = GatewayMetrics()
    described = DescribedItems(dict(zip(bundle.item_ids, bundle.titles, strict=True)), popular)
    follower = CatalogueFollower(
        KafkaCatalogueTopics(settings.kafka_bootstrap, process="freshet-gateway", sets_aside=False),
        described,
        model_version=bundle.model_version,
        follows_deltas=False,
    )
    metrics.watch_turns(follower.turns)
    follower.start()
    encoder = RemoteEncoder(channels["encoder"])
    candidates = RemoteCandidates(channels["candidates"])
    reranker = RemoteReranker(channels["reranker"])
    refreshers = RemoteRefreshers(refresher_channels)
    ends = KafkaStreamEnds(settings.kafka_bootstrap)
    ends.start()
    stage_timeout_s = settings.stage_timeout_ms / 1000
    breaker_seconds = settings.breaker_ms / 1000
    text = TextRetrieval(
        RemoteTextSources(channels["generator"]), timeout_s=stage_timeout_s, breaker_seconds=breaker_seconds
    )
    stages = Stages(
        states=states,
        encoder=encoder,
        candidates=candidates,
        reranker=reranker,
        interactions=interactions,
        limits=settings.limits,
        breaker_seconds=breaker_seconds,
    )
    recommend = Recommend(
        stages=stages,
        text=text,
        interactions=interactions,
        stream=stream,
        lag=lag,
        popular=popular,
        metrics=metrics,
        model_version=bundle.model_version,
        limits=settings.limits,
    )
    search = Search(
        stages=stages,
        text=text,
        stream=stream,
        metrics=metrics,
        titles=described.titles,
        model_version=bundle.model_version,
        limits=settings.limits,
    )
    record = RecordInteractions(
        interactions=interactions,
        states=states,
        lag=lag,
        metrics=metrics,
        append_timeout_s=settings.append_timeout_ms / 1000,
        breaker_seconds=breaker_seconds,
    )
    explain = Explain(
        states=states,
        encoder=encoder,
        candidates=candidates,
        reranker=reranker,
        interactions=interactions,
        titles=described.titles,
        model_version=bundle.model_version,
        timeout_s=stage_timeout_s,
    )
    get_freshness = GetFreshness(
        states=states,
        ends=ends,
        candidates=candidates,
        reranker=reranker,
        refreshers=refreshers,
        stream=stream,
        model_version=bundle.model_version,
    )

    append_timeout_s = settings.append_timeout_ms / 1000
    put_items = PutItems(log=KafkaItemLog(producer), append_timeout_s=append_timeout_s)
    forget_user = ForgetUser(
        log=KafkaForgetLog(producer),
        ends=ends,
        encoder=encoder,
        refreshers=refreshers,
        num_partitions=NUM_PARTITIONS,
        append_timeout_s=append_timeout_s,
    )

    def add_services(server: grpc.aio.Server) -> list[str]:
        servicer = GatewayServicer(
            recommend=recommend,
            search=search,
            record=record,
            explain=explain,
            get_freshness=get_freshness,
            put_items=put_items,
            forget_user=forget_user,
        )
        _add_servicer(servicer, server)
        return [SERVICE]

    async def on_drain() -> None:
        await stream.close()
        await asyncio.to_thread(follower.stop)
        await ends.close()
        await producer.close()
        await reader.close()
        for channel in (*channels.values(), *refresher_channels.values()):
            await channel.close()

    await serve(process="gateway", settings=settings, add_services=add_services, on_drain=on_drain, tracing=tracing)
