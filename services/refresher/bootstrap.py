"""Assembles the refresher process from concrete adapters."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import numpy as np
import structlog
from freshet.v1 import refresher_pb2_grpc

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.bundles.tensor_file import changed_in_place
from services.algorithms.pefa.content import TextStates
from services.algorithms.pefa.policy import SharePolicy
from services.algorithms.pefa.share_choice import share_of_length
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.items import ITEMS
from services.contracts.topics.refresher_checkpoints import REFRESHER_CHECKPOINTS
from services.platform.config import ConfigError
from services.platform.process import configure_tracing
from services.platform.request_context import OFF, Tracing
from services.platform.rpc.server import HealthState, RpcServer, serve
from services.platform.stream.kafka import BulkProducer
from services.refresher.adapters.checkpoint_topic import CheckpointFiles, CheckpointTopic
from services.refresher.adapters.topics import KafkaLog, KafkaOutbox, QueryShape
from services.refresher.config import RefresherSettings
from services.refresher.consumer import Refresher, RefresherLimits
from services.refresher.domain.partition import PartitionRegistry
from services.refresher.domain.rules import ModelItems, Rules
from services.refresher.handlers.publish import ContentStates, Publisher
from services.refresher.metrics import RefresherMetrics
from services.refresher.server import SERVICE, Describe, RefresherServicer
from services.user_state.leases import RedisLeases

log = structlog.get_logger()

_add_servicer: Any = refresher_pb2_grpc.add_RefresherServiceServicer_to_server

_GROUP = "freshet-refresher"
# Interactions of unknown items, per partition of `attributions`.
_MAX_PENDING = 65_536
# Longer than handing over a publication's records takes, so that it is one request, and each reader gets one answer.
_LINGER_MS = 50
_MAX_GATHER_MS = 1_000
# Bytes of checkpoint parts per fetch, and a fetch's wait for records. The wait is short, because at the log's end the
# next read waits for a prefetch.
_READ_TOGETHER, _PARTS_WAIT_MS = 16 << 20, 10
_AGAIN_WAIT_MS = 20  # short, because a caller waits for the records


def fold_rules(settings: RefresherSettings, bundle: Bundle) -> Rules:
    encoder = bundle.manifest.encoder
    uses_users = encoder is not None and encoder.uses_user_index
    items = ModelItems(
        model_version=bundle.model_version,
        num_query_components=bundle.num_query_components,
        states=bundle.item_states,
        index=bundle.item_index,
        counts=bundle.counts if bundle.counts.any() else None,
        pair_gate=bundle.pair_gate,
        leave_out=bundle.num_query_components - 1 if uses_users else None,
    )
    return Rules(
        items=items,
        # An interaction's weight does not depend on its age.
        feedback=bundle.event_schema.feedback,
        max_remembered=settings.max_remembered,
        max_pending=_MAX_PENDING,
    )


def new_item_policy(settings: RefresherSettings, bundle: Bundle) -> SharePolicy | None:
    """Return the model weight policy of new items from the setting or the training, or None if both have none."""
    if settings.new_item_model_weight:
        return SharePolicy.parse(settings.new_item_model_weight)
    length = bundle.manifest.new_item_length
    return None if length is None else share_of_length(length)


def kafka_log(settings: RefresherSettings, bundle: Bundle, tracing: Tracing = OFF) -> KafkaLog:
    """Return the log on Kafka. The first read creates missing topics."""
    head = bundle.manifest.head

    def reader(client_id: str, window_ms: int, *topics: str) -> TopicReader:
        return TopicReader(
            settings.kafka,
            *topics,
            group_id=_GROUP,
            client_id=client_id,
            makes_topics=settings.replicas,
            window_ms=window_ms,
            max_poll_records=2048,
        )

    return KafkaLog(
        # Reading more often than publishing is useless.
        reader("freshet-refresher", min(settings.publish_ms, _MAX_GATHER_MS), ATTRIBUTIONS, ITEMS),
        reader("freshet-refresher-again", _AGAIN_WAIT_MS, ATTRIBUTIONS),
        QueryShape(
            model_version=bundle.model_version,
            num_components=head.num_query_components,
            component_width=head.component_width,
            num_pairs=head.num_pairs if head.is_mixture else 0,
        ),
        tracing,
    )


def content_states(settings: RefresherSettings, bundle: Bundle) -> ContentStates | None:
    """Return a model of item states by text, fitted on the bundle's items, or None without a text encoder.

    Raises: ConfigError if the encoder's weights are not installed.
    """
    if not settings.text_encoder:
        return None
    from services.algorithms.models.sentence_encoder import MiniLM, model_folder

    try:
        encoder = MiniLM(model_folder())
    except ValueError as exc:
        raise ConfigError(f"FRESHET_REFRESHER_TEXT_ENCODER={settings.text_encoder!r}: {exc}") from exc
    trained = np.flatnonzero(bundle.counts > 0) if bundle.counts.any() else np.arange(bundle.num_items)
    texts = TextStates(
        encoder,
        titles=bundle.titles.take(trained),
        categories=list(bundle.categories.take(trained)),
        items=bundle.item_states.take(trained),
        counts=bundle.counts[trained],
    )
    log.info(
        "text_encoder_fitted",
        left_out_cosine=round(texts.map.left_out_cosine, 4),
        standard_error=round(texts.map.standard_error, 4),
        says_something=bool(texts.map.distance.any()),
    )
    return ContentStates(texts)


def checkpoint_topic(settings: RefresherSettings, model_version: str) -> CheckpointTopic:
    """Return a model's checkpoints: those of the topic, then restored ones from a folder."""
    return CheckpointTopic(
        TopicReader(
            settings.kafka,
            REFRESHER_CHECKPOINTS,
            group_id=_GROUP,
            client_id="freshet-refresher-checkpoints",
            makes_topics=settings.replicas,
            window_ms=_PARTS_WAIT_MS,
            max_partition_bytes=_READ_TOGETHER,
        ),
        BulkProducer(settings.kafka, client_id="freshet-refresher-checkpoints"),
        model_version,
        files=CheckpointFiles(settings.checkpoints / model_version),
    )


