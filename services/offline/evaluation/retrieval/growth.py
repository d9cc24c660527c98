"""What a search costs as the catalogue grows from 10^4 to 10^7 items, in time and in memory, at the Books shape.

Three things: TopKAvg as a whole, over full item states; and the two first stages alone, over averaged components
(X, 1, d), which is all that they read: the average in float32, and the quantized scan. Full states of 10^7 items would
be 12.8 GB and are left out; `rows` says what it left out and why.

Letters: X items, B queries, d width, N = 4,000 pool size.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil

from services.algorithms.indexes.protocol import Index, Pool, take_queries
from services.algorithms.indexes.quantized.dot_products import Quantized
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.states import ItemStates, QueryStates
from services.offline.evaluation.catalogues.generator import average_items, generate
from services.offline.evaluation.catalogues.shapes import SHAPES
from services.offline.evaluation.common.floors import Rates, Work, average_scan, pool_scores
from services.offline.evaluation.common.timing import Times

Row = dict[str, Any]

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
POOL = 4_000
_SHAPE = SHAPES["books"]
_BATCHES = (1, 32)
_RESULTS = 100
_LARGEST_FULL = 1_000_000


def rows(
    *, quick: bool, seed: int, rates: Rates, say: Callable[[str], None] = lambda line: None
) -> tuple[list[Row], list[str]]:
    """One row per size, algorithm and batch, and sentences about what was left out."""
    found: list[Row] = []
    left_out: list[str] = []
    for size in SIZES[:2] if quick else SIZES:
        needed = 3.5 * 4 * size * _SHAPE.component_width  # averages, what two indexes make of them, and their training
        free = psutil.virtual_memory().available
        if needed > 0.8 * free:
            left_out.append(f"{size:,} items: they need about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")
            continue
        if size <= _LARGEST_FULL:
            say(f"growth: {size:,} items in full")
            found += _full_rows(size, seed=seed, quick=quick, rates=rates)
        say(f"growth: averages of {size:,} items")
        found += _stage_rows(size, seed=seed, quick=quick, rates=rates)
        gc.collect()
    if quick:
        left_out.append("10^6 and 10^7 items: --quick stops at 10^5")
    return found, left_out


def _full_rows(size: int, *, seed: int, quick: bool, rates: Rates) -> Iterator[Row]:
    scene = generate(_SHAPE, num_items=size, num_queries=max(_BATCHES), seed=seed)
    index = TopKAvg(scene.items, scene.pair_gate, pool_size=POOL)
    for batch in _BATCHES:
        scan = average_scan(_SHAPE, num_queries=batch, num_items=size)
        work = scan + pool_scores(_SHAPE, num_queries=batch, pool=min(POOL, size))
        milliseconds = _median_ms(lambda queries: index.search(queries, _RESULTS), scene.queries, batch, quick)
        yield _row(size, batch, f"top_k_avg({POOL})", milliseconds, index, work, rates)


def _stage_rows(size: int, *, seed: int, quick: bool, rates: Rates) -> Iterator[Row]:
    averages = average_items(_SHAPE, size, seed=seed)
    made = generate(_SHAPE, num_items=1, num_queries=max(_BATCHES), seed=seed).queries
    queries = QueryStates(components=made.components.mean(axis=1, keepdims=True))
    items = ItemStates(components=averages[:, None])
    average: Index = TopKAvg(items, pool_size=POOL)
    wanted = average.first_stage(queries, POOL).item_indices
    yield from _first_stages("averaged stage", average, queries, wanted, size, quick=quick, rates=rates)
    del average
    quantized: Index = Quantized(items, pool_size=POOL, seed=seed)
    yield from _first_stages("quantized stage", quantized, queries, wanted, size, quick=quick, rates=rates)


def _first_stages(
    name: str, index: Index, queries: QueryStates, wanted: np.ndarray[Any, Any], size: int, *, quick: bool, rates: Rates
) -> Iterator[Row]:
    pool: Pool = index.first_stage(queries, POOL)
    kept = float(np.mean([np.isin(one, other).mean() for one, other in zip(wanted, pool.item_indices, strict=True)]))
    for batch in _BATCHES:
        work = average_scan(_SHAPE, num_queries=batch, num_items=size)
        milliseconds = _median_ms(lambda part: index.first_stage(part, POOL), queries, batch, quick)
        yield _row(size, batch, name, milliseconds, index, work, rates) | {"pool_recall": kept}


def _row(size: int, batch: int, name: str, milliseconds: float, index: Index, work: Work, rates: Rates) -> Row:
    return {
        "shape": _SHAPE.name,
        "num_items": size,
        "batch": batch,
        "algorithm": name,
        "milliseconds": milliseconds,
        "floor_ratio": milliseconds / (1e3 * rates.seconds(work)),
        "bytes_per_item": index.nbytes / size,
        "index_bytes": index.nbytes,
        "process_bytes": psutil.Process().memory_info().rss,
    }


def _median_ms(call: Callable[[QueryStates], object], queries: QueryStates, batch: int, quick: bool) -> float:
    """The median over calls with different queries, after one to warm up."""
    call(take_queries(queries, 0, 1))
    starts = [number * batch % len(queries) for number in range(3 if quick else 7)]
    return Times.of(call, [take_queries(queries, start, start + batch) for start in starts]).median_ms
