"""Assemble the candidates process."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog
from freshet.v1 import candidates_pb2_grpc

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.bundles.tensor_file import changed_in_place
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import Algorithm, make_indexes, parse_algorithm
from services.algorithms.indexes.exact.cheapest import carry_over
from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.index import Build
from services.algorithms.indexes.mutable.snapshot import HeldCodes, Snapshot, SnapshotError, load_snapshot, snapshots
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Indices, Strings
from services.algorithms.items.catalogue import Catalogue, catalogue_from_bundle, required_bytes
from services.algorithms.items.live_catalogue import MAX_VERSIONS, LiveCatalogue
from services.algorithms.native.threads import set_compute_threads
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import Coder, vectors_coded
from services.algorithms.pefa.votes import VotingIndex
from services.candidates.config import MEMORY_VARIABLE, CandidatesSettings
from services.candidates.handlers import Search
from services.candidates.metrics import TRUTH, Audit, CandidatesMetrics
from services.candidates.server import SERVICE, CandidatesServicer
from services.candidates.votes import RememberedVotes, Voting
from services.catalogue.changes import CatalogueChanges
from services.catalogue.follower import CatalogueFollower, CatalogueGate, catalogue_reader
from services.catalogue.snapshots import SNAPSHOT_EVERY_S, CatalogueSnapshots, started
from services.contracts.processes import PROCESSES
from services.contracts.shards import Shard
from services.platform.config import ConfigError
from services.platform.machine import available_bytes, require_memory
from services.platform.process import configure_tracing
from services.platform.request_context import Tracing
from services.platform.rpc.server import HealthState, RpcServer, adding, serve

if TYPE_CHECKING:
    from services.candidates.on_device import DeviceBuild

log = structlog.get_logger()

_LARGE, _VERY_LARGE = 100_000, 3_000_000  # items


def load_catalogue(settings: CandidatesSettings) -> Catalogue:
    """Load the shard's items. Raises: BundleError; MemoryError; ConfigError for a shard without items."""
    bundle = load_bundle(settings.bundle)
    require_memory(
        f"the model {bundle.model_version} with {bundle.num_items} items",
        required_bytes(bundle.manifest, parts=settings.shard.count),
        limit_mb=settings.max_memory_mb,
        variable=MEMORY_VARIABLE,
    )
    return catalogue_from_bundle(bundle, None if settings.shard.is_all else shard_rows(settings.shard, bundle.item_ids))


def shard_rows(shard: Shard, item_ids: Strings) -> Indices:
    """Return a shard's rows. Raises: ConfigError if there are none."""
    rows = shard.rows(item_ids)
    if not len(rows):
        raise ConfigError(f"FRESHET_CANDIDATES_SHARD={str(shard)!r}: none of {len(item_ids)} items")
    return rows


def algorithms_for(text: str, *, num_items: int, num_pairs: int) -> list[Algorithm]:
    """Return the configured algorithms. "auto" means `exact`, and for a large catalogue also one over codes.

    Raises: ValueError.
    """
    if text != "auto":
        return [parse_algorithm(word) for word in text.split()]
    exact = [parse_algorithm("exact")]
    if num_items < _LARGE:
        return exact
    if num_pairs == 1:
        # `quantized` is exact too; it searches integer codes.
        return [parse_algorithm("quantized(200)"), *exact]
    pool_size = 4000 if num_items >= _VERY_LARGE else 2000
    return [*exact, parse_algorithm(f"quantized_tangents({pool_size})")]


def host_build(
    algorithms: Sequence[Algorithm], first_coder: Coder = vectors_coded, codebooks: Codebooks | None = None
) -> Build:
    """Return a build of every algorithm, and of the audit's truth, over shared item states. The build raises ValueError
    for an algorithm that this model does not support.

    first_coder: the coder of the first build; it may have stored codes. codebooks: the bundle's codebooks.
    """
    coders = chain([first_coder], repeat(vectors_coded))

    def build(items: MolScorer) -> Mapping[str, Index]:
        return {**make_indexes(algorithms, items, next(coders), codebooks), TRUTH: BruteForce(items)}

    return carry_over(build)


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """The serving objects. snapshots, votes: None if not configured."""

    catalogue: LiveCatalogue
    snapshots: CatalogueSnapshots | None
    votes: RememberedVotes | None
    search: Search


