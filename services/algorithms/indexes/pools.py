"""What the pool heuristics share: one scan from which pools of any size up to its depth can be cut, and the answer
that full scores within such a pool make, with its certificate.

A scan is kept apart from the answer so that a larger pool of the same queries costs no second pass over the items.

Letters: B queries, X items, K results, N pool size (items per list of the scan).
"""

import math
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import Certificate, Indices, Mask, Pass, Pool, Scores, TopK, certificate
from services.algorithms.indexes.rescoring import rescore
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import ItemStates, PairGate, QueryStates


class PoolScan(Protocol):
    """The first pass of B queries over the allowed items, deep enough for pools of up to `depth` per list."""

    @property
    def depth(self) -> int: ...

    @property
    def seconds(self) -> float:
        """Wall clock of the pass and, so far, of the bounds asked for."""

    def pool(self, query: int, size: int) -> Indices:
        """The distinct rows among the `size` best of each list; `size` is at most `depth`."""

    def bounds(self, size: int, kth_scores: Scores | None = None) -> Scores:
        """No allowed item outside the pools of `size` has s above this: (B,); -inf: nothing left out; NaN: no proof.

        `kth_scores` (B,), NaN where unknown: once a bound is below it, or can be seen to stay above it, no work is
        spent on a tighter one.
        """


class PooledIndex(ScoredIndex, ABC):
    """An index whose answers come from full scores within the pool of a first pass; `pool_size` is N of a search."""

    name: str

    def __init__(
        self,
        items: ItemStates | MolScorer,
        pair_gate: PairGate | None = None,
        *,
        pool_size: int,
        tie_ranks: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """As `ScoredIndex`. Raises: ValueError also for a pool_size below 1."""
        check_pool_size("pool_size", pool_size)
        self.pool_size = pool_size
        super().__init__(items, pair_gate, tie_ranks=tie_ranks)

    @abstractmethod
    def scan(self, queries: QueryStates, depth: int, allowed: Mask | None) -> PoolScan:
        """The first pass. `depth` is cut to the number of items. Raises: ValueError for shapes that disagree."""

    @abstractmethod
    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """See `Index.first_stage`."""

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """The top `k` by s of a pool of max(N, k), and how far from the exact top `k` that can be."""
        self.check(queries, k, allowed)
        return self._answer(self.scan(queries, max(k, self.pool_size), allowed), queries, k)

    def _answer(self, scan: PoolScan, queries: QueryStates, k: int) -> TopK:
        """The top `k` by s within the largest pools of a scan, and how far from the exact top `k` that can be."""
        pools = [scan.pool(query, scan.depth) for query in range(len(queries))]
        answer = rescore(self.scorer, queries, pools, k, self.ranks)
        bounds = scan.bounds(scan.depth, answer.kth_scores)
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=certificates(bounds, answer.kth_scores),
            passes=(Pass("first_stage", scan.seconds, self.every_item(queries)), *answer.passes),
        )


def certificates(bounds: Scores, kth_scores: Scores) -> tuple[Certificate, ...]:
    """One per query, from the bound on what its pool left out and its K-th score, NaN for none: (B,) each."""
    return tuple(
        certificate(bound=None if math.isnan(bound) else bound, kth_score=None if math.isnan(kth_score) else kth_score)
        for bound, kth_score in zip(bounds.tolist(), kth_scores.tolist(), strict=True)
    )


def check_pool_size(name: str, value: int) -> None:
    """Raise ValueError, naming the field, unless the size is at least 1."""
    if value < 1:
        raise ValueError(f"{name}={value} allowed: at least 1")
