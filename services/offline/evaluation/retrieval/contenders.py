"""Which algorithms a retrieval benchmark runs, how each is built, its floor, and what it is transcribed as.

One list: a new algorithm is one entry. Settings of one algorithm share what it holds for the items, so that a table
of nine pool sizes prepares the catalogue three times. Nothing here measures anything.

Letters: X items, B queries, P component pairs, K results, N pool size.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.exact.clusters import ExactClusters
from services.algorithms.indexes.exact.two_pass import (
    ExactAlgorithm1,
    ExactExpandedGates,
    ExactGateBounds,
    ExactLowPrecision,
)
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.quantized.pools import QuantizedTopKAvg
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import QueryStates
from services.offline.evaluation.catalogues.shapes import Shape
from services.offline.evaluation.common.floors import Work, average_scan, full_scores, pair_scan, pool_scores
from services.offline.evaluation.retrieval.adaptive import AdaptiveTopK
from services.offline.evaluation.retrieval.recall_estimate import calibrate
from services.offline.evaluation.retrieval.transcription import Transcription

RESULTS = 100
PAIR_POOLS = (5, 10, 50, 100)
AVERAGE_POOLS = (200, 500, 1000, 2000, 4000)
COMBINED_POOLS = ((5, 200), (50, 500), (100, 1000))

Floor = Callable[[Shape, int, int, Mapping[str, float]], Work]
Transcribed = Callable[[Transcription, QueryStates], torch.Tensor]


@dataclass
class Bench:
    """One catalogue, prepared once, with queries to calibrate on that nobody is measured with.

    `held` keeps the last algorithm built, for its other settings; what another one needs takes its place.
    """

    scorer: MolScorer
    samples: QueryStates
    _held: dict[str, Any] = field(default_factory=dict)

    def held(self, name: str, build: Callable[[MolScorer], Any]) -> Any:
        if name not in self._held:
            self._held.clear()
            self._held[name] = build(self.scorer)
        return self._held[name]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row per batch size. `floor` gets the shape, B, X and the mean items touched by each pass.

    `transcribed` answers (B, K) by the paper's formulas; `largest_pool` is the largest N among its sizes.
    """

    name: str
    build: Callable[[Bench], Index]
    floor: Floor
    transcribed: Transcribed | None = None
    largest_pool: int = 0