def make_live(
    settings: CandidatesSettings, base: Catalogue, metrics: CandidatesMetrics, *, max_versions: int = 1
) -> Live:
    """Build the indexes, the audit and the handler. Raises: ConfigError for unsupported algorithms; MemoryError."""
    text = "exact" if (settings.algorithms, settings.device) == ("auto", "cuda") else settings.algorithms
    num_pairs = base.states.components.shape[1] if base.pair_gate is None else base.pair_gate.num_pairs
    algorithms = algorithms_for(text, num_items=len(base.item_ids), num_pairs=num_pairs)
    on_card = _card_build(algorithms) if settings.device == "cuda" else None
    limit = settings.max_memory_mb << 20 if settings.max_memory_mb else available_bytes()

    def make(snapshot: Snapshot | None) -> tuple[LiveCatalogue, HeldCodes]:
        if snapshot is not None and not settings.follows_topics and snapshot.manifest.said["position"] >= 0:
            raise SnapshotError(f"{snapshot.path}: has changes of `index-deltas`, which this process does not read")
        coder = HeldCodes() if snapshot is None else replace(snapshot.codes, report=log.info)
        build = on_card or host_build(algorithms, coder, base.codebooks)
        live = LiveCatalogue(base, build=build, max_bytes=limit, max_versions=max_versions, snapshot=snapshot)
        return live, coder

    try:
        catalogue, snapshots = _started(settings, base, make)
    except ValueError as error:
        raise ConfigError(f"FRESHET_CANDIDATES_ALGORITHMS={settings.algorithms!r}: {error}") from error
    votes = make_votes(settings, base, catalogue, limit - catalogue.index.memory.total)
    search = Search(
        catalogue=catalogue,
        algorithms=[one.text for one in algorithms],
        votes=Voting(base, votes),
        audit=Audit(catalogue, share=settings.audit_share, report=metrics.audited),
        metrics=metrics,
        copied_bytes_per_item=0 if on_card is None else on_card.copied_bytes_per_item,
        shard=settings.shard,
    )
    if settings.max_memory_mb:
        require_memory(
            f"{base.num_items} items with {settings.algorithms}",
            round(search.info.bytes_per_item * base.num_items),
            limit_mb=settings.max_memory_mb,
            variable=MEMORY_VARIABLE,
        )
    return Live(catalogue=catalogue, snapshots=snapshots, votes=votes, search=search)


def _started(
    settings: CandidatesSettings,
    base: Catalogue,
    make: Callable[[Snapshot | None], tuple[LiveCatalogue, HeldCodes]],
) -> tuple[LiveCatalogue, CatalogueSnapshots | None]:
    """Start from the newest snapshot, if the settings name a folder. A process that remembers interactions has no
    snapshots, because it reads `index-deltas` from the start.
    """
    root = settings.snapshot_folder
    if root is None or settings.vote_neighbours:
        if root is not None:
            log.warning("snapshots_not_kept", reason="remembered interactions are read from the topic's start")
        return make(None)[0], None
    load = partial(load_shard_snapshot, settings.shard, base)
    (catalogue, coder), taken = started(make, root, found=snapshots, load=load)
    return catalogue, CatalogueSnapshots(
        catalogue,
        root,
        taken=taken,
        every_s=SNAPSHOT_EVERY_S if settings.does_common_work else math.inf,
        writes_first=coder.made and settings.does_common_work,
    )


def _card_build(algorithms: Sequence[Algorithm]) -> "DeviceBuild":
    try:
        from services.candidates.on_device import cuda_build
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("FRESHET_CANDIDATES_DEVICE='cuda' but PyTorch is not installed; allowed: cpu") from error
    return cuda_build(algorithms)


def make_votes(
    settings: CandidatesSettings, base: Catalogue, catalogue: LiveCatalogue, max_bytes: int
) -> RememberedVotes | None:
    """Return an empty memory of at most `max_bytes`, if configured."""
    if not settings.vote_neighbours:
        return None
    shape = catalogue.index.shape
    index = VotingIndex(
        num_components=shape.num_query_components,
        width=shape.width,
        model_version=base.model_version,
        leave_out=base.user_component,
        max_bytes=max(0, max_bytes),
    )
    return RememberedVotes(index, neighbours=settings.vote_neighbours, model_share=settings.vote_model_share)


