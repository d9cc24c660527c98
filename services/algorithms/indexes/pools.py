"""What the pool heuristics share: one scan from which pools of any size up to its depth can be cut, and the answer
that full scores within such a pool make, with its certificate.

A scan is kept apart from the answer so that a larger pool of the same queries costs no second pass over the items
(the adaptive variants rest on it).

Letters: B queries, X items, K results, N pool size (items per list of the scan).
"""

from typing import Protocol

import numpy as np

from services.algorithms.indexes.protocol import Certificate, Indices, Mask, Pass, Pool, Scores, TopK, certificate
from services.algorithms.indexes.rescoring import Rescored, rescore
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import QueryStates


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


class PooledIndex(Protocol):
    """An index whose answers come from full scores within the pool of a first pass."""

    @property
    def name(self) -> str: ...

    @property
    def scorer(self) -> MolScorer: ...

    @property
    def ranks(self) -> Indices: ...

    @property
    def pool_size(self) -> int:
        """N of an ordinary search."""

    @property
    def nbytes(self) -> int: ...

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """See `Index.first_stage`."""

    def scan(self, queries: QueryStates, depth: int, allowed: Mask | None) -> PoolScan:
        """The first pass. `depth` is cut to the number of items."""


def answer_from(index: PooledIndex, scan: PoolScan, queries: QueryStates, k: int, size: int) -> TopK:
    """The top `k` by s within the pools of `size`, and how far from the exact top `k` that can be."""
    num_queries = len(queries)
    pools = [scan.pool(query, size) for query in range(num_queries)]
    answer = rescore(index.scorer, queries, pools, k, index.ranks)
    bounds = scan.bounds(size, answer.kth_scores)
    touched = np.full(num_queries, index.scorer.num_items, dtype=np.int64)
    return TopK(
        item_indices=answer.item_indices,
        scores=answer.scores,
        certificates=certificates(bounds, answer),
        passes=(Pass("first_stage", scan.seconds, touched), *answer.passes),
    )


def certificates(bounds: Scores, answer: Rescored) -> tuple[Certificate, ...]:
    """One per query, from the bound on what its pool left out (B,) and its K-th score."""
    return tuple(
        certificate(bound=None if np.isnan(bound) else float(bound), kth_score=answer.kth_score(query))
        for query, bound in enumerate(bounds)
    )


def check_pool_size(name: str, value: int) -> None:
    """Raise ValueError, naming the field, unless the size is at least 1."""
    if value < 1:
        raise ValueError(f"{name}={value} allowed: at least 1")
