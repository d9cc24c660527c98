"""The algorithms of the retrieval benchmark: their construction, roofline, and transcription.

Letters: X items, B queries, P component pairs, K results, N pool size.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.exact.two_pass import ExactAlgorithm1, ExactLowPrecision
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.quantized.anisotropic import Anisotropic
from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.indexes.quantized.tangents import QuantizedTangents
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.offline.evaluation.catalogues.scene import Shape
from services.offline.evaluation.common.roofline import Work, average_scan, pair_scan, searched
from services.offline.evaluation.retrieval.transcription import Transcription
from services.offline.training.codebooks.inverted_file import catalogue_codebooks

RESULTS = 100
TRANSCRIPTION = "transcription of "
EXACT = (ExactAlgorithm1, ExactLowPrecision, Exact)
_PAIR_POOLS = (5, 10, 50, 100)
_AVERAGE_POOLS = (200, 500, 1000, 2000, 4000)
_TANGENT_POOLS = (500, 2000)
_COMBINED_POOLS = ((5, 200), (50, 500), (100, 1000))
# Exact Algorithm 1 drops no item here, so it costs more than brute force. Two pool sizes show the trade-off.
_NOT_QUICK = ("exact_algorithm_1", "top_k_per_embedding(10)", "top_k_per_embedding(50)", "combined_top_k(50,500)")

Scan = Callable[..., Work]


@dataclass
class Bench:
    """A catalogue, prepared once."""

    scorer: MolScorer
    _held: dict[Any, Any] = field(default_factory=dict)

    def index(self, kind: Any, sizes: Mapping[str, int]) -> Any:
        """Return an index with these pool sizes. Indexes of the last kind share its data: only searches read sizes."""
        if kind not in self._held:
            self._held.clear()
            options = {"codebooks": self._codebooks()} if kind is Anisotropic else {}
            self._held[kind] = kind(self.scorer, **options, **sizes)
        other = copy.copy(self._held[kind])
        for name, size in sizes.items():
            setattr(other, name.removeprefix("pair_"), size)
        return other

    def _codebooks(self) -> Codebooks | None:
        states = ItemStates(components=self.scorer.components, gate=self.scorer.item_gate)
        return catalogue_codebooks(states, self.scorer.pair_gate)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One row per batch size.

    scans: first passes over all items; empty: the work is brute force's. transcribed: returns the paper's answers (B,
    K).
    """

    name: str
    build: Callable[[Bench], Index]
    scans: tuple[Scan, ...] = ()
    transcribed: Callable[[Transcription, QueryStates], torch.Tensor] | None = None
    largest_pool: int = 0

    def work(self, shape: Shape, num_queries: int, num_items: int, touched: Mapping[str, float]) -> Work:
        """Return the unavoidable work; `touched`: mean items per pass.

        An exact strategy gets brute force's work, so it may take less than 1 roofline.
        """
        pool = touched.get("full", 0.0)
        return searched(shape, self.scans, num_queries=num_queries, num_items=num_items, pool=pool)


def algorithms(num_items: int, shape: Shape, *, quick: bool) -> list[Algorithm]:
    """Return those whose pools are at most half of `num_items`; fewer if `quick`."""
    found = [
        Algorithm(
            name="brute_force",
            build=lambda bench: BruteForce(bench.scorer),
            transcribed=lambda paper, queries: paper.brute_force(queries, RESULTS),
        ),
        *(Algorithm(name=kind.name, build=lambda bench, kind=kind: kind(bench.scorer)) for kind in EXACT),  # type: ignore[misc]
        *(_pooled(TopKPerEmbedding, pair_scan, pool_size=size) for size in _PAIR_POOLS),
        *(_pooled(TopKAvg, average_scan, pool_size=size) for size in _AVERAGE_POOLS),
        # The number of tangents varies, so these are compared with brute force's work.
        *(_pooled(QuantizedTangents, pool_size=size) for size in _TANGENT_POOLS),
        *(_pooled(Anisotropic, pool_size=size) for size in _TANGENT_POOLS if find_spec("faiss")),
        *(
            _pooled(CombinedTopK, pair_scan, average_scan, pair_pool_size=pairs, average_pool_size=average)
            for pairs, average in _COMBINED_POOLS
        ),
    ]
    if quick:
        # Wide vectors take minutes to encode.
        slow = _NOT_QUICK + (("quantized", "anisotropic") if shape.component_width > 256 else ())
        found = [one for one in found if not one.name.startswith(slow)]
    return [one for one in found if one.largest_pool <= num_items // 2]


def _pooled(kind: Any, *scans: Scan, **sizes: int) -> Algorithm:
    formula = getattr(Transcription, kind.name, None)
    return Algorithm(
        name=f"{kind.name}({','.join(map(str, sizes.values()))})",
        build=lambda bench: bench.index(kind, sizes),
        scans=scans,
        transcribed=formula and (lambda paper, queries: formula(paper, queries, RESULTS, **sizes)),
        largest_pool=max(sizes.values()),
    )
