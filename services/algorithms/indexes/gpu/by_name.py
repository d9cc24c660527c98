"""The algorithms that a card serves, by the names that requests and settings give them (see `by_name.py`).

"exact" and "brute_force" are one: the certified pass over everything is a card's exact mode.
"""

from collections.abc import Callable, Sequence

from services.algorithms.indexes.by_name import Algorithm
from services.algorithms.indexes.gpu.index import (
    DeviceBruteForce,
    DeviceCombinedTopK,
    DeviceIndex,
    DeviceTopKAvg,
    DeviceTopKPerEmbedding,
)
from services.algorithms.indexes.protocol import Indices
from services.algorithms.ops.mol_scores.device import DeviceScorer

_ALGORITHMS: dict[str, Callable[[DeviceScorer, Indices, Sequence[int]], DeviceIndex]] = {
    "brute_force": lambda scorer, ranks, sizes: DeviceBruteForce(scorer, tie_ranks=ranks),
    "exact": lambda scorer, ranks, sizes: DeviceBruteForce(scorer, tie_ranks=ranks),
    "top_k_avg": lambda scorer, ranks, sizes: DeviceTopKAvg(scorer, pool_size=sizes[0], tie_ranks=ranks),
    "top_k_per_embedding": lambda scorer, ranks, sizes: DeviceTopKPerEmbedding(
        scorer, pool_size=sizes[0], tie_ranks=ranks
    ),
    "combined_top_k": lambda scorer, ranks, sizes: DeviceCombinedTopK(
        scorer, pair_pool_size=sizes[0], average_pool_size=sizes[1], tie_ranks=ranks
    ),
}


def make_device_index(algorithm: Algorithm, scorer: DeviceScorer, tie_ranks: Indices) -> DeviceIndex:
    """Build it over states that are on a device. Raises: ValueError for one that a card does not serve."""
    if algorithm.name not in _ALGORITHMS:
        raise ValueError(f"algorithm={algorithm.text!r} is not served from a card; allowed: {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[algorithm.name](scorer, tie_ranks, algorithm.sizes)
