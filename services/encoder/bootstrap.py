"""Assemble the encoder process from concrete adapters."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog
from freshet.v1 import encoder_pb2_grpc

from services.algorithms.bundles.model_bundle import ENCODER_ONNX, ENCODER_STEP_ONNX, Bundle, load_bundle
from services.algorithms.bundles.tensor_file import changed_in_place
from services.algorithms.encoding.actions import Actions
from services.algorithms.encoding.aversion import Aversion
from services.contracts.operation_log import OperationFollower, operation_reader
from services.contracts.pseudonyms import DEVELOPMENT_PSEUDONYM_KEY, pseudonym_key
from services.contracts.topic_reader import TopicReader
from services.contracts.topics import version_sets
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.forgets import FORGETS
from services.contracts.topics.histories import HISTORIES
from services.contracts.topics.interactions import INTERACTIONS
from services.encoder.adapters.in_process import InProcessEncoder
from services.encoder.adapters.inference_server import InferenceServerEncoder
from services.encoder.adapters.kafka_outbox import KafkaOutbox
from services.encoder.config import EncoderSettings
from services.encoder.consumer import Consumer, ConsumerLimits
from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.handlers.encode import states_of
from services.encoder.handlers.forget_users import ForgetUsers
from services.encoder.metrics import EncoderMetrics
from services.encoder.models import Model, Models
from services.encoder.server import SERVICE, DescribeUser, EncoderServicer, ServedModels
from services.platform.machine import require_memory
from services.platform.process import configure_tracing
from services.platform.request_context import OFF, Tracing
from services.platform.rpc.server import HealthState, RpcServer, serve
from services.platform.stream.kafka import BulkProducer
from services.platform.stream.ports import Offsets
from services.user_state.forgetting import ForgetTopic, Forgotten, KnownForgets
from services.user_state.history_topic import HistoryTopic
from services.user_state.leases import RedisLeases
from services.user_state.reader import StateReader
from services.user_state.restore_users import LogReplay, RestoreUsers
from services.user_state.write_histories import WriteHistories
from services.user_state.writer import StateWriter

log = structlog.get_logger()

_add_servicer: Any = encoder_pb2_grpc.add_EncoderServiceServicer_to_server

# Time limit of a Redis call for `DescribeUser`.
DESCRIBE_TIMEOUT_S = 1.0
# Pause before the next read of a busy stream, so that events gather.
_WINDOW_MS = 20
_MAX_FORGETS = 10_000
# Memory of an ONNX Runtime session as a multiple of its graph's size.
_TIMES_ONNX = 3
# A fetch returns at most this many bytes of a partition, some 250 events, so that partitions with a backlog take turns.
_TURN_BYTES = 1 << 15


def vocabulary_of(bundle: Bundle) -> Vocabulary:
    return Vocabulary(
        model_version=bundle.model_version,
        # A dictionary, because each new event looks up all items of its user's history.
        item_index=dict(zip(bundle.item_ids, range(bundle.num_items), strict=True)),
        user_index=bundle.user_index,
        max_history=bundle.max_history,
        untrained=bundle.untrained,
        schema=bundle.event_schema,
        actions=Actions(bundle.event_schema, bundle.encoder.actions) if bundle.encoder.actions else None,
        aversion=Aversion(
            bundle.item_states,
            bundle.pair_gate,
            leave_out=bundle.num_query_components - 1 if bundle.encoder.uses_user_index else None,
        ),
        absence=bundle.absence,
    )


def model_encoder(settings: EncoderSettings, bundle: Bundle) -> InProcessEncoder | InferenceServerEncoder:
    """Return the bundle's model in the configured engine."""
    if settings.engine == "in-process":
        return in_process_encoder(settings, bundle)
    return inference_encoder(settings, bundle)


def in_process_encoder(settings: EncoderSettings, bundle: Bundle) -> InProcessEncoder:
    has_step = ENCODER_STEP_ONNX in bundle.manifest.files
    return InProcessEncoder(
        bundle.file(ENCODER_ONNX),
        bundle.file(ENCODER_STEP_ONNX) if has_step else None,
        max_history=bundle.max_history,
        cache_bytes=settings.cache_mib << 20,
    )


