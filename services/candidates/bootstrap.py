"""Puts the candidates process together: the only module that names concrete indexes."""

import asyncio
from typing import Any

import grpc
import structlog
import torch
from freshet.v1 import candidates_pb2_grpc

from services.algorithms.bundle import load_bundle
from services.algorithms.catalogue import Catalogue, catalogue_from_bundle, required_bytes
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.candidates.config import MEMORY_VARIABLE, CandidatesSettings
from services.candidates.handlers import Search
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import SERVICE, CandidatesServicer
from services.common.memory import require_memory
from services.common.rpc_server import serve
from services.common.tracing import configure_tracing

log = structlog.get_logger()

# The generated stubs carry no types.
_add_servicer: Any = candidates_pb2_grpc.add_CandidatesServiceServicer_to_server


def load_catalogue(settings: CandidatesSettings) -> Catalogue:
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


def make_search(settings: CandidatesSettings, catalogue: Catalogue, metrics: CandidatesMetrics) -> Search:
    """Build every index over one scorer, and the handler in front of them."""
    indexes: dict[str, Index] = {
        BruteForce.name: BruteForce(catalogue.scorer, tie_ranks=catalogue.tie_ranks),
        TopKAvg.name: TopKAvg(catalogue.scorer, pool_size=settings.top_k_avg_pool_size, tie_ranks=catalogue.tie_ranks),
    }
    return Search(
        catalogue=catalogue,
        indexes=indexes,
        algorithm=settings.algorithm,
        metrics=metrics,
        max_batch=settings.max_batch,
        max_queue=settings.max_queue,
    )


async def run(settings: CandidatesSettings) -> None:
    """Serve until a signal. Raises: BundleError, MemoryError, PortTaken."""
    torch.set_num_threads(settings.compute_threads)
    catalogue = await asyncio.to_thread(load_catalogue, settings)
    search = make_search(settings, catalogue, CandidatesMetrics())
    tracing = configure_tracing("candidates", settings.otlp_endpoint)
    log.info(
        "index_loaded",
        model_version=search.info.model_version,
        index_version=search.info.index_version,
        items=search.info.num_items,
        bytes_per_item=round(search.info.bytes_per_item, 1),
        algorithm=search.info.algorithm,
    )

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(CandidatesServicer(search), server)
        return [SERVICE]

    await serve(
        process="candidates", settings=settings, add_services=add_services, on_drain=search.close, tracing=tracing
    )