async def run(settings: RefresherSettings) -> None:
    """Serve and fold until a signal.

    The process is NOT_SERVING until Kafka and Redis were reached once. Raises: BundleError, PortTaken.
    """
    bundle = await asyncio.to_thread(load_bundle, settings.bundle)
    rules = await asyncio.to_thread(fold_rules, settings, bundle)
    tracing = configure_tracing("refresher", settings.otlp_endpoint)
    metrics = RefresherMetrics()
    health = HealthState(check=changed_in_place)
    registry = PartitionRegistry()
    withdrawn: dict[str, bool] = {}
    publisher = Publisher(
        weight_policy=SharePolicy.parse(settings.model_weight),
        min_users=settings.min_users,
        withdrawn=withdrawn,
        content=await asyncio.to_thread(content_states, settings, bundle),
        new_item_policy=new_item_policy(settings, bundle),
    )
    refresher = Refresher(
        log=kafka_log(settings, bundle, tracing),
        outbox=KafkaOutbox(
            BulkProducer(settings.kafka, client_id="freshet-refresher", linger_ms=_LINGER_MS), tracing=tracing
        ),
        checkpoints=checkpoint_topic(settings, bundle.model_version),
        leases=RedisLeases(settings.redis, process="refresher", group=bundle.model_version, lease_ms=settings.lease_ms),
        rules=rules,
        publisher=publisher,
        withdrawn=withdrawn,
        registry=registry,
        metrics=metrics,
        limits=RefresherLimits(
            publish_s=settings.publish_ms / 1000,
            checkpoint_s=settings.checkpoint_seconds,
        ),
        keeper=ThreadPoolExecutor(1, "checkpoints"),
        on_ready=lambda: health.set_ready(True),
        on_stall=lambda: health.set_ready(False),
        tracing=tracing,
    )
    health.watch("attributions", refresher.turns)
    describe = Describe(registry, publisher, rules)

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(RefresherServicer(describe), server)
        refresher.start()
        return [SERVICE]

    server = RpcServer(
        process="refresher", settings=settings, add_services=add_services, health_state=health, tracing=tracing
    )
    await serve(server, on_drain=partial(asyncio.to_thread, refresher.stop))