def open_model(settings: EncoderSettings, folder: Path) -> Model:
    """Open in this process a model that belongs to another version set. Raises: BundleError, MemoryError."""
    bundle = load_bundle(folder)
    needs = _TIMES_ONNX * bundle.file(ENCODER_ONNX).stat().st_size + (settings.cache_mib << 20)
    require_memory(f"the model at {folder}", needs, limit_mb=0, variable="")
    return Model(vocabulary_of(bundle), in_process_encoder(settings, bundle))


def close_model(model: Model) -> None:
    if isinstance(model.encoder, InProcessEncoder):
        model.encoder.close()


def inference_encoder(settings: EncoderSettings, bundle: Bundle) -> InferenceServerEncoder:
    head = bundle.manifest.head
    return InferenceServerEncoder(
        settings.inference_server,
        tls=settings.inference_tls,
        model_version=bundle.model_version,
        max_history=bundle.max_history,
        components_shape=(head.num_query_components, head.component_width),
        has_gate=head.is_mixture,
        uses_user_index=bundle.encoder.uses_user_index,
    )


def _reader(settings: EncoderSettings, topic: str, name: str, **options: Any) -> TopicReader:
    return TopicReader(
        settings.kafka,
        topic,
        group_id=settings.group_id,
        client_id=f"freshet-encoder{name}",
        makes_topics=settings.replicas,
        **options,
    )


def kafka_stream(
    settings: EncoderSettings, partitions: Sequence[int] | None = None, *, max_partition_bytes: int = 1 << 20
) -> TopicReader:
    """Return a reader of these partitions of `interactions`, or of all."""
    return _reader(
        settings,
        INTERACTIONS,
        "",
        partitions=partitions,
        pause_ms=_WINDOW_MS,
        max_poll_records=settings.max_poll_records,
        max_partition_bytes=max_partition_bytes,
    )


def forget_log(settings: EncoderSettings) -> ForgetTopic:
    """Return a reader of `forgets`, which every process reads in full."""
    return ForgetTopic(_reader(settings, FORGETS, "-forgets", max_poll_records=_MAX_FORGETS, rest_ms=1_000))


def state_writer(settings: EncoderSettings) -> StateWriter:
    return StateWriter(settings.redis, ttl_seconds=settings.user_ttl_seconds, max_seen=settings.max_seen_items)


