"""`freshet bench mutation`: search latency and recall while items change, 0 to 10,000 times a second.

Changes arrive by a clock that waits for nobody; a writer thread looks every 10 ms and applies all that are due as one
batch. Searches, one query each, arrive by a clock of their own, slow enough for the quiet index to keep up, and count
from their arrival; a search's own compute time stands beside. Recall compares answers with an exact search of what the
catalogue held at the version that the answer names, and, at the end, with a fresh build over the same items.
"""

import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.algorithms.ops.mol_scores import mol_scores
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import Shape, shape_named
from services.offline.evaluation.common.report import Report, Request, plain_page, report_of, written
from services.offline.evaluation.common.timing import Times, use_threads
from services.offline.evaluation.mutation.indexes import Faiss, FloatArray, Hnsw, IntArray, Mutable, Start, Subject
from services.offline.evaluation.mutation.stream import Stream, make_stream

K = 100
RATES = (0, 100, 1_000, 10_000)
_SPARE_STATES = 0.1  # states beyond the items' own, for items to change to
_MOST_EVENTS_PER_BATCH = 2_000
_POLL_S = 0.01  # between two looks at what is due, as a consumer of a stream does
_BUSY_SHARE = 0.25  # of the time, a quiet index answers searches at the pace that it is given
_SLOWEST_PACE_S = 0.02
_SLICE_S = 5.0  # with changes, before the next without
_QUIET_PART = 2  # a quiet slice is half as long
_QUERIES = 64
_CHECKED = 60  # answers per row compared with an exact search

# A dot product of a common width, which FAISS and hnswlib do as well.
DOT = Shape(
    name="dot-32", num_items=100_000, num_query_components=1, num_item_components=1, component_width=32, gated=False
)


def run(
    request: Request, *, shapes: Sequence[str] = (), seconds: float | None = None, rates: tuple[int, ...] | None = None
) -> Report:
    """Writes mutation.{md,json}; shapes, seconds per row and changes a second are the plan's own where not given.

    Raises: ValueError for a shape that the plan does not have.
    """
    began = time.perf_counter()
    found = rows(
        quick=request.quick,
        seed=request.seed,
        shapes=shapes,
        seconds=seconds,
        rates=rates or RATES,
        progress=request.say,
    )
    return written(request, report_of("mutation", request, found, began), page)


