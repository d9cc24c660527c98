"""Assemble the generator process. If a part of the text bundle is unusable, the other sources serve."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import structlog
from freshet.v1 import generator_pb2_grpc

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.bundles.tensor_file import changed_in_place
from services.algorithms.bundles.text_bundle import TextBundle
from services.algorithms.generation.phrases_part import load_phrases
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.strings import Strings
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.native.threads import set_compute_threads
from services.catalogue.changes import MergeReports
from services.catalogue.follower import CatalogueFollower, catalogue_reader
from services.contracts.topics.items import ITEMS
from services.contracts.topics.search_clicks import SEARCH_CLICKS
from services.generator.adapters.text_parts import (
    Graph,
    InProcessText,
    Queries,
    SharedText,
    TextEncoder,
    open_text_bundle,
    queries_of,
)
from services.generator.config import GeneratorSettings
from services.generator.domain.items import ItemTable
from services.generator.domain.phrases import Phrases
from services.generator.domain.requests import PHRASES, TEXT_MOL
from services.generator.domain.sources import Lexical, Sources
from services.generator.domain.text_mol import TextMol
from services.generator.followers import ClicksFollower, ItemChanges, clicks_reader
from services.generator.handlers.match import Match
from services.generator.metrics import GeneratorMetrics
from services.generator.server import SERVICE, GeneratorServicer, info_message
from services.platform.errors import PreconditionFailed
from services.platform.process import configure_tracing
from services.platform.rpc.server import HealthState, RpcServer, adding, serve

log = structlog.get_logger()


def load_sources(settings: GeneratorSettings, metrics: GeneratorMetrics) -> tuple[Sources, list[TextEncoder]]:
    """Load all usable sources; return them and the encoders to close. Raises: BundleError without a model bundle."""
    bundle = load_bundle(settings.bundle)
    text_bundle, reason = open_text_bundle(settings.text)
    documents = () if text_bundle is None else text_bundle.item_index
    texts = () if text_bundle is None else text_bundle.texts
    items = ItemTable(bundle.item_index, bundle.titles, bundle.categories, documents, texts, bundle.attributes)
    version = f"titles.{bundle.model_version}" if text_bundle is None else text_bundle.text_version
    sources = Sources(items=items, lexical=Lexical(items), text_version=version)
    if text_bundle is None:
        sources.reasons = {TEXT_MOL: reason, PHRASES: reason}
        return sources, []
    loading = _Loading(settings, metrics, text_bundle)
    rows = bundle.item_index.find(list(text_bundle.item_ids))
    with loading.or_reason(TEXT_MOL, sources.reasons):
        sources.text = loading.text(bundle.categories.take(rows), bundle.attributes.take(rows))
    with loading.or_reason(PHRASES, sources.reasons):
        sources.phrases = loading.phrases(items)
    return sources, loading.encoders


class _Loading:
    """Loads a text bundle's sources. encoders: the caller closes them."""

    def __init__(self, settings: GeneratorSettings, metrics: GeneratorMetrics, bundle: TextBundle) -> None:
        self._settings, self._metrics, self._bundle = settings, metrics, bundle
        self._shared: dict[tuple[Path, int], SharedText] = {}  # graphs of several sources, by file and threads
        self.encoders: list[TextEncoder] = []

    @contextlib.contextmanager
    def or_reason(self, name: str, reasons: dict[str, str]) -> Iterator[None]:
        """If a source fails to load, log it and put the reason into `reasons`."""
        try:
            yield
        except (BundleError, ValueError, PreconditionFailed) as exc:
            reasons[name] = str(exc)
            level = logging.ERROR if name in self._bundle.parts else logging.INFO
            log.log(level, "source_not_loaded", source=name, reason=str(exc))

    def text(self, categories: Categories, attributes: AttributeTable) -> TextMol:
        """Load the text source. categories, attributes: of the documents' items, in the same order."""
        bundle = self._bundle
        queries, graph = queries_of(bundle, TEXT_MOL)
        base = Catalogue(
            model_version=bundle.text_version,
            item_ids=bundle.item_index,
            titles=Strings(np.zeros(0, np.uint8), np.zeros(bundle.num_items, np.int32)),
            categories=categories,
            states=bundle.item_states,
            pair_gate=bundle.pair_gate,
            attributes=attributes,
        )
        # One thread encodes clicks: sums are compared bit for bit between processes.
        own = self._encoder(queries, graph, threads=1)
        threads = self._settings.compute_threads
        asked = own if threads == 1 else self._encoder(queries, graph, threads=threads)
        return TextMol(
            base,
            encode_all=queries.all_at_once(asked, lambda: self._metrics.stage(TEXT_MOL, "encode")),
            encode=queries.alone(own),
            num_query_components=bundle.text_mol.head.num_query_components,
        )

    def phrases(self, items: ItemTable) -> Phrases:
        queries, graph = queries_of(self._bundle, PHRASES)
        parts = load_phrases(self._bundle)
        encoder = self._encoder(queries, graph, threads=self._settings.compute_threads)
        return Phrases(
            parts.generator,
            parts.vocabulary,
            items,
            encode_all=queries.all_at_once(encoder, lambda: self._metrics.stage(PHRASES, "encode")),
            on_left_out=lambda: self._metrics.counted("title_left_out"),
        )

    def _encoder(self, queries: Queries, graph: Graph, *, threads: int) -> TextEncoder:
        """Return an encoder with its graph loaded, as the first search has a deadline. Raises: PreconditionFailed."""
        own = InProcessText(
            graph.path, queries.word_pieces, max_tokens=queries.max_tokens, threads=threads, alone=graph.alone
        )
        encoder: TextEncoder = own
        if graph.output:
            encoder = self._shared.setdefault((graph.path, threads), SharedText(own)).of(graph.output)
        encoder.encode([""])
        self.encoders.append(encoder)
        return encoder