def pseudonym_keys(settings: EncoderSettings) -> list[bytes]:
    """Return the current pseudonym key, then earlier keys. Raises: ConfigError."""
    key = pseudonym_key(settings)
    earlier = [one.encode() for one in settings.earlier_pseudonym_keys.get_secret_value().split()]
    return [key, *(one for one in earlier if one != key)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The handlers of the stream and their loop."""

    consumer: Consumer
    records: ApplyRecords
    forgets: ForgetUsers


def make_stream(
    settings: EncoderSettings,
    store: StateWriter,
    own: Model,
    metrics: EncoderMetrics,
    *,
    health: HealthState | None = None,
    tracing: Tracing = OFF,
) -> Stream:
    """Assemble the stream with the process's own model. health: follows the stream's readiness."""
    outbox = KafkaOutbox(BulkProducer(settings.kafka, client_id="freshet-encoder"), tracing=tracing)
    vocabulary, keys, forgotten = own.vocabulary, pseudonym_keys(settings), Forgotten()
    # A second reader, since restoring a lost user reads from the beginning.
    log_again = _reader(settings, INTERACTIONS, "-restore", max_poll_records=10_000)
    histories = _reader(settings, HISTORIES, "-histories", max_poll_records=2_000)
    keep = WriteHistories(
        topic=HistoryTopic(histories, outbox, metrics.kept.inc),
        log=log_again,
        store=store,
        every_s=settings.history_every_s,
        ttl_seconds=settings.user_ttl_seconds,
    )
    restore_users = RestoreUsers(
        store=store,
        replay=LogReplay(
            log=log_again,
            letters=_reader(settings, INTERACTIONS + SUFFIX, "-dead-letters"),
            forgotten=forgotten,
            max_history=vocabulary.max_history,
            schema=vocabulary.schema,
        ),
        keep=keep,
        model_version=vocabulary.model_version,
        make_states=partial(states_of, own),
        restored=metrics.restored.inc,
    )
    records = ApplyRecords(
        store=store,
        outbox=outbox,
        encoder=own.encoder,
        vocabulary=vocabulary,
        pseudonym_key=keys[0],
        forgotten=forgotten,
        restore_users=restore_users,
        keep=keep,
        popularity_half_life_s=settings.popularity_half_life_hours * 3600,
        tracing=tracing,
    )
    records.encode_batch.failed = metrics.other_model_failures.inc
    stream = kafka_stream(settings, max_partition_bytes=_TURN_BYTES)

    def ends() -> Offsets:
        return {partition: end for partition, (_, end) in stream.bounds(range(stream.num_partitions())).items()}

    forgets = ForgetUsers(
        known=KnownForgets(topic=forget_log(settings), forgotten=forgotten, ends=ends),
        store=store,
        outbox=outbox,
        encoder=own.encoder,
        model_version=vocabulary.model_version,
        pseudonym_keys=keys,
        reader=settings.group_id,
        keep=keep,
        check_in_step=records.progress.check_in_step,
        schema=vocabulary.schema,
    )
    set_ready = (lambda ready: None) if health is None else health.set_ready
    consumer = Consumer(
        stream=stream,
        handler=records,
        forgets=forgets,
        metrics=metrics,
        limits=ConsumerLimits(min_records=min(512, settings.max_poll_records), max_records=settings.max_poll_records),
        leases=RedisLeases(settings.redis, process="encoder", group=settings.group_id, lease_ms=settings.lease_ms),
        on_ready=lambda: set_ready(True),
        on_stall=lambda: set_ready(False),
    )
    return Stream(consumer=consumer, records=records, forgets=forgets)


async def run(settings: EncoderSettings) -> None:
    """Serve and apply the stream until a signal.

    The process is NOT_SERVING until Kafka, Redis and the model were reached once, and while the stream stalls.
    Raises: ConfigError, BundleError, PortTaken.
    """
    keys = pseudonym_keys(settings)
    bundle = await asyncio.to_thread(load_bundle, settings.bundle)
    vocabulary = await asyncio.to_thread(vocabulary_of, bundle)
    if keys[0] == DEVELOPMENT_PSEUDONYM_KEY.encode():
        log.warning("development_pseudonym_key", advice="set FRESHET_PSEUDONYM_KEY before real users' events come")
    tracing = configure_tracing("encoder", settings.otlp_endpoint)
    metrics, health = EncoderMetrics(), HealthState(check=changed_in_place)
    encoder = model_encoder(settings, bundle)
    metrics.watch_cache(encoder.cache_counts)
    store = state_writer(settings)
    reader = StateReader(settings.redis, timeout_s=DESCRIBE_TIMEOUT_S)
    own, loop = Model(vocabulary, encoder), asyncio.get_running_loop()
    stream = make_stream(settings, store, own, metrics, health=health, tracing=tracing)
    consumer = stream.consumer
    health.watch("interactions", consumer.turns)
    served = ServedModels(health)
    await served.serve([own])

    def changed(others: tuple[Model, ...]) -> None:
        # The stream uses a model before `Encode` serves it. A removed model is closed after its last batch.
        stream.records.encode_batch.set_others(others)
        asyncio.run_coroutine_threadsafe(served.serve([own, *others]), loop).result()

    models = Models(own, open_model=partial(open_model, settings), changed=changed, close=close_model)
    stream.forgets.encoder = models
    # The stream starts once all models are open, because a record gets attributions only of the models that are open
    # when it is applied.
    sets = OperationFollower(
        version_sets.OPERATIONS,
        operation_reader(
            settings.kafka, version_sets.OPERATIONS, "freshet-encoder-version-sets", makes_topics=settings.replicas
        ),
        models.apply,
        on_ready=consumer.start,
    )
    describe_user = DescribeUser(
        reader=reader, vocabulary=vocabulary, pseudonym_keys=keys, applied_up_to=stream.forgets.applied_up_to
    )

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(EncoderServicer(served.handlers, describe_user, metrics, bundle.model_version), server)
        sets.start()
        return [SERVICE]

    async def on_drain() -> None:
        await asyncio.to_thread(sets.stop)
        await asyncio.to_thread(consumer.stop)
        await served.close()
        for one in models.others:
            close_model(one)
        encoder.close()
        store.close()
        await reader.close()

    server = RpcServer(
        process="encoder",
        settings=settings,
        add_services=add_services,
        health_state=health,
        tracing=tracing,
    )
    await serve(server, on_drain=on_drain)
