"""The passes over item states that several algorithms share, for CPU and GPU.

`CpuPasses` runs compiled CPU kernels, `CardPasses` runs kernels on a torch device. Rows and scores stay on the device,
as `Array`, until `fetch`. Between two waits for results, a GPU can run one CUDA graph.

Letters: B queries, X items, P component pairs, Q query components, d component width, n results per list.
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
Request = Any  # B queries and their mask in the implementation's form
Found = TypeVar("Found")
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """The n best items of each of L lists for B queries, best first, equal scores by row, padded with -1 and -inf.

    Shapes: rows and scores (B, L, n); following (B, L): the best omitted score, -inf without one. seconds: duration of
    the pass; 0 on a GPU.
    """

    rows: Array
    scores: Array
    following: Array
    seconds: float


class Means(Protocol):
    """Every item's mean component and radius, searched by a query's mean component."""

    @property
    def nbytes(self) -> int: ...

    @property
    def unit(self) -> float:
        """The relative error of one term of a sum."""

    def best(self, request: Request, size: int) -> Lists:
        """The `size` allowed items whose means have the largest dot products, as lists (B, 1)."""

    def average(self, request: Request) -> Scores:
        """The queries' mean components (B, d), rounded as in `best`."""

    def at(self, rows: Indices) -> tuple[FloatArray, FloatArray]:
        """Some items' means (..., d) and radii (...)."""

    def largest(self, vectors: FloatArray, allowed: Mask) -> Scores:
        """(n,): for each row of vectors (n, Q, d + 1), the largest product with the mean and radius of an item that
        allowed (n, X) admits.
        """


class Passes(Protocol):
    """Passes over X items, on the device of their states. Thread-safe."""

    @property
    def scorer(self) -> Any:
        """The prepared states: a MolScorer or a DeviceScorer."""

    @property
    def num_items(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of states."""

    def run(
        self,
        queries: QueryStates,
        allowed: Mask | None,
        key: Hashable,
        steps: Callable[[Request], Found],
        then: Callable[[Request, Found], Answer],
    ) -> Answer:
        """`then(request, steps(request))` for checked queries.

        A GPU may run `steps` again, or replay a run recorded for an equal `key`, unless `key` is None. So `steps` must
        depend only on request and key, and must not wait for results. Results are valid only inside `then`.
        """

    def pairs(self, request: Request, size: int) -> Lists:
        """Each pair's `size` allowed items with the best cosines, as lists (B, P)."""

    def cosine_errors(self, request: Request) -> Scores:
        """Error bounds of the cosines of `pairs`: (B, P)."""

    def round_means(self, means: npt.NDArray[np.float64]) -> FloatArray:
        """Means, rounded as `means` stores them."""

    def means(self, vectors: FloatArray) -> Means:
        """Prepare vectors (X, 1, d + 1) of a rounded mean and a radius."""

    def pool(self, request: Request, rows: Sequence[Array]) -> Array:
        """The pools for `top_k`: each row in the lists `rows` (B, L, n) once."""

    def top_k(self, request: Request, pool: Array | None, k: int) -> Any:
        """Find the exact top `k` of pools, or of all allowed items. `rescored` converts the result."""

    def best_of_all(self, queries: QueryStates, size: int, allowed: Mask | None) -> Pool:
        """The `size` best allowed items by a fast pass, and a bound on the rest."""

    def rescored(self, request: Request, found: Any) -> Rescored:
        """The result of `top_k`."""

    def fetch(self, array: Array) -> npt.NDArray[Any]:
        """The array as a NumPy array."""
