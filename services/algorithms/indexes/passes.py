"""The passes over item states that the algorithms are made of, as a CPU and as a card run them.

`BruteForce`, `TopKAvg`, `TopKPerEmbedding` and `CombinedTopK` are written once, over this protocol. `CpuPasses` runs
the compiled kernels, `CardPasses` those of a torch device. Rows and scores stay where the states are, in arrays of
their own kind (`Array`), until `fetch`: what a card runs between two waits for it is one CUDA graph.

Letters: B queries, X items, P component pairs, Q query components, d component width, n results per list, K results.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import Indices, Mask, Pool, Scores
from services.algorithms.indexes.rescoring import Rescored
from services.algorithms.scoring.states import FloatArray, QueryStates

Array = Any  # NumPy's on the CPU, tensors on a card
Request = Any  # B queries and their mask as the implementation holds them, with `queries` as they were given
Found = TypeVar("Found")
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """The best n of each list of B queries, best first, equal scores by rank, -1 and -inf beyond.

    Shapes: rows and scores (B, L, n); following (B, L), the best score left out, -inf when nothing was. `seconds` of
    the pass on the CPU; a card's passes are timed as one, see `CardPasses.rescored`.
    """

    rows: Array
    scores: Array
    following: Array
    seconds: float


class Means(Protocol):
    """The mean component and the radius of every item, searched by the mean component of a query."""

    @property
    def nbytes(self) -> int: ...

    @property
    def unit(self) -> float:
        """The relative error of one term of a sum."""

    def best(self, request: Request, size: int) -> Lists:
        """The `size` allowed items with the best products of means: a list (B, 1)."""

    def average(self, request: Request) -> Scores:
        """The queries' mean components as `best` reads them: (B, d)."""

    def at(self, rows: Indices) -> tuple[FloatArray, FloatArray]:
        """Means (..., d) and radii (...) of some items."""

    def largest(self, vectors: FloatArray, allowed: Mask) -> Scores:
        """The largest product of vectors (n, Q, d + 1) with an item's mean and radius; allowed (n, X) -> (n,)."""


class Passes(Protocol):
    """X items, where their states are, and `ranks` (X,) that settle ties. Safe to use from several threads."""

    ranks: Indices

    @property
    def scorer(self) -> Any:
        """The states, prepared for scoring: a MolScorer or a DeviceScorer."""

    @property
    def num_items(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the states and the ranks."""

    def run(
        self,
        queries: QueryStates,
        allowed: Mask | None,
        key: Hashable,
        steps: Callable[[Request], Found],
        then: Callable[[Request, Found], Answer],
    ) -> Answer:
        """`then(request, steps(request))` for queries that have been checked.

        A card may run `steps` again, and may replay them where `key`, if not None, is equal: they must depend on the
        request and the key alone, and never wait. What they found is valid inside `then`.
        """

    def pairs(self, request: Request, size: int) -> Lists:
        """The `size` allowed items with the best cosines of each pair: lists (B, P)."""

    def cosine_errors(self, request: Request) -> Scores:
        """Bounds on the errors of these cosines: (B, P)."""

    def round_means(self, means: npt.NDArray[np.float64]) -> FloatArray:
        """Means as they will be stored."""

    def means(self, vectors: FloatArray) -> Means:
        """Prepare rounded means and radii, which come last: vectors (X, 1, d + 1)."""

    def pool(self, request: Request, rows: Sequence[Array]) -> Array:
        """Every row of the lists `rows` (B, L, n) once: pools for `top_k`."""

    def top_k(self, request: Request, pool: Array | None, k: int) -> Any:
        """The exact top `k` of the allowed rows of pools, or of all items, for `rescored`."""

    def best_of_all(self, queries: QueryStates, size: int, allowed: Mask | None) -> Pool:
        """The `size` best of the allowed items by scores that a fast pass gives them, and a bound on the rest."""

    def rescored(self, request: Request, found: Any) -> Rescored:
        """What `top_k` found."""

    def fetch(self, array: Array) -> npt.NDArray[Any]:
        """An array as NumPy's."""
