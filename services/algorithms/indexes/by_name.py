"""Algorithms by the names that requests, settings and tables give them: "exact", "top_k_avg(4000)".

One place for the names and for what their sizes mean, so that a benchmark's row can be pasted into a setting.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.exact.clusters import ExactClusters
from services.algorithms.indexes.exact.two_pass import ExactAlgorithm1, ExactGateBounds, ExactLowPrecision
from services.algorithms.indexes.protocol import Index, Indices
from services.algorithms.indexes.quantized.dot_products import Quantized
from services.algorithms.indexes.quantized.pools import QuantizedTopKAvg, QuantizedTopKPerEmbedding
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import Visit

Make = Callable[[MolScorer, Indices, Sequence[int]], Index]


def _visit(probes: Sequence[int]) -> Visit | None:
    return Visit(probes=probes[0]) if probes else None


# Name -> (the ways its sizes are written, what makes it). N: pool size; C: cells visited, all of them where left out.
_ALGORITHMS: dict[str, tuple[tuple[str, ...], Make]] = {
    "brute_force": (("",), lambda scorer, ranks, sizes: BruteForce(scorer, tie_ranks=ranks)),
    "exact": (("",), lambda scorer, ranks, sizes: Exact(scorer, tie_ranks=ranks)),
    "exact_algorithm_1": (("",), lambda scorer, ranks, sizes: ExactAlgorithm1(scorer, tie_ranks=ranks)),
    "exact_gate_bounds": (("",), lambda scorer, ranks, sizes: ExactGateBounds(scorer, tie_ranks=ranks)),
    "exact_low_precision": (("",), lambda scorer, ranks, sizes: ExactLowPrecision(scorer, tie_ranks=ranks)),
    "exact_clusters": (("",), lambda scorer, ranks, sizes: ExactClusters(scorer, tie_ranks=ranks)),
    "top_k_avg": (("N",), lambda scorer, ranks, sizes: TopKAvg(scorer, pool_size=sizes[0], tie_ranks=ranks)),
    "top_k_per_embedding": (
        ("N",),
        lambda scorer, ranks, sizes: TopKPerEmbedding(scorer, pool_size=sizes[0], tie_ranks=ranks),
    ),
    "combined_top_k": (
        ("N1,N2",),
        lambda scorer, ranks, sizes: CombinedTopK(
            scorer, pair_pool_size=sizes[0], average_pool_size=sizes[1], tie_ranks=ranks
        ),
    ),
    "quantized": (
        ("N", "N,C"),
        lambda scorer, ranks, sizes: Quantized(scorer, pool_size=sizes[0], visit=_visit(sizes[1:]), tie_ranks=ranks),
    ),
    "quantized_top_k_avg": (
        ("N", "N,C"),
        lambda scorer, ranks, sizes: QuantizedTopKAvg(
            scorer, pool_size=sizes[0], visit=_visit(sizes[1:]), tie_ranks=ranks
        ),
    ),
    "quantized_top_k_per_embedding": (
        ("N", "N,C"),
        lambda scorer, ranks, sizes: QuantizedTopKPerEmbedding(
            scorer, pool_size=sizes[0], visit=_visit(sizes[1:]), tie_ranks=ranks
        ),
    ),
}
MAX_SIZE = 1_000_000


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A name and its pool sizes."""

    name: str
    sizes: tuple[int, ...]

    @property
    def text(self) -> str:
        """As it is written: "combined_top_k(50,500)"."""
        return f"{self.name}({','.join(map(str, self.sizes))})" if self.sizes else self.name


def known_algorithms() -> list[str]:
    """Every name as it is written, with letters for its sizes."""
    return [f"{name}({form})" if form else name for name, (forms, _) in _ALGORITHMS.items() for form in forms]


def parse_algorithm(text: str) -> Algorithm:
    """Read a name with its sizes. Raises: ValueError naming the value and what is allowed."""
    match = re.fullmatch(r"([a-z0-9_]+)(?:\(([\d,]*)\))?", text)
    if match and match[1] in _ALGORITHMS:
        sizes = tuple(int(size) for size in (match[2] or "").split(",") if size)
        lengths = [len(form.split(",")) if form else 0 for form in _ALGORITHMS[match[1]][0]]
        if len(sizes) in lengths and all(1 <= size <= MAX_SIZE for size in sizes):
            return Algorithm(match[1], sizes)
    raise ValueError(f"algorithm={text!r}; allowed: {', '.join(known_algorithms())}; sizes 1-{MAX_SIZE}")


def make_index(algorithm: Algorithm, scorer: MolScorer, tie_ranks: Indices) -> Index:
    """Build it over items that are prepared for scoring.

    Raises: ValueError for an empty index, or for a mixture where the algorithm needs plain dot products.
    """
    _, make = _ALGORITHMS[algorithm.name]
    return make(scorer, tie_ranks, algorithm.sizes)