def page(report: Report) -> str:
    """mutation.md; a `remark` is what a person adds to the stored report."""
    return plain_page(Path(__file__).with_name("page.template.md"), report)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A pool of item states, of which the first `num_items` are there at the start, and queries."""

    shape: Shape
    num_items: int
    pool: ItemStates
    queries: QueryStates
    pair_gate: PairGate | None


@dataclass(slots=True)
class Observed:
    """What one run saw. In seconds: `latencies` from arrival, `service` from the call, `compute` the thread's own.

    `applied[v]`: events that version v reflects.
    """

    latencies: list[float] = field(default_factory=list)
    service: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    answers: list[tuple[int, list[int], int]] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    applied: dict[int, int] = field(default_factory=lambda: {0: 0})
    done: int = 0
    bytes: list[int] = field(default_factory=list)


def rows(
    *,
    quick: bool,
    seed: int = 0,
    shapes: Sequence[str] = (),
    seconds: float | None = None,
    rates: tuple[int, ...] = RATES,
    threads: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """One row per shape (all of the plan's where none is named), index and rate.

    `seconds` per row: 4 when quick, else 60; `threads` per search. Raises: ValueError for a shape that is not planned.
    """
    plan = _plan(quick)
    planned = [shape.name for shape, _, _ in plan]
    for name in shapes:
        if name not in planned:
            raise ValueError(f"shape={name!r}; allowed: {', '.join(planned)}")
    each = seconds or (4.0 if quick else 60.0)
    before = torch.get_num_threads()
    use_threads(threads)
    try:
        found = []
        for shape, num_items, algorithms in plan:
            if shapes and shape.name not in shapes:
                continue
            world = make_world(shape, num_items, seed)
            for name, start in _subjects(world, algorithms, threads):
                found += measure(world, name, start, rates=rates, seconds=each, seed=seed, progress=progress)
        for row in found:
            row["speedup"] = _baseline(found, row)["milliseconds"] / row["milliseconds"]
        return found
    finally:
        use_threads(before)


def make_world(shape: Shape, num_items: int, seed: int) -> World:
    scene = generate(shape, num_items=round(num_items * (1 + _SPARE_STATES)), num_queries=_QUERIES, seed=seed)
    return World(shape=shape, num_items=num_items, pool=scene.items, queries=scene.queries, pair_gate=scene.pair_gate)


def measure(
    world: World,
    name: str,
    start: Start,
    *,
    rates: tuple[int, ...],
    seconds: float,
    seed: int,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """One row per rate, each on an index built anew.

    Slices with changes take turns with slices without, in which a twin that never changes answers: `quiet_*` and the
    ratios to them come from the same minutes of the machine.
    """
    found: list[dict[str, Any]] = []
    twin = start(np.arange(world.num_items), np.arange(world.num_items))
    pace = max(_SLOWEST_PACE_S, _quiet_median(twin) / _BUSY_SHARE)
    slices = max(2, round(seconds / _SLICE_S))
    for rate in rates:
        stream = make_stream(world.num_items, len(world.pool), round(rate * seconds), seed)
        subject = start(*stream.held(0))
        _quiet_median(subject)
        seen, quiet = Observed(), Observed()
        for number in range(slices):
            _search(twin, quiet, seconds / slices / _QUIET_PART, pace)
            _search_and_change(subject, seen, stream, rate, number * seconds / slices, seconds / slices, pace)
        row = _row(world, name, rate, seconds, seen, quiet)
        row.update(_recall(world, stream, seen, subject, start))
        row.update(subject.close())
        found.append(row)
        progress(
            f"{world.shape.name} {name} {rate}/s: p50 {row['milliseconds']:.2f} ms ({row['milliseconds_ratio']:.2f}x), "
            f"p99 {row['p99_milliseconds']:.2f} ms ({row['p99_ratio']:.2f}x), "
            f"compute {row['compute_ratio']:.2f}x, recall {row['recall_100']:.4f}, "
            f"applied {row['applied_per_second']:.0f}/s"
        )
    twin.close()
    return found


def _baseline(found: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """What a row's speedup is against: scoring everything, by FAISS where it can, at the same shape and rate."""
    wanted = ("faiss flat", "brute_force", row["algorithm"])
    same = [one for one in found if all(one[name] == row[name] for name in ("shape", "changes_per_second"))]
    return min((one for one in same if one["algorithm"] in wanted), key=lambda one: wanted.index(one["algorithm"]))


def _plan(quick: bool) -> list[tuple[Shape, int, tuple[str, ...]]]:
    if quick:
        return [(DOT, 20_000, ("brute_force",)), (shape_named("ml-1m"), 3_706, ("brute_force", "top_k_avg(500)"))]
    return [
        (DOT, DOT.num_items, ("brute_force",)),
        (shape_named("ml-20m"), shape_named("ml-20m").num_items, ("brute_force", "top_k_avg(4000)")),
    ]


def _subjects(world: World, algorithms: tuple[str, ...], threads: int) -> list[tuple[str, Start]]:
    pool, queries = world.pool, world.queries
    found: list[tuple[str, Start]] = [
        (algorithm, lambda *held, algorithm=algorithm: Mutable(algorithm, pool, queries, world.pair_gate, held))
        for algorithm in algorithms
    ]
    if world.shape.num_pairs == 1:
        found += [
            (f"faiss {kind}", lambda *held, kind=kind: Faiss(kind, pool, queries, held, threads=threads))
            for kind in ("flat", "ivf")
        ]
        if importlib.util.find_spec("hnswlib"):
            found.append(("hnswlib", lambda *held: Hnsw(pool, queries, held, threads=threads, ef=400)))
    return found


def _quiet_median(subject: Subject) -> float:
    return Times.of(lambda query: subject.search(query, K), range(20), warm_up=5).median_ms / 1e3


def _search_and_change(
    subject: Subject, seen: Observed, stream: Stream, rate: int, before: float, seconds: float, pace: float
) -> None:
    """Changes in one thread, searches in this one, each by its clock; `before` seconds of changes are due already."""
    began = time.perf_counter()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            while (elapsed := time.perf_counter() - began) < seconds:
                due = min(int((before + elapsed) * rate), len(stream.item))
                while seen.done < due and time.perf_counter() - began < seconds:
                    done, end = seen.done, min(due, seen.done + _MOST_EVENTS_PER_BATCH)
                    seen.applied[subject.apply(*stream.batch(done, end))] = end
                    seen.lags.append(before + time.perf_counter() - began - done / rate)
                    seen.done = end
                time.sleep(_POLL_S)
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    if rate:
        writer.start()
    _search(subject, seen, seconds, pace)
    if rate:
        writer.join()
    if failures:
        raise failures[0]


def _search(subject: Subject, seen: Observed, seconds: float, pace: float) -> None:
    """One query after the other, each at its time; latency counts from then."""
    began = time.perf_counter()
    number = 0
    while (arrival := number * pace) < seconds:
        wait = began + arrival - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        query = len(seen.latencies) % _QUERIES
        called, computed = time.perf_counter(), time.thread_time()
        answer, version = subject.search(query, K)
        seen.service.append(time.perf_counter() - called)
        seen.compute.append(time.thread_time() - computed)
        seen.latencies.append(time.perf_counter() - began - arrival)
        seen.answers.append((query, answer, version))
        if number % 10 == 0:
            seen.bytes.append(subject.nbytes)
        number += 1


def _row(world: World, name: str, rate: int, seconds: float, seen: Observed, quiet: Observed) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for prefix, busy, calm in (
        ("", seen.latencies, quiet.latencies),
        ("service_", seen.service, quiet.service),
        ("compute_", seen.compute, quiet.compute),
    ):
        for label, share in (("", 50), ("p99_", 99)):
            own, undisturbed = float(np.percentile(busy, share)), float(np.percentile(calm, share))
            taken[f"{prefix}{label}milliseconds"] = 1e3 * own
            taken[f"{prefix}quiet_{label}milliseconds"] = 1e3 * undisturbed
            taken[f"{prefix}{label or 'milliseconds_'}ratio"] = own / undisturbed
    return {
        "shape": world.shape.name,
        "num_items": world.num_items,
        "batch": 1,
        "algorithm": name,
        "changes_per_second": rate,
        "applied_per_second": seen.done / seconds,
        "searches": len(seen.latencies),
        "quiet_searches": len(quiet.latencies),
        **taken,
        "compute_ratio": taken["compute_milliseconds_ratio"],
        "change_lag_p99_milliseconds": 1e3 * float(np.percentile(seen.lags or [0.0], 99)),
        "bytes_per_item": float(np.median(seen.bytes)) / world.num_items,
        "peak_bytes_per_item": max(seen.bytes) / world.num_items,
    }


def _recall(world: World, stream: Stream, seen: Observed, subject: Subject, start: Start) -> dict[str, Any]:
    """Recall of answers given on the way, of the index at the end, and of a fresh build of what it then holds."""
    exact = mol_scores(world.queries, world.pool, world.pair_gate)
    checked = seen.answers[:: max(1, len(seen.answers) // _CHECKED)]
    held = stream.held(seen.done)
    fresh = start(*held)

    def at_the_end(index: Subject) -> float:
        every = range(len(world.queries))
        return float(np.mean([_recall_of(index.search(query, K)[0], exact[query], held) for query in every]))

    on_the_way = [_recall_of(found, exact[query], stream.held(seen.applied[at])) for query, found, at in checked]
    found = {
        "recall_100": float(np.mean(on_the_way)),
        "recall_100_at_end": at_the_end(subject),
        "recall_100_fresh": at_the_end(fresh),
        "answers_checked": len(checked),
    }
    fresh.close()
    return found


def _recall_of(answer: list[int], exact: FloatArray, held: tuple[IntArray, IntArray]) -> float:
    """Share of the K places whose item is held and scores no less than the K-th best (within float32 rounding)."""
    items, states = held
    scores = exact[states]
    wanted = min(K, len(scores))
    kth = np.partition(scores, len(scores) - wanted)[len(scores) - wanted] - 1e-5
    places = np.searchsorted(items, answer)
    places[places == len(items)] = 0
    good = (items[places] == answer) & (scores[places] >= kth)
    return float(good.sum()) / wanted