def contenders(shape: Shape, num_items: int, *, quick: bool) -> list[Contender]:
    """Every algorithm worth a row at `num_items`: pools that hold the catalogue are left out, and some when quick."""
    found = [*_exact(), *_per_embedding(), *_average(), *_combined()]
    if quick:
        # A proof that lets every item through costs more than brute force and says nothing new; two pool sizes each
        # already show the trade.
        left_out = {
            "exact_algorithm_1",
            "exact_clusters",
            "quantized_top_k_avg(2000)",
            "top_k_per_embedding(10)",
            "top_k_per_embedding(50)",
            "combined_top_k(50,500)",
        }
        found = [one for one in found if one.name not in left_out and not one.name.startswith("adaptive_combined")]
        # Minutes of calibrating, and of coding wide vectors.
        if num_items > 50_000:
            found = [one for one in found if not one.name.startswith("adaptive")]
        if shape.component_width > 256:
            found = [one for one in found if not one.name.startswith("quantized")]
    return [one for one in found if one.largest_pool <= num_items // 2]


def brute_force_floor(shape: Shape, num_queries: int, num_items: int, touched: Mapping[str, float]) -> Work:
    """Float32 scores of everything. The exact strategies are held against it, too: below 1 they beat it."""
    return full_scores(shape, num_queries=num_queries, num_items=num_items)


def _pooled_floor(scans: tuple[Callable[..., Work], ...]) -> Floor:
    def floor(shape: Shape, num_queries: int, num_items: int, touched: Mapping[str, float]) -> Work:
        work = pool_scores(shape, num_queries=num_queries, pool=touched.get("full", 0.0))
        for scan in scans:
            work = work + scan(shape, num_queries=num_queries, num_items=num_items)
        return work

    return floor


def _exact() -> list[Contender]:
    found = [
        Contender(
            name="brute_force",
            build=lambda bench: BruteForce(bench.scorer),
            floor=brute_force_floor,
            transcribed=lambda paper, queries: paper.brute_force(queries, RESULTS),
        )
    ]
    for algorithm in (ExactAlgorithm1, ExactGateBounds, ExactLowPrecision, ExactExpandedGates, ExactClusters, Exact):
        found.append(
            Contender(
                name=algorithm.name,
                build=lambda bench, algorithm=algorithm: algorithm(bench.scorer),  # type: ignore[misc]
                floor=brute_force_floor,
            )
        )
    return found


def _per_embedding() -> list[Contender]:
    return [
        Contender(
            name=f"top_k_per_embedding({size})",
            build=partial(_pairs_with, size=size),
            floor=_pooled_floor((pair_scan,)),
            transcribed=partial(_transcribed_pairs, size=size),
            largest_pool=size,
        )
        for size in PAIR_POOLS
    ]


def _average() -> list[Contender]:
    found = [
        Contender(
            name=f"top_k_avg({size})",
            build=partial(_average_with, size=size),
            floor=_pooled_floor((average_scan,)),
            transcribed=partial(_transcribed_average, size=size),
            largest_pool=size,
        )
        for size in AVERAGE_POOLS
    ]
    found.append(
        Contender(
            name='adaptive_top_k_avg("recall 0.99")',
            build=_adaptive_recall,
            floor=_pooled_floor((average_scan,)),
            largest_pool=AVERAGE_POOLS[0],
        )
    )
    found += [
        Contender(
            name=f"quantized_top_k_avg({size})",
            build=partial(_quantized_with, size=size),
            floor=_pooled_floor((average_scan,)),
            largest_pool=size,
        )
        for size in AVERAGE_POOLS[-2:]
    ]
    return found


def _combined() -> list[Contender]:
    found = [
        Contender(
            name=f"combined_top_k({pairs},{average})",
            build=partial(_combined_with, pairs=pairs, average=average),
            floor=_pooled_floor((pair_scan, average_scan)),
            transcribed=partial(_transcribed_combined, pairs=pairs, average=average),
            largest_pool=average,
        )
        for pairs, average in COMBINED_POOLS
    ]
    found.append(
        Contender(
            name='adaptive_combined_top_k("gap 0")',
            build=_adaptive_gap,
            floor=_pooled_floor((pair_scan, average_scan)),
            largest_pool=COMBINED_POOLS[0][1],
        )
    )
    return found


def _with_sizes(index: Any, **sizes: int) -> Any:
    """The same index at other pool sizes: they are read at search, and all it holds is shared."""
    other = copy.copy(index)
    for name, size in sizes.items():
        setattr(other, name, size)
    return other


def _pairs_with(bench: Bench, *, size: int) -> Index:
    held = bench.held("top_k_per_embedding", lambda scorer: TopKPerEmbedding(scorer, pool_size=size))
    return _with_sizes(held, pool_size=size)  # type: ignore[no-any-return]


def _average_with(bench: Bench, *, size: int) -> Any:
    held = bench.held("top_k_avg", lambda scorer: TopKAvg(scorer, pool_size=size))
    return _with_sizes(held, pool_size=size)


def _combined_with(bench: Bench, *, pairs: int, average: int) -> Any:
    held = bench.held(
        "combined_top_k", lambda scorer: CombinedTopK(scorer, pair_pool_size=pairs, average_pool_size=average)
    )
    return _with_sizes(held, pool_size=pairs, average_pool_size=average)


def _quantized_with(bench: Bench, *, size: int) -> Index:
    held = bench.held("quantized_top_k_avg", lambda scorer: QuantizedTopKAvg(scorer, pool_size=size))
    return _with_sizes(held, pool_size=size)  # type: ignore[no-any-return]


def _adaptive_recall(bench: Bench) -> Index:
    index = _average_with(bench, size=AVERAGE_POOLS[0])
    estimate = calibrate(index, bench.samples, recall=0.99, k=RESULTS)
    return AdaptiveTopK(index, target="recall 0.99", estimate=estimate)


def _adaptive_gap(bench: Bench) -> Index:
    pairs, average = COMBINED_POOLS[0]
    return AdaptiveTopK(_combined_with(bench, pairs=pairs, average=average), target="gap 0")


def _transcribed_pairs(paper: Transcription, queries: QueryStates, *, size: int) -> torch.Tensor:
    return paper.top_k_per_embedding(queries, RESULTS, pool_size=size)


def _transcribed_average(paper: Transcription, queries: QueryStates, *, size: int) -> torch.Tensor:
    return paper.top_k_avg(queries, RESULTS, pool_size=size)


def _transcribed_combined(paper: Transcription, queries: QueryStates, *, pairs: int, average: int) -> torch.Tensor:
    return paper.combined_top_k(queries, RESULTS, pair_pool_size=pairs, average_pool_size=average)
