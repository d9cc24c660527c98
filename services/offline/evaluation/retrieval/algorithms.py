"""The algorithms of the retrieval benchmark: exact strategies, and pools of several sizes.

Letters: X items, N pool size.
"""

from importlib.util import find_spec
from typing import Any

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.exact.two_pass import ExactAlgorithm1, ExactLowPrecision
from services.algorithms.indexes.quantized.anisotropic import Anisotropic
from services.algorithms.indexes.quantized.tangents import QuantizedTangents
from services.offline.evaluation.catalogues.scene import Shape
from services.offline.evaluation.common.roofline import Algorithm, heuristics

RESULTS = 100
TRANSCRIPTION = "transcription of "
EXACT = (ExactAlgorithm1, ExactLowPrecision, Exact)
_PAIR_POOLS = (5, 10, 50, 100)
_AVERAGE_POOLS = (200, 500, 1000, 2000, 4000)
_TANGENT_POOLS = (500, 2000)
_COMBINED_POOLS = ((5, 200), (50, 500), (100, 1000))
# Exact Algorithm 1 drops no item here, so it costs more than brute force. Two pool sizes show the trade-off.
_NOT_QUICK = ("exact_algorithm_1", "top_k_per_embedding(10)", "top_k_per_embedding(50)", "combined_top_k(50,500)")


def algorithms(num_items: int, shape: Shape, *, quick: bool) -> list[Algorithm]:
    """Return the algorithms whose pools are at most half of `num_items`; fewer if `quick`."""
    # The number of tangents varies, so these are compared with brute force's work.
    of_tangents: list[Any] = [QuantizedTangents, *([Anisotropic] if find_spec("faiss") else [])]
    found = [
        *(Algorithm(kind=kind) for kind in (BruteForce, *EXACT)),
        *heuristics(_PAIR_POOLS, _AVERAGE_POOLS, _COMBINED_POOLS),
        *(Algorithm(kind=kind, sizes={"pool_size": size}) for kind in of_tangents for size in _TANGENT_POOLS),
    ]
    if quick:
        # Encoding wide vectors takes minutes.
        slow = _NOT_QUICK + (("quantized", "anisotropic") if shape.component_width > 256 else ())
        found = [one for one in found if not one.name.startswith(slow)]
    return [one for one in found if max(one.sizes.values(), default=0) <= num_items // 2]
