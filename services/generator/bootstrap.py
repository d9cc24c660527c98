"""Puts the generator process together: the only module that names concrete encoders and topics.

Sources load apart. What a text bundle lacks, or cannot be read of it, is named with its reason, and the others serve.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import structlog
from freshet.v1 import generator_pb2_grpc

from services.algorithms.bundle import Bundle, load_bundle
from services.algorithms.generation.phrases_part import load_phrases
from services.algorithms.manifest import BundleError
from services.algorithms.pefa.policy import SharePolicy
from services.algorithms.text_bundle import TextBundle
from services.common.catalogue_follower import CatalogueFollower
from services.common.errors import PreconditionFailed
from services.common.rpc_server import HealthState, serve
from services.common.topics import ITEMS, SEARCH_CLICKS
from services.common.tracing import configure_tracing
from services.generator.adapters.kafka_clicks import KafkaClicks, KafkaItems
from services.generator.adapters.text_encoders import InferenceServerText, InProcessText, SharedText
from services.generator.adapters.text_parts import (
    Graph,
    Queries,
    documents_catalogue,
    open_text_bundle,
    phrase_queries,
    text_queries,
)
from services.generator.changes import ItemChanges
from services.generator.clicks import ClicksFollower
from services.generator.config import GeneratorSettings
from services.generator.domain.items import ItemTable
from services.generator.domain.lexical import Lexical
from services.generator.domain.phrases import Phrases
from services.generator.domain.requests import LEXICAL, PHRASES, TEXT_MOL, Generated, Scored, Source, TextScored
from services.generator.handlers.describe import Describe
from services.generator.handlers.match import Match
from services.generator.metrics import GeneratorMetrics
from services.generator.ports import TextEncoder
from services.generator.server import SERVICE, GeneratorServicer

if TYPE_CHECKING:  # it loads PyTorch, which a process without a text bundle has no need of
    from services.generator.domain.text_mol import TextMol

log = structlog.get_logger()

# The generated stubs carry no types.
_add_servicer: Any = generator_pb2_grpc.add_GeneratorServiceServicer_to_server


Answer = TypeVar("Answer", bound=Scored)


@dataclass(kw_only=True, slots=True)
class Sources:
    """What is loaded; `reasons` names what is not."""

    items: ItemTable
    lexical: Lexical
    text_version: str
    text: "TextMol | None" = None
    phrases: Phrases | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    encoders: list[TextEncoder] = field(default_factory=list)
    # Graphs of more than one source, by file and threads.
    shared: dict[tuple[Path, int], SharedText] = field(default_factory=dict)


def load_sources(settings: GeneratorSettings, metrics: GeneratorMetrics) -> Sources:
    """Everything that can be loaded. Raises: BundleError for an unusable model bundle."""
    bundle = load_bundle(settings.bundle)
    text_bundle, reason = open_text_bundle(settings.text)
    documents = {} if text_bundle is None else dict(zip(text_bundle.item_ids, text_bundle.texts, strict=True))
    items = ItemTable(bundle.item_ids, bundle.titles, bundle.categories, documents)
    version = f"titles.{bundle.model_version}" if text_bundle is None else text_bundle.text_version
    sources = Sources(items=items, lexical=Lexical(items, text_version=version), text_version=version)
    if text_bundle is None:
        sources.reasons = {TEXT_MOL: reason, PHRASES: reason}
        return sources
    for name, load in ((TEXT_MOL, _load_text), (PHRASES, _load_phrases)):
        try:
            load(settings, metrics, bundle, text_bundle, sources)
        except (BundleError, ValueError, PreconditionFailed) as exc:
            sources.reasons[name] = str(exc)
            is_part = name in text_bundle.parts
            log.log(40 if is_part else 20, "source_not_loaded", source=name, reason=str(exc))
    return sources


def _load_text(
    settings: GeneratorSettings, metrics: GeneratorMetrics, bundle: Bundle, text: TextBundle, sources: Sources
) -> None:
    # Clicks and queries are compared, so both are float32 where the inference server encodes queries.
    queries, graph = text_queries(text, int8=settings.engine == "in-process")
    from services.generator.domain.text_mol import ClickPolicy, TextMol, limit_threads

    limit_threads(settings.compute_threads)
    base = documents_catalogue(text, dict(zip(bundle.item_ids, bundle.categories, strict=True)))
    # Clicks are encoded here whatever the engine: their sums are compared bit for bit with another process's, and a
    # server batches queries as they come.
    own = _in_process(queries, graph, sources, threads=1)
    same = settings.engine == "in-process" and settings.compute_threads == 1
    asked = own if same else _encoder(settings, "text", text, queries, graph, sources)
    sources.encoders += [own, asked]
    sources.text = TextMol(
        base,
        encode_all=queries.all_at_once(Timed(asked, lambda: metrics.stage(TEXT_MOL, "encode"))),
        encode=queries.alone(own),
        num_query_components=text.text_mol.head.num_query_components,
        policy=ClickPolicy(
            share=SharePolicy.parse(settings.click_share),
            new_share=SharePolicy.parse(settings.new_item_share),
            neighbours=settings.vote_neighbours,
            model_share=settings.vote_model_share,
            max_remembered=settings.max_remembered,
        ),
    )


def _load_phrases(
    settings: GeneratorSettings, metrics: GeneratorMetrics, bundle: Bundle, text: TextBundle, sources: Sources
) -> None:
    del bundle
    queries, graph = phrase_queries(text, int8=settings.engine == "in-process")
    parts = load_phrases(text)
    encoder = _encoder(settings, "phrases", text, queries, graph, sources)
    sources.encoders.append(encoder)
    sources.phrases = Phrases(
        parts.generator,
        parts.vocabulary,
        sources.items,
        encode_all=queries.all_at_once(Timed(encoder, lambda: metrics.stage(PHRASES, "encode"))),
        text_version=text.text_version,
        on_left_out=lambda: metrics.counted("title_left_out"),
    )


def _encoder(
    settings: GeneratorSettings, model: str, text: TextBundle, queries: Queries, graph: Graph, sources: Sources
) -> TextEncoder:
    if settings.engine == "in-process":
        return _in_process(queries, graph, sources, threads=settings.compute_threads)
    return InferenceServerText(
        settings.inference_server,
        model,
        queries.word_pieces,
        text_version=text.text_version,
        max_tokens=queries.max_tokens,
        timeout_s=settings.encode_timeout_ms / 1000,
    )


def _in_process(queries: Queries, graph: Graph, sources: Sources, *, threads: int) -> TextEncoder:
    """Loaded and used once: the first search has a deadline. Raises: PreconditionFailed for a graph that can't be."""
    own = InProcessText(
        graph.path, queries.word_pieces, max_tokens=queries.max_tokens, threads=threads, alone=graph.alone
    )
    encoder: TextEncoder = own
    if graph.output:
        shared = sources.shared.setdefault((graph.path, threads), SharedText(own))
        encoder = shared.of(graph.output)
    encoder.encode([""])
    return encoder


