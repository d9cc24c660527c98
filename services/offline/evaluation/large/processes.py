"""Measure start time and memory of a catalogue shard's process and of the processes in front of it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client import CollectorRegistry

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.native.threads import set_compute_threads
from services.candidates.bootstrap import load_catalogue, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.contracts.shards import Shard
from services.gateway.recommend.popular import PopularItems
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.platform.machine import give_back_freed
from services.refresher.bootstrap import fold_rules
from services.refresher.config import RefresherSettings
from services.reranker import bootstrap as reranker
from services.reranker.config import RerankerSettings

# A process's data, and sizes in bytes per item (`held`: items).
Loaded = tuple[Any, dict[str, float]]


def run(request: Request, *, bundle: Path, sizes: Sequence[int], shard: Shard, width: int | None) -> Report:
    """Measure each process alone, with one computing thread; write large-shards.{md,json}.

    width: see `enlarged`. Raises: BundleError.
    """
    from services.offline.evaluation.large.catalogue import enlarged

    began = time.perf_counter()
    trained = load_bundle(bundle)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with TemporaryDirectory() as folder:
            request.say(f"{size:,} items")
            path = enlarged(trained, size, Path(folder) / "bundle", seed=request.seed, width=width, coded=False).path
            for name, load in _PROCESSES.items():
                request.say(f"{size:,} items, {name}")
                with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                    rows.append({"num_items": size, "process": name.format(shard)})
                    rows[-1] |= alone.submit(_measured, load, path, shard).result()
                request.say(str(rows[-1]))
    return written(request, report_of("large-shards", request, rows, began), page)


def page(report: Report) -> str:
    """Return large-shards.md of a report."""
    return filled(Path(__file__).with_name("processes.md.j2"), **{"remark": ""} | report)


def _candidates(path: Path, shard: Shard) -> Loaded:
    settings = CandidatesSettings(
        port=0,
        metrics_port=0,
        bundle=path,
        shard=shard,
        snapshots=str(path.parent / "snapshots"),
        follows_topics=False,
        audit_share=0,
    )
    live = make_live(settings, load_catalogue(settings), CandidatesMetrics(CollectorRegistry()))
    assert live.snapshots is not None
    with closing(live.snapshots):
        live.snapshots.look(0)
    info, states = live.search.info, live.catalogue.base.states
    codes = sum(info.added_bytes_per_item.values())
    return live, {
        "held": info.num_items,
        "states": states.bytes_per_item,
        "codes": codes,
        "beside": info.bytes_per_item - codes - states.bytes_per_item,
    }


def _gateway(path: Path, shard: Shard) -> Loaded:
    bundle = load_bundle(path)
    columns = bundle.counts, bundle.categories, bundle.attributes, bundle.by_popularity, bundle.titles
    return PopularItems(bundle.item_index, *columns), {}


def _reranker(path: Path, shard: Shard) -> Loaded:
    return reranker.load_catalogue(RerankerSettings(port=0, metrics_port=0, bundle=path)), {}


def _refresher(path: Path, shard: Shard) -> Loaded:
    return fold_rules(RefresherSettings(port=0, metrics_port=0, bundle=path), load_bundle(path)), {}


_PROCESSES: dict[str, Callable[[Path, Shard], Loaded]] = {
    "candidates {}": _candidates,
    "gateway": _gateway,
    "reranker": _reranker,
    "refresher": _refresher,
    "candidates {}, again": _candidates,
}


def _measured(load: Callable[[Path, Shard], Loaded], path: Path, shard: Shard) -> dict[str, Any]:
    set_compute_threads(1)
    before, wall, cpu = _memory(), time.perf_counter(), time.process_time()
    loaded, bytes_per_item = load(path, shard)
    give_back_freed()  # as every serving process does
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    own, mapped, most = (now - then for now, then in zip(_memory(), before, strict=True))
    del loaded
    return {
        "start_s": round(wall, 1),
        "start_cpu_s": round(cpu, 1),
        "own_mb": round(own / 1024),
        "most_mb": round(most / 1024),
        "mapped_mb": round(mapped / 1024),
        **{name: round(value, 1) for name, value in bytes_per_item.items()},
    }


def _memory() -> tuple[int, int, int]:
    """Return kilobytes of own memory, of mapped files, and of the largest resident size so far."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    own, mapped, most = (int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "VmHWM"))
    return own, mapped, most