def make_servicer(
    sources: Sources,
    metrics: GeneratorMetrics,
    *,
    next_item: Callable[[], int],
    is_ready: Callable[[], bool],
) -> GeneratorServicer:
    """Return the service. next_item: returns the next offset of topic `items`. is_ready: whether it may answer."""
    return GeneratorServicer(
        matches={
            name: Match(name, source, reason=sources.reasons.get(name, ""), metrics=metrics, is_ready=is_ready)
            for name, source in sources.by_name.items()
        },
        text_version=sources.text_version,
        info=lambda: info_message(sources, next_item()),
        kinds=sources.items.kinds,
    )


def make_watch(sources: Sources, servicer: GeneratorServicer, metrics: GeneratorMetrics) -> Callable[[], None]:
    """Return a callback for changes: it sets the metrics of sources, and reports failed merges."""
    merges = MergeReports(() if sources.text is None else sources.text.merges)
    metrics.watch_merges(merges)

    def changed() -> None:
        metrics.described(servicer.info())
        merges.look()

    return changed


class Ready:
    """Ready after all named topics were read: earlier answers could contain withdrawn items and undone clicks."""

    def __init__(self, names: set[str], health: HealthState) -> None:
        self._waiting, self._health = names, health

    def __call__(self) -> bool:
        return not self._waiting

    def note(self, name: str) -> None:
        self._waiting.discard(name)
        if not self._waiting:
            self._health.set_ready(True)


async def run(settings: GeneratorSettings) -> None:
    """Serve until a signal. Ready after `items` and, with the text source, `search-clicks` were read.

    Raises: BundleError, PortTaken.
    """
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # the library sets its own debug level
    metrics = GeneratorMetrics()
    set_compute_threads(settings.compute_threads)
    sources, encoders = await asyncio.to_thread(load_sources, settings, metrics)
    tracing = configure_tracing("generator", settings.otlp_endpoint)
    health = HealthState(check=changed_in_place)
    ready = Ready({"items", *(() if sources.text is None else ("clicks",))}, health)
    servicer = make_servicer(sources, metrics, next_item=lambda: follower.next_item, is_ready=ready)
    changed = make_watch(sources, servicer, metrics)
    follower = CatalogueFollower(
        catalogue_reader(settings.kafka, "generator", ITEMS, makes_topics=settings.replicas),
        ItemChanges(sources, metrics, on_change=changed),
        model_version="",
        kinds=sources.items.kinds,
        on_ready=lambda: ready.note("items"),
        follows_deltas=False,
    )
    clicks: ClicksFollower | None = None
    if sources.text is not None:
        sources.text.start()
        clicks = ClicksFollower(
            clicks_reader(settings.kafka, settings.replicas),
            sources.text,
            metrics,
            on_ready=lambda: ready.note("clicks"),
            on_change=changed,
        )
        metrics.watch_turns(SEARCH_CLICKS, clicks.turns)
        health.watch(SEARCH_CLICKS, clicks.turns)
        clicks.start()
    metrics.watch_turns(ITEMS, follower.turns)
    health.watch(ITEMS, follower.turns)
    follower.start()
    changed()
    info = servicer.info()
    loaded = {one.source: one.num_documents if one.is_loaded else one.reason for one in info.sources}
    log.info("sources_loaded", text_version=info.text_version, **loaded)

    async def close() -> None:
        await servicer.close()
        await asyncio.to_thread(follower.stop)
        if clicks is not None:
            await asyncio.to_thread(clicks.stop)
        if sources.text is not None:
            with contextlib.suppress(Exception):  # already reported
                await asyncio.to_thread(sources.text.close)
        for encoder in encoders:
            encoder.close()

    server = RpcServer(
        process="generator",
        settings=settings,
        add_services=adding(generator_pb2_grpc.add_GeneratorServiceServicer_to_server, servicer, SERVICE),
        health_state=health,
        tracing=tracing,
    )
    await serve(server, on_drain=close)
