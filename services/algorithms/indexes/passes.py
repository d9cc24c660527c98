"""The passes over item states that several algorithms share, for CPU and GPU.

`BruteForce`, `TopKAvg`, `TopKPerEmbedding` and `CombinedTopK` use only this protocol. `CpuPasses` runs the compiled
kernels, `CardPasses` those of a torch device. Rows and scores stay on the device of the states, as `Array`, until
`fetch`. Between two waits for results, a GPU runs one CUDA graph.

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

Array = Any  # NumPy arrays on the CPU, tensors on a GPU
Request = Any  # B queries and their mask in the implementation's form, with `queries` as given
Found = TypeVar("Found")
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """The n best items of each of L lists for B queries, best first, equal scores by rank, padded with -1 and -inf.

    Shapes: rows and scores (B, L, n); following (B, L): the best omitted score, -inf without one. seconds: duration
    of the pass on the CPU; the passes of a GPU are timed together, see `CardPasses.rescored`.
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
        """Return the `size` allowed items whose means have the largest dot products: one list per query, (B, 1)."""

    def average(self, request: Request) -> Scores:
        """Return the queries' mean components, rounded as in `best`: (B, d)."""

    def at(self, rows: Indices) -> tuple[FloatArray, FloatArray]:
        """Return means (..., d) and radii (...) of some items."""

    def largest(self, vectors: FloatArray, allowed: Mask) -> Scores:
        """Return, for each row of vectors (n, Q, d + 1), its largest product with an allowed item's mean and radius.

        allowed: (n, X). Returns: (n,).
        """


class Passes(Protocol):
    """Passes over X items, on the device of their states. ranks (X,): the order of equal scores. Thread-safe."""

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
        """Return `then(request, steps(request))` for checked queries.

        On a GPU, `steps` may run again, and a recorded run may be replayed for an equal `key` that is not None. So
        `steps` must depend only on the request and the key, and must not wait for results. Its results are valid only
        inside `then`.
        """

    def pairs(self, request: Request, size: int) -> Lists:
        """Return the `size` allowed items with the best cosines of each pair: lists (B, P)."""

    def cosine_errors(self, request: Request) -> Scores:
        """Return bounds on the errors of the cosines of `pairs`: (B, P)."""

    def round_means(self, means: npt.NDArray[np.float64]) -> FloatArray:
        """Return means, rounded as `means` stores them."""

    def means(self, vectors: FloatArray) -> Means:
        """Prepare vectors (X, 1, d + 1): rounded means, with the radius as the last coordinate."""

    def pool(self, request: Request, rows: Sequence[Array]) -> Array:
        """Return every row of the lists `rows` (B, L, n) once: pools for `top_k`."""

    def top_k(self, request: Request, pool: Array | None, k: int) -> Any:
        """Find the exact top `k` of the allowed rows of pools, or of all items, for `rescored`."""

    def best_of_all(self, queries: QueryStates, size: int, allowed: Mask | None) -> Pool:
        """Return the `size` best of the allowed items by the scores of a fast pass, and a bound on the rest."""

    def rescored(self, request: Request, found: Any) -> Rescored:
        """Return the result of `top_k`."""

    def fetch(self, array: Array) -> npt.NDArray[Any]:
        """Return a NumPy array."""
