"""Puts the candidates process together: the only module that names concrete indexes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import structlog
import torch
from freshet.v1 import candidates_pb2_grpc

from services.algorithms.bundle import load_bundle
from services.algorithms.catalogue import Catalogue, catalogue_from_bundle, required_bytes
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import Algorithm, make_index, parse_algorithm
from services.algorithms.indexes.gpu.by_name import make_device_index
from services.algorithms.ops.mol_scores.device import DeviceScorer
from services.algorithms.states import ItemStates
from services.candidates.audit import Audit
from services.candidates.config import MEMORY_VARIABLE, CandidatesSettings
from services.candidates.handlers import LoadedIndexes, Search
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import SERVICE, CandidatesServicer
from services.common.config import ConfigError
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


def make_indexes(algorithms: Sequence[Algorithm], catalogue: Catalogue) -> LoadedIndexes:
    """Build every algorithm over the catalogue's item states.

    Raises: ValueError for an algorithm that this model can't have.
    """
    indexes = {one.text: make_index(one, catalogue.scorer, catalogue.tie_ranks) for one in algorithms}
    return LoadedIndexes(indexes=indexes, states_nbytes=catalogue.scorer.nbytes, copies_nbytes=0)


def make_device_indexes(algorithms: Sequence[Algorithm], catalogue: Catalogue, device: torch.device) -> LoadedIndexes:
    """Build every algorithm over one copy of the item states on `device`.

    Raises: ValueError for an algorithm that a card does not serve.
    """
    items = ItemStates(components=catalogue.scorer.components.numpy(), gate=catalogue.scorer.item_gate)
    scorer = DeviceScorer(items, catalogue.scorer.pair_gate, device=device)
    indexes = {one.text: make_device_index(one, scorer, catalogue.tie_ranks) for one in algorithms}
    return LoadedIndexes(indexes=indexes, states_nbytes=scorer.nbytes, copies_nbytes=catalogue.scorer.nbytes)


def make_search(settings: CandidatesSettings, catalogue: Catalogue, metrics: CandidatesMetrics) -> Search:
    """Build the indexes, the audit beside them, and the handler in front.

    Raises: ConfigError for algorithms that can't be had; MemoryError, naming both values, when they take too much.
    """
    algorithms = [parse_algorithm(word) for word in settings.algorithms.split()]
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("FRESHET_CANDIDATES_DEVICE='cuda' but PyTorch sees no CUDA card here; allowed: cpu")
    try:
        if settings.device == "cpu":
            loaded = make_indexes(algorithms, catalogue)
        else:
            loaded = make_device_indexes(algorithms, catalogue, torch.device(settings.device))
    except ValueError as error:
        raise ConfigError(f"FRESHET_CANDIDATES_ALGORITHMS={settings.algorithms!r}: {error}") from error
    truth = BruteForce(catalogue.scorer, tie_ranks=catalogue.tie_ranks)
    search = Search(
        catalogue=catalogue,
        loaded=loaded,
        audit=Audit(truth, share=settings.audit_share, report=metrics.audited),
        metrics=metrics,
        max_batch=settings.max_batch,
        max_queue=settings.max_queue,
    )
    if settings.max_memory_mb:
        require_memory(
            f"{catalogue.num_items} items with {settings.algorithms}",
            round(search.info.bytes_per_item * catalogue.num_items),
            limit_mb=settings.max_memory_mb,
            variable=MEMORY_VARIABLE,
        )
    return search


async def run(settings: CandidatesSettings) -> None:
    """Serve until a signal. Raises: BundleError, MemoryError, PortTaken."""
    torch.set_num_threads(settings.compute_threads)
    catalogue = await asyncio.to_thread(load_catalogue, settings)
    search = await asyncio.to_thread(make_search, settings, catalogue, CandidatesMetrics())
    tracing = configure_tracing("candidates", settings.otlp_endpoint)
    log.info(
        "index_loaded",
        model_version=search.info.model_version,
        index_version=search.info.index_version,
        items=search.info.num_items,
        bytes_per_item=round(search.info.bytes_per_item, 1),
        algorithms=list(search.info.added_bytes_per_item),
    )

    def add_services(server: grpc.aio.Server) -> list[str]:
        _add_servicer(CandidatesServicer(search), server)
        return [SERVICE]

    await serve(
        process="candidates", settings=settings, add_services=add_services, on_drain=search.close, tracing=tracing
    )
