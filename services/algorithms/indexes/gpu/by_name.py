"""The algorithms that a card serves, by the names that requests and settings give them (see `by_name.py`).

"exact" and "brute_force" are one: the certified pass over everything is a card's exact mode.
"""

from collections.abc import Callable

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

_ALGORITHMS: dict[str, Callable[..., DeviceIndex]] = {
    "brute_force": DeviceBruteForce,
    "exact": DeviceBruteForce,
    "top_k_avg": DeviceTopKAvg,
    "top_k_per_embedding": DeviceTopKPerEmbedding,
    "combined_top_k": DeviceCombinedTopK,
}


def make_device_index(algorithm: Algorithm, scorer: DeviceScorer, tie_ranks: Indices) -> DeviceIndex:
    """Build it over states that are on a device. Raises: ValueError for one that a card does not serve."""
    if algorithm.name not in _ALGORITHMS:
        raise ValueError(f"algorithm={algorithm.text!r} is not served from a card; allowed: {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[algorithm.name](scorer, tie_ranks=tie_ranks, **algorithm.arguments)
