"""Measure the same searches in the library and by the service's RPC, with one row per size and algorithm."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.native.threads import set_compute_threads
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.large.catalogue import enlarged, queries
from services.offline.evaluation.large.changes import RATE, Changing, searched_while_changing

K = 100
ALGORITHMS = (
    "quantized_tangents(2000)",
    "quantized_tangents(4000)",
    "quantized_tangents(2000,128)",
    "exact",
)
_QUERIES, _AT_ONCE = 128, 16
_CHANGING_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """`search(query, algorithm)` returns item ids; start_s: seconds until it was ready."""

    search: Callable[[QueryStates, str], Sequence[str]]
    start_s: float
    resident_bytes: Callable[[], int]


Serve = Callable[[Path, Sequence[str]], AbstractContextManager[Served]]


def run(request: Request, *, bundle: Path, sizes: Sequence[int], algorithms: Sequence[str], serve: Serve) -> Report:
    """Measure with one computing thread each; writes large-catalogues.{md,json}.

    Raises: BundleError; ValueError for an unknown algorithm, or a bundle without an encoder.
    """
    from threadpoolctl import threadpool_limits

    began = time.perf_counter()
    set_compute_threads(1)
    trained = load_bundle(bundle)
    for name in algorithms:
        parse_algorithm(name)
    asked = queries(trained, 16 if request.quick else _QUERIES, seed=request.seed)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with TemporaryDirectory() as folder:
            request.say(f"{size:,} items")
            catalogue = enlarged(trained, size, Path(folder) / "bundle", seed=request.seed)
            with threadpool_limits(1, "blas"):  # as deployed; else a merge's products take all cores
                rows += _of_size(request, catalogue, asked, algorithms, serve)
    return written(request, report_of("large-catalogues", request, rows, began), page)


def page(report: Report) -> str:
    """Return large-catalogues.md of a report."""
    return filled(Path(__file__).with_name("page.md.j2"), **{"remark": ""} | report)


def _of_size(
    request: Request, catalogue: Bundle, asked: QueryStates, algorithms: Sequence[str], serve: Serve
) -> Iterator[dict[str, Any]]:
    scorer = MolScorer(catalogue.item_states, catalogue.pair_gate)
    each = [asked.take([number]) for number in range(len(asked))]
    truth = BruteForce(scorer)
    wanted: list[set[int]] = []
    for start in range(0, len(asked), _AT_ONCE):
        answer = truth.search(asked.take(slice(start, start + _AT_ONCE)), K)
        wanted += [set(row.tolist()) for row in answer.item_indices]
    measured = []
    for name in algorithms:
        request.say(f"{catalogue.num_items:,} items, {name}, library")
        built = time.perf_counter()
        index = make_index(parse_algorithm(name), scorer, codebooks=catalogue.codebooks)
        built_s = time.perf_counter() - built
        times = Times.of(lambda query, index=index: index.search(query, K), each, warm_up=4)  # type: ignore[misc]
        recall = [
            len(set(index.search(query, K).item_indices[0].tolist()) & best) / K
            for query, best in zip(each, wanted, strict=True)
        ]
        measured.append((name, built_s, times, recall, index.nbytes / catalogue.num_items))
        del index
    request.say(f"{catalogue.num_items:,} items, {algorithms[0]}, library, {RATE:,} changes a second")
    seconds = 2.0 if request.quick else _CHANGING_S
    changing = searched_while_changing(catalogue, asked, algorithms[0], K, seconds=seconds, seed=request.seed)
    with serve(catalogue.path, algorithms) as service:
        first_start_s = service.start_s
    with serve(catalogue.path, algorithms) as service:
        for name, built_s, library, recall, nbytes in measured:
            request.say(f"{catalogue.num_items:,} items, {name}, service")
            times = Times.of(lambda query, name=name: service.search(query, name), each, warm_up=4)  # type: ignore[misc]
            yield {
                "num_items": catalogue.num_items,
                "algorithm": name,
                f"recall_{K}": round(float(np.mean(recall)), 4),
                "least_recall": round(min(recall), 2),
                "library_ms": round(library.median_ms, 2),
                "rpc_ms": round(times.median_ms, 2),
                "rpc_p99_ms": round(times.quantile_ms(0.99), 2),
                "ratio": round(times.median_ms / library.median_ms, 2),
                "bytes_per_item": round(nbytes),
                "build_s": round(built_s, 1),
                "service_start_s": round(first_start_s, 1),
                "service_restart_s": round(service.start_s, 1),
                "service_resident_mb": round(service.resident_bytes() / 2**20),
                "changing": "–" if name != algorithms[0] else _in_words(changing),
            }


def _in_words(changing: Changing) -> str:
    before, now = changing.before, changing.while_changing
    return (
        f"{before.median_ms:.1f}, {before.quantile_ms(0.99):.1f} → {now.median_ms:.1f}, {now.quantile_ms(0.99):.1f} "
        f"({changing.applied_per_s:,.0f}/s, recall {changing.recall:.4f})"
    )