@dataclass(frozen=True, slots=True)
class Timed:
    """An encoder whose time is measured."""

    encoder: TextEncoder
    stage: Callable[[], contextlib.AbstractContextManager[None]]

    def encode(self, texts: Any) -> Any:
        """As the encoder does."""
        with self.stage():
            return self.encoder.encode(texts)

    def close(self) -> None:
        """As the encoder does."""
        self.encoder.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Handlers:
    """One handler per source, and what describes them all."""

    text_mol: Match[TextScored]
    phrases: Match[Generated]
    lexical: Match[Scored]
    describe: Describe

    @property
    def servicer(self) -> GeneratorServicer:
        """The service over them."""
        return GeneratorServicer(
            text_mol=self.text_mol, phrases=self.phrases, lexical=self.lexical, describe=self.describe
        )

    async def close(self) -> None:
        """Finish what is queued."""
        for match in (self.text_mol, self.phrases, self.lexical):
            await match.close()


def make_handlers(
    settings: GeneratorSettings,
    sources: Sources,
    metrics: GeneratorMetrics,
    *,
    items: Callable[[], int],
    is_ready: Callable[[], bool],
) -> Handlers:
    """In front of what was loaded. `items`: the next record of topic `items`; `is_ready`: whether to answer yet."""

    def match(name: str, source: Source[Answer] | None) -> Match[Answer]:
        return Match(
            name,
            source,
            reason=sources.reasons.get(name, ""),
            metrics=metrics,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            is_ready=is_ready,
        )

    text_mol, phrases = match(TEXT_MOL, sources.text), match(PHRASES, sources.phrases)
    lexical = match(LEXICAL, sources.lexical)
    describe = Describe(
        (text_mol, phrases, lexical),
        text=sources.text,
        phrases=sources.phrases,
        text_version=sources.text_version,
        items=items,
    )
    return Handlers(text_mol=text_mol, phrases=phrases, lexical=lexical, describe=describe)