def load_shard_snapshot(shard: Shard, base: Catalogue, path: Path) -> Snapshot:
    """Load a snapshot. Raises: SnapshotError, also for a snapshot of another shard."""
    snapshot = load_snapshot(path, model_version=base.model_version, base=base.batch)
    assert isinstance(snapshot.items.item_ids, ItemIds)
    ids = snapshot.items.item_ids.strings
    is_own = shard.is_all or snapshot.items.item_ids is base.rows
    if not is_own and len(own := shard.rows(ids)) < len(ids):
        foreign = ids[int(np.flatnonzero(~np.isin(np.arange(len(ids)), own))[0])]
        raise SnapshotError(f"{path}: item {foreign!r} is not of shard {shard}, which this process holds")
    return snapshot


def make_follower(
    settings: CandidatesSettings,
    live: Live,
    metrics: CandidatesMetrics,
    health: HealthState,
    gate: CatalogueGate,
    tracing: Tracing,
) -> tuple[CatalogueFollower, list[BackgroundMerge]]:
    indexes = [live.catalogue.index, *(() if live.votes is None else (live.votes.index.index,))]
    merges = [BackgroundMerge(index) for index in indexes]
    changes = CatalogueChanges(
        live.catalogue,
        metrics.catalogue,
        remembered=live.votes,
        merges=merges,
        on_change=lambda: metrics.loaded(live.search.info),
        holds=settings.shard.holds,
    )
    follower = CatalogueFollower(
        catalogue_reader(
            settings.kafka, "candidates", makes_topics=settings.replicas, writes_dead_letters=settings.does_common_work
        ),
        changes,
        model_version=live.catalogue.base.model_version,
        on_ready=gate.open,
        kinds=live.catalogue.index.kinds,
        snapshots=live.snapshots,
        holds=settings.shard.holds,
        tracing=tracing,
    )
    metrics.catalogue.watch_turns(follower.turns)
    health.watch("catalogue", follower.turns)
    return follower, merges


@contextlib.asynccontextmanager
async def opened(
    settings: CandidatesSettings, health: HealthState, tracing: Tracing, *, max_versions: int = 1
) -> AsyncIterator[tuple[CandidatesServicer, Live]]:
    """Open the service. Inside the block its indexes follow the stream; `health` is ready once they have caught up.

    max_versions: as in `LiveCatalogue`. Raises: BundleError, MemoryError.
    """
    set_compute_threads(settings.compute_threads)
    metrics = CandidatesMetrics()

    live = await asyncio.to_thread(
        lambda: make_live(settings, load_catalogue(settings), metrics, max_versions=max_versions)
    )
    info = live.search.info
    log.info(
        "index_loaded",
        model_version=info.model_version,
        index_version=info.served.name,
        items=info.num_items,
        bytes_per_item=round(info.bytes_per_item, 1),
        algorithms=list(info.added_bytes_per_item),
    )
    gate = CatalogueGate("candidates", health)
    followers: list[CatalogueFollower] = []
    merges: list[BackgroundMerge] = []
    if settings.follows_topics:
        follower, merges = make_follower(settings, live, metrics, health, gate, tracing)
        for merge in merges:
            merge.start()
        follower.start()
        followers.append(follower)
    else:
        log.warning("topics_not_followed", serves=info.served.name)
        if live.snapshots is not None:
            live.snapshots.look(0)
        gate.open()

    servicer = CandidatesServicer(
        live.search,
        check_ready=gate.check,
        tracing=tracing,
        applied_in=followers[0].applied_in if followers else lambda position: "",
    )
    try:
        yield servicer, live
    finally:
        await live.search.close()
        for follower in followers:
            await asyncio.to_thread(follower.stop)
        if live.snapshots is not None and not followers:  # a follower's stop does this, ten seconds at most
            await asyncio.to_thread(live.snapshots.close)
        for merge in merges:
            with contextlib.suppress(Exception):  # already reported
                await asyncio.to_thread(merge.close)


async def run(settings: CandidatesSettings) -> None:
    """Serve until a signal. Raises: BundleError, MemoryError, PortTaken."""
    tracing, health = configure_tracing("candidates", settings.otlp_endpoint), HealthState(check=changed_in_place)
    num_versions = 1 if settings.shard.is_all else MAX_VERSIONS
    async with opened(settings, health, tracing, max_versions=num_versions) as (servicer, live):
        health.serve_as([PROCESSES["candidates"].health_of(live.search.info.model_version, str(settings.shard))])

        server = RpcServer(
            process="candidates",
            settings=settings,
            add_services=adding(candidates_pb2_grpc.add_CandidatesServiceServicer_to_server, servicer, SERVICE),
            health_state=health,
            tracing=tracing,
        )
        await serve(server)
