"""What a search costs as the catalogue grows from 10^4 to 10^7 items, in time and in memory, at the Books shape.

Three things: TopKAvg as a whole, over full item states; and the two first stages alone, over averaged components
(X, 1, d), which is all that they read: the average in float32, and the quantized scan. Full states of 10^7 items would
be 12.8 GB and are left out; `rows` says what it left out and why.

Letters: X items, B queries, d width, N = 4,000 pool size.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil

from services.algorithms.indexes.protocol import Index, take_queries
from services.algorithms.indexes.quantized.dot_products import Quantized
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.offline.evaluation.catalogues.generator import average_items, generate
from services.offline.evaluation.catalogues.scene import SHAPES
from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.roofline import Rates, Work, average_scan, pool_scores
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
        say(f"growth: {size:,} items")
        found += _rows(size, seed=seed, quick=quick, rates=rates)
        gc.collect()
    if quick:
        left_out.append("10^6 and 10^7 items: --quick stops at 10^5")
    return found, left_out


def _rows(size: int, *, seed: int, quick: bool, rates: Rates) -> Iterator[Row]:
    pools = pool_scores(_SHAPE, num_queries=1, pool=min(POOL, size))
    if size <= _LARGEST_FULL:
        scene = generate(_SHAPE, num_items=size, num_queries=max(_BATCHES), seed=seed)
        whole = TopKAvg(scene.items, scene.pair_gate, pool_size=POOL)
        search = partial(whole.search, k=_RESULTS)
        yield from _measured(f"top_k_avg({POOL})", whole, search, scene.queries, quick, rates, pools)
        del scene, whole, search
    made = generate(_SHAPE, num_items=1, num_queries=max(_BATCHES), seed=seed).queries
    queries = QueryStates(components=made.components.mean(axis=1, keepdims=True))
    items = ItemStates(components=average_items(_SHAPE, size, seed=seed)[:, None])
    wanted: Any = None
    for name in ("averaged stage", "quantized stage"):
        index: Index = TopKAvg(items, pool_size=POOL) if wanted is None else Quantized(items, pool_size=POOL, seed=seed)
        stage = partial(index.first_stage, size=POOL)
        found = stage(queries).item_indices
        wanted = found if wanted is None else wanted
        for row in _measured(name, index, stage, queries, quick, rates):
            yield row | {"pool_recall": recall(found, wanted)}
        del index, stage


def _measured(
    name: str,
    index: Index,
    call: Callable[[QueryStates], object],
    queries: QueryStates,
    quick: bool,
    rates: Rates,
    pool: Work | None = None,
) -> Iterator[Row]:
    """A row per batch: the median over calls with different queries, after one to warm up."""
    for batch in _BATCHES:
        starts = [0, *(number * batch % len(queries) for number in range(3 if quick else 7))]
        groups = [take_queries(queries, start, start + batch) for start in starts]
        milliseconds = Times.of(call, groups, warm_up=1).median_ms
        work = average_scan(_SHAPE, num_queries=batch, num_items=index.num_items)
        work = work if pool is None else work + pool.times(batch)
        yield {
            "shape": _SHAPE.name,
            "num_items": index.num_items,
            "batch": batch,
            "algorithm": name,
            "milliseconds": milliseconds,
            "floor_ratio": milliseconds / (1e3 * rates.seconds(work)),
            "bytes_per_item": index.nbytes / index.num_items,
            "index_bytes": index.nbytes,
            "process_bytes": psutil.Process().memory_info().rss,
        }
