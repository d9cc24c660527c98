"""Puts the reranker together: bundle, catalogue, handler, server."""

import asyncio
from typing import Any

import grpc
import structlog
import torch
from freshet.v1 import reranker_pb2_grpc

from services.algorithms.bundle import load_bundle
from services.algorithms.catalogue import Catalogue, catalogue_from_bundle, required_bytes
from services.common.memory import require_memory
from services.common.rpc_server import serve
from services.common.tracing import configure_tracing
from services.reranker.config import MEMORY_VARIABLE, RerankerSettings
from services.reranker.handlers import Rerank
from services.reranker.metrics import RerankerMetrics
from services.reranker.server import SERVICE, RerankerServicer

log = structlog.get_logger()

# The generated stubs carry no types.
_add_servicer: Any = reranker_pb2_grpc.add_RerankerServiceServicer_to_server


def load_catalogue(settings: RerankerSettings) -> Catalogue:
    """Open the bundle and prepare its items.

    Raises: BundleError for an unusable bundle; MemoryError, naming both values, when it does not fit.
    """
    bundle = load_bundle(settings.bundle)
    require_memory(
        f"the model {bundle.model_version} with {bundle.num_items} items",
        required_bytes(bundle.manifest),
        limit_mb=settings.max_memory_mb,
        variable=MEMORY_VARIABLE,
    )
    return catalogue_from_bundle(bundle)


def make_rerank(settings: RerankerSettings, catalogue: Catalogue, metrics: RerankerMetrics) -> Rerank:
    """The handler over a catalogue."""
    return Rerank(catalogue=catalogue, metrics=metrics, max_batch=settings.max_batch, max_queue=settings.max_queue)


async def run(settings: RerankerSettings) -> None:
    """Serve until a signal. Raises: BundleError, MemoryError, PortTaken."""
    torch.set_num_threads(settings.compute_threads)
    catalogue = await asyncio.to_thread(load_catalogue, settings)
    rerank = make_rerank(settings, catalogue, RerankerMetrics())
    tracing = configure_tracing("reranker", settings.otlp_endpoint)
    log.info("catalogue_loaded", model_version=catalogue.model_version, items=catalogue.num_items)

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(RerankerServicer(rerank), server)
        return [SERVICE]

    await serve(
        process="reranker", settings=settings, add_services=add_services, on_drain=rerank.close, tracing=tracing
    )