class Ready:
    """Ready once everything that was to be waited for has said so; until then nothing is answered: an item that was
    withdrawn or a click that was taken back would be."""

    def __init__(self, names: set[str], health: HealthState) -> None:
        self._waiting, self._health = names, health

    def __call__(self) -> bool:
        return not self._waiting

    def said(self, name: str) -> None:
        """One of them is."""
        self._waiting.discard(name)
        if not self._waiting:
            self._health.set_ready(True)


async def run(settings: GeneratorSettings) -> None:
    """Serve until a signal; not ready before both topics were read to their ends. Raises: BundleError, PortTaken."""
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for its own debug lines
    metrics = GeneratorMetrics()
    sources = await asyncio.to_thread(load_sources, settings, metrics)
    tracing = configure_tracing("generator", settings.otlp_endpoint)
    health = HealthState()
    ready = Ready({"items", *(() if sources.text is None else ("clicks",))}, health)
    handlers = make_handlers(settings, sources, metrics, items=lambda: follower.next_item, is_ready=ready)

    def changed() -> None:
        metrics.described(handlers.describe())

    follower = CatalogueFollower(
        KafkaItems(settings.kafka_bootstrap),
        ItemChanges(
            sources.items,
            metrics,
            lexical=sources.lexical,
            text=sources.text,
            phrases=sources.phrases,
            on_change=changed,
        ),
        model_version="",
        on_ready=lambda: ready.said("items"),
        follows_deltas=False,
        # Withdrawn items and forgotten users are only known once the topics were read: better late than wrong.
        patience_s=math.inf,
    )
    clicks: ClicksFollower | None = None
    if sources.text is not None:
        sources.text.start()
        clicks = ClicksFollower(
            KafkaClicks(settings.kafka_bootstrap),
            sources.text,
            metrics,
            on_ready=lambda: ready.said("clicks"),
            on_change=changed,
        )
        metrics.watch_turns(SEARCH_CLICKS, clicks.turns)
        health.watch(SEARCH_CLICKS, clicks.turns)
        clicks.start()
    metrics.watch_turns(ITEMS, follower.turns)
    health.watch(ITEMS, follower.turns)
    follower.start()
    info = handlers.describe()
    metrics.described(info)
    loaded = {one.source: one.num_documents if one.is_loaded else one.reason for one in info.sources}
    log.info("sources_loaded", text_version=info.text_version, **loaded)

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(handlers.servicer, server)
        return [SERVICE]

    async def close() -> None:
        await handlers.close()
        await asyncio.to_thread(follower.stop)
        if clicks is not None:
            await asyncio.to_thread(clicks.stop)
        if sources.text is not None:
            with contextlib.suppress(Exception):  # reported when it failed
                await asyncio.to_thread(sources.text.close)
        for encoder in sources.encoders:
            encoder.close()

    await serve(
        process="generator",
        settings=settings,
        add_services=add_services,
        on_drain=close,
        health_state=health,
        tracing=tracing,
    )
