"""Algorithms by their names in requests, settings and tables: "exact", "top_k_avg(4000)"."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.exact.two_pass import ExactAlgorithm1, ExactLowPrecision
from services.algorithms.indexes.passes import Passes
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.quantized.anisotropic import Anisotropic
from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.indexes.quantized.dot_products import Quantized
from services.algorithms.indexes.quantized.tangents import QuantizedTangents, TangentIndex
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import Coder, Visit, vectors_coded

_NOTHING: dict[str, tuple[str, ...]] = {"": ()}
_POOL: dict[str, tuple[str, ...]] = {"N": ("pool_size",)}
_POOL_AND_CELLS = {**_POOL, "N,C": ("pool_size", "visit")}

# Name -> (constructor, form of the sizes -> names of its arguments). N: pool size; C: visited cells, default all.
_ALGORITHMS: dict[str, tuple[Callable[..., Index], dict[str, tuple[str, ...]]]] = {
    "brute_force": (BruteForce, _NOTHING),
    "exact": (Exact, _NOTHING),
    "exact_algorithm_1": (ExactAlgorithm1, _NOTHING),
    "exact_low_precision": (ExactLowPrecision, _NOTHING),
    "top_k_avg": (TopKAvg, _POOL),
    "top_k_per_embedding": (TopKPerEmbedding, _POOL),
    "combined_top_k": (CombinedTopK, {"N1,N2": ("pair_pool_size", "average_pool_size")}),
    "quantized": (Quantized, _POOL_AND_CELLS),
    "quantized_tangents": (QuantizedTangents, _POOL_AND_CELLS),
    "anisotropic": (Anisotropic, _POOL_AND_CELLS),
}
_CODED: tuple[Callable[..., Index], ...] = (Quantized, QuantizedTangents, Anisotropic)
# The algorithms that a card supports. There, "exact" is "brute_force".
_ON_A_CARD = ("brute_force", "exact", "top_k_avg", "top_k_per_embedding", "combined_top_k")
MAX_SIZE = 1_000_000


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A name and its pool sizes."""

    name: str
    sizes: tuple[int, ...]

    @property
    def text(self) -> str:
        """The name with sizes: "combined_top_k(50,500)"."""
        return f"{self.name}({','.join(map(str, self.sizes))})" if self.sizes else self.name

    @property
    def arguments(self) -> dict[str, int | Visit]:
        forms = _ALGORITHMS[self.name][1].values()
        names = next(names for names in forms if len(names) == len(self.sizes))
        sizes = zip(names, self.sizes, strict=True)
        return {name: Visit(probes=size) if name == "visit" else size for name, size in sizes}


def known_algorithms() -> list[str]:
    """Every algorithm's name, with letters for its sizes."""
    return [f"{name}({form})" if form else name for name, (_, forms) in _ALGORITHMS.items() for form in forms]


def parse_algorithm(text: str) -> Algorithm:
    """Parse a name with sizes. Raises: ValueError with the value and what is allowed."""
    match = re.fullmatch(r"([a-z0-9_]+)(?:\(([\d,]*)\))?", text)
    if match and match[1] in _ALGORITHMS:
        sizes = tuple(int(size) for size in (match[2] or "").split(",") if size)
        if len(sizes) in map(len, _ALGORITHMS[match[1]][1].values()) and all(1 <= size <= MAX_SIZE for size in sizes):
            return Algorithm(match[1], sizes)
    raise ValueError(f"algorithm={text!r}; allowed: {', '.join(known_algorithms())}; sizes 1-{MAX_SIZE}")


def make_index(
    algorithm: Algorithm,
    scorer: MolScorer,
    coder: Coder = vectors_coded,
    codebooks: Codebooks | None = None,
) -> Index:
    """Build an algorithm. `coder` codes the items if codes are searched.

    Raises: ValueError for no items, for a mixture if the algorithm supports only dot products, or for missing
    codebooks.
    """
    made: Callable[..., Index] = _ALGORITHMS[algorithm.name][0]
    options: dict[str, Any] = {"coder": coder} if made in _CODED else {}
    if made is Anisotropic:
        options["codebooks"] = codebooks
    return made(scorer, **options, **algorithm.arguments)


def make_card_index(algorithm: Algorithm, passes: Passes) -> Index:
    """Build an algorithm on a card. Raises: ValueError for an unsupported one."""
    if algorithm.name not in _ON_A_CARD:
        raise ValueError(f"algorithm={algorithm.text!r} is not served from a card; allowed: {', '.join(_ON_A_CARD)}")
    made: Callable[..., Index] = BruteForce if algorithm.name == "exact" else _ALGORITHMS[algorithm.name][0]
    return made(passes, **algorithm.arguments)


def make_indexes(
    algorithms: Sequence[Algorithm],
    scorer: MolScorer,
    coder: Coder = vectors_coded,
    codebooks: Codebooks | None = None,
) -> dict[str, Index]:
    """Build algorithms; keys are their `text`. Those that differ only in sizes share codes. Raises as `make_index`."""
    made: dict[str, Index] = {}
    coded: dict[str, TangentIndex] = {}
    for one in algorithms:
        if one.name in coded:
            made[one.text] = cast(Any, coded[one.name]).with_sizes(**one.arguments)
            continue
        made[one.text] = index = make_index(one, scorer, coder, codebooks)
        if isinstance(index, TangentIndex):
            coded[one.name] = index
    return made
