"""The roofline: measured rates of this machine, and the least time of each algorithm's work at these rates.

The least time is the larger of the time for arithmetic (float32 multiply-adds plus exponentials, on the same units) and
the time for memory (each necessary byte is read once). Selection and gathering count as 0.

Letters: X items, B queries, P_q, P_x components, P = P_q * P_x, d width, G gate hidden width, N pool size.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.offline.evaluation.catalogues.scene import Shape
from services.offline.evaluation.common.timing import Times


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates per second, with PyTorch's current number of threads."""

    multiply_adds: float
    exponentials: float
    bytes_read: float
    threads: int

    def seconds(self, work: "Work") -> float:
        """Return the least time."""
        arithmetic = work.multiply_adds / self.multiply_adds + work.exponentials / self.exponentials
        return max(arithmetic, work.bytes_read / self.bytes_read)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work that cannot be avoided."""

    multiply_adds: float
    exponentials: float
    bytes_read: float

    def __add__(self, other: "Work") -> "Work":
        return Work(**{name: value + asdict(other)[name] for name, value in asdict(self).items()})

    def times(self, factor: float) -> "Work":
        return Work(**{name: factor * value for name, value in asdict(self).items()})


def measure_rates() -> Rates:
    """Return the rates of the fastest of 40 runs, or 400 for exponentials.

    The runs are a 1024^3 float32 product, exp over a cached array, and a sum over 256 MiB.
    """
    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    small, target = torch.rand(1 << 17), torch.empty(1 << 17)
    large = torch.ones(1 << 26)
    return Rates(
        multiply_adds=1024**3 / _fastest_seconds(lambda: torch.mm(a, b)),
        exponentials=len(small) / _fastest_seconds(lambda: torch.exp(small, out=target), repeats=400),
        bytes_read=4 * len(large) / _fastest_seconds(large.sum),
        threads=torch.get_num_threads(),
    )


def full_scores(shape: Shape, *, num_queries: int, num_items: int) -> Work:
    """Return the work of scoring every pair of B queries and X items, each item read once.

    A pair takes P d + 2 G P multiply-adds, G exponentials for the hidden SiLU, P for the outer one and P for the
    softmax.
    """
    pairs, hidden = num_queries * num_items, shape.gate_hidden
    gate_floats = shape.num_pairs if shape.gated else 0
    return Work(
        multiply_adds=pairs * shape.num_pairs * (shape.component_width + 2 * hidden),
        exponentials=pairs * (hidden + 2 * shape.num_pairs),
        bytes_read=4 * num_items * (shape.num_item_components * shape.component_width + gate_floats),
    )


def pool_scores(shape: Shape, *, num_queries: int, pool: float) -> Work:
    """Return the work of scoring each query's own pool."""
    return full_scores(shape, num_queries=1, num_items=1).times(num_queries * pool)


def pair_scan(shape: Shape, *, num_queries: int, num_items: int) -> Work:
    """Return the work of every pair's cosine, the first pass of TopKPerEmbedding."""
    floats = shape.num_item_components * shape.component_width
    return Work(
        multiply_adds=num_queries * num_items * shape.num_pairs * shape.component_width,
        exponentials=0,
        bytes_read=4 * num_items * floats,
    )


def average_scan(shape: Shape, *, num_queries: int, num_items: int) -> Work:
    """Return the work of one averaged dot product per item, the first pass of TopKAvg."""
    return Work(
        multiply_adds=num_queries * num_items * shape.component_width,
        exponentials=0,
        bytes_read=4 * num_items * shape.component_width,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """A class of indexes with pool sizes. `scans`: first passes over all items; if empty, all items are scored."""

    kind: Any
    sizes: Mapping[str, int] = field(default_factory=dict)
    scans: tuple[Callable[..., Work], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind.name}({','.join(map(str, self.sizes.values()))})" if self.sizes else str(self.kind.name)

    def work(self, shape: Shape, *, num_queries: int, num_items: int, touched: Mapping[str, float]) -> Work:
        """Return the unavoidable work; `touched`: mean items per pass.

        An exact strategy gets brute force's work, so its time may be below the roofline's.
        """
        if not self.scans:
            return full_scores(shape, num_queries=num_queries, num_items=num_items)
        work = pool_scores(shape, num_queries=num_queries, pool=touched.get("full", 0.0))
        for scan in self.scans:
            work = work + scan(shape, num_queries=num_queries, num_items=num_items)
        return work


def heuristics(
    pair_pools: Iterable[int], average_pools: Iterable[int], combined_pools: Iterable[tuple[int, int]]
) -> list[Algorithm]:
    """Return TopKPerEmbedding, TopKAvg and CombinedTopK with these pool sizes.

    A combined pool has two sizes: per pair, and by the average.
    """
    found = [Algorithm(kind=TopKPerEmbedding, sizes={"pool_size": size}, scans=(pair_scan,)) for size in pair_pools]
    found += [Algorithm(kind=TopKAvg, sizes={"pool_size": size}, scans=(average_scan,)) for size in average_pools]
    for pairs, average in combined_pools:
        sizes = {"pair_pool_size": pairs, "average_pool_size": average}
        found.append(Algorithm(kind=CombinedTopK, sizes=sizes, scans=(pair_scan, average_scan)))
    return found


def _fastest_seconds(call: Callable[[], object], *, repeats: int = 40) -> float:
    return min(Times.of(lambda _: call(), range(repeats)).wall)
