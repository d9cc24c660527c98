"""The common part of the pool heuristics. One pass over the items makes lists, the listed items form a pool, and the
answer is the pool's top K.

Letters: B queries, K results, N pool size (items per list of the scan).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np

from services.algorithms.indexes.passes import Array, Lists, Passes, Request
from services.algorithms.indexes.protocol import (
    Certificate,
    Indices,
    Mask,
    Pass,
    Pool,
    Scores,
    TopK,
    asked_again,
    certificate,
)
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates

Depths = tuple[int, ...]  # one depth for each kind of list


class PoolScan(Protocol):
    """The first pass of B queries."""

    @property
    def seconds(self) -> float:
        """Wall-clock time of the pass and of the bounds computed so far."""

    def bounds(self, kth_scores: Scores | None = None) -> Scores:
        """Upper bounds (B,) on s of the allowed items outside the pools; -inf: none omitted; NaN: no proof.

        kth_scores (B,), NaN if unknown. A bound is tightened only if this may bring it below the K-th score.
        """


class PooledIndex(ScoredIndex, ABC):
    """An index that scores the pool of a first pass in full. pool_size: N."""

    name: str

    def __init__(
        self,
        items: MolScorer | Passes,
        *,
        pool_size: int,
    ) -> None:
        """Prepare like `ScoredIndex`. Raises: ValueError also for a pool_size below 1."""
        check_pool_size("pool_size", pool_size)
        self.pool_size = pool_size
        super().__init__(items)

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None, max_gap: float = 0.0) -> TopK:
        """The top `k` by s of a pool of at least max(N, k) items."""
        self.check(queries, k, allowed)
        return self._search(queries, k, allowed, self.depths(k))

    @abstractmethod
    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """See `Index.first_stage`."""

    @abstractmethod
    def depths(self, k: int) -> Depths:
        """The list depths of a search for `k`."""

    def deeper(self, depths: Depths, k: int) -> Depths | None:
        """The next depths if a pool has fewer than `k` items; None if deeper lists add no items."""
        return None

    @abstractmethod
    def lists(self, request: Request, depths: Depths) -> tuple[Lists, ...]:
        """Run the first pass, see `Passes.run`."""

    @abstractmethod
    def listed(self, lists: tuple[Lists, ...], depths: Depths) -> tuple[Array, ...]:
        """The rows of the lists that form the pools."""

    @abstractmethod
    def scanned(self, request: Request, lists: tuple[Lists, ...], depths: Depths) -> PoolScan:
        """The scan of a first pass."""

    def steps(self, k: int) -> tuple[Hashable, Callable[[Request], tuple[tuple[Lists, ...], Any]]]:
        """Key and steps of a search for `k`, see `Passes.run`."""
        return self._steps(k, self.depths(k))

    def _steps(self, k: int, depths: Depths) -> tuple[Hashable, Callable[[Request], tuple[tuple[Lists, ...], Any]]]:
        def steps(request: Request) -> tuple[tuple[Lists, ...], Any]:
            lists = self.lists(request, depths)
            pool = self.passes.pool(request, self.listed(lists, depths))
            return lists, self.passes.top_k(request, pool, k)

        return (self, depths, k), steps

    def _search(self, queries: QueryStates, k: int, allowed: Mask | None, depths: Depths) -> TopK:
        """Search with lists of `depths`, and again with deeper lists for queries whose pool has fewer than `k`
        items.
        """

        def answer(request: Request, found: tuple[tuple[Lists, ...], Any]) -> tuple[TopK, Indices]:
            scan, rescored = self.scanned(request, found[0], depths), self.passes.rescored(request, found[1])
            bounds = scan.bounds(rescored.kth_scores)
            top = TopK(
                item_indices=rescored.item_indices,
                scores=rescored.scores,
                certificates=certificates(bounds, rescored.kth_scores),
                passes=(Pass("first_stage", scan.seconds, self.every_item(queries)), *rescored.passes),
            )
            return top, np.flatnonzero(np.isnan(rescored.kth_scores) & (bounds != -np.inf))

        top, short = self.passes.run(queries, allowed, *self._steps(k, depths), answer)
        more = self.deeper(depths, k)
        if more is None:
            return top
        return asked_again(
            top, short, queries, allowed, lambda queries, allowed: self._search(queries, k, allowed, more)
        )


def certificates(bounds: Scores, kth_scores: Scores) -> tuple[Certificate, ...]:
    """Certificates from bounds on omitted items and K-th scores (B,); NaN means none."""
    return tuple(
        certificate(bound=None if math.isnan(bound) else bound, kth_score=None if math.isnan(kth_score) else kth_score)
        for bound, kth_score in zip(bounds.tolist(), kth_scores.tolist(), strict=True)
    )


def check_pool_size(name: str, value: int) -> None:
    """Raise ValueError unless the size is at least 1."""
    if value < 1:
        raise ValueError(f"{name}={value} allowed: at least 1")
