"""Assemble the reranker."""

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import structlog
from freshet.v1 import reranker_pb2_grpc

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.bundles.tensor_file import changed_in_place
from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.snapshot import Snapshot, load_snapshot, snapshots
from services.algorithms.items.catalogue import Catalogue, catalogue_from_bundle, required_bytes
from services.algorithms.items.live_catalogue import MAX_VERSIONS, LiveCatalogue
from services.algorithms.native.threads import set_compute_threads
from services.catalogue.changes import CatalogueChanges
from services.catalogue.follower import CatalogueFollower, CatalogueGate, catalogue_reader
from services.catalogue.snapshots import CatalogueSnapshots, started
from services.contracts.processes import PROCESSES
from services.platform.machine import available_bytes, require_memory
from services.platform.process import configure_tracing
from services.platform.rpc.server import HealthState, RpcServer, adding, serve
from services.reranker.config import MEMORY_VARIABLE, RerankerSettings
from services.reranker.handlers import Rerank, RerankerMetrics
from services.reranker.server import SERVICE, RerankerServicer

log = structlog.get_logger()


def load_catalogue(settings: RerankerSettings) -> tuple[LiveCatalogue, CatalogueSnapshots | None]:
    """Load the newest snapshot's items if the settings name a folder, otherwise the bundle's items.

    Without a memory limit a bundle of any size loads, because its files are mapped. Raises: BundleError, MemoryError.
    """
    bundle = load_bundle(settings.bundle)
    if settings.max_memory_mb:
        require_memory(
            f"the model {bundle.model_version} with {bundle.num_items} items",
            required_bytes(bundle.manifest),
            limit_mb=settings.max_memory_mb,
            variable=MEMORY_VARIABLE,
        )
    base = catalogue_from_bundle(bundle)
    make = partial(make_live, base, settings.max_memory_mb)
    if not settings.snapshots:
        return make(None), None
    root = Path(settings.snapshots)
    load = partial(load_snapshot, model_version=bundle.model_version, base=base.batch)
    catalogue, taken = started(make, root, found=snapshots, load=load)
    return catalogue, CatalogueSnapshots(catalogue, root, taken=taken)


def make_live(base: Catalogue, limit_mb: int, snapshot: Snapshot | None = None) -> LiveCatalogue:
    """Return the catalogue with its last versions. It has no search algorithms, because items are looked up by id."""
    limit = limit_mb << 20 if limit_mb else available_bytes()
    return LiveCatalogue(base, build=lambda items: {}, max_bytes=limit, max_versions=MAX_VERSIONS, snapshot=snapshot)


async def run(settings: RerankerSettings) -> None:
    """Serve until a signal. Raises: BundleError, MemoryError, PortTaken."""
    set_compute_threads(settings.compute_threads)
    catalogue, snapshots = await asyncio.to_thread(load_catalogue, settings)
    metrics = RerankerMetrics()
    rerank = Rerank(catalogue=catalogue, metrics=metrics)
    tracing = configure_tracing("reranker", settings.otlp_endpoint)
    log.info("catalogue_loaded", model_version=catalogue.base.model_version, items=catalogue.base.num_items)
    health = HealthState(check=changed_in_place)
    health.serve_as([PROCESSES["reranker"].health_of(catalogue.base.model_version)])
    gate = CatalogueGate("reranker", health)
    merge = BackgroundMerge(catalogue.index)
    follower = CatalogueFollower(
        catalogue_reader(settings.kafka, "reranker", makes_topics=settings.replicas),
        CatalogueChanges(catalogue, metrics.catalogue, merges=[merge]),
        model_version=catalogue.base.model_version,
        on_ready=gate.open,
        kinds=catalogue.index.kinds,
        snapshots=snapshots,
    )
    metrics.catalogue.watch_turns(follower.turns)
    health.watch("catalogue", follower.turns)
    merge.start()
    follower.start()

    async def close() -> None:
        await rerank.close()
        await asyncio.to_thread(follower.stop)
        with contextlib.suppress(Exception):  # already reported
            await asyncio.to_thread(merge.close)

    servicer = RerankerServicer(rerank, check_ready=gate.check)
    server = RpcServer(
        process="reranker",
        settings=settings,
        add_services=adding(reranker_pb2_grpc.add_RerankerServiceServicer_to_server, servicer, SERVICE),
        health_state=health,
        tracing=tracing,
    )
    await serve(server, on_drain=close)
