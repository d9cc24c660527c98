"""The retrieval algorithms with their states on a torch device: NumPy in, NumPy out, the same certificates.

On a CUDA card scores and first stages run in the kernels of `ops/`, in half precision with a certified error and
float64 for what lies within it, and small batches replay CUDA graphs; with device "cpu" the same steps run on plain
PyTorch, which is how they are tested where there is no card. One `DeviceScorer` can serve several algorithms.

DeviceBruteForce is also the exact mode of a card: its pass over everything costs what bounds would (see
docs/decisions/010-gpu.md). The passes of an answer are not timed apart, as one graph runs them all: the first holds
the time, the others say what they touched.

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d width, K results, N pool size.
"""

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.indexes.gate_bounds import GateBounds
from services.algorithms.indexes.gpu.answer import DeviceAnswer, exact_answer
from services.algorithms.indexes.gpu.averages import Averages
from services.algorithms.indexes.gpu.graphs import CapturedCalls
from services.algorithms.indexes.pools import check_pool_size
from services.algorithms.indexes.protocol import (
    EXACT,
    Certificate,
    Indices,
    Mask,
    Pass,
    Pool,
    Scores,
    TopK,
    certificate,
    check_request,
    check_tie_ranks,
    empty_answer,
)
from services.algorithms.ops.grouped_top_k.device import best_of_groups
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.device import DeviceQueries, DeviceScorer
from services.algorithms.states import ItemStates, PairGate, QueryStates


@dataclass(frozen=True, kw_only=True, slots=True)
class _DevicePool:
    """Pools of B queries on the device: rows (B, n), -1 for none and each at most once, or None for every item.

    `evidence` is what the bound on left-out items follows from; `overflowed`: void, ask with `plain=True`.
    """

    rows: torch.Tensor | None
    evidence: tuple[torch.Tensor, ...]
    overflowed: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    pool: _DevicePool
    answer: DeviceAnswer


class DeviceIndex(ABC):
    """What the algorithms share: states on a device, searches under one lock, more room where a search needs it."""

    name = ""
    pool_size = 0

    def __init__(
        self,
        items: ItemStates | DeviceScorer,
        pair_gate: PairGate | None = None,
        *,
        device: torch.device | str = "cuda",
        tie_ranks: npt.NDArray[np.integer] | None = None,
        max_graphs: int = 8,
    ) -> None:
        """Prepare X items on `device`, or share a DeviceScorer; `tie_ranks` (X,) is each item's place in id order.

        `max_graphs` bounds the CUDA graphs kept, one per batch size and K in use. Raises: ValueError for an empty
        index or shapes that disagree.
        """
        if isinstance(items, DeviceScorer):
            self.scorer = items
        else:
            self.scorer = DeviceScorer(items, pair_gate, device=torch.device(device))
        ranks = check_tie_ranks(tie_ranks, self.scorer.num_items)
        # Ranks as a permutation 0..X-1, whatever distinct numbers they were.
        order = np.argsort(ranks)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._host_ranks = places
        self._ranks = torch.from_numpy(places).to(self.scorer.device)
        self._row_of_rank = torch.from_numpy(order).to(self.scorer.device)
        self._lock = threading.Lock()
        self._graphs: CapturedCalls[_Found] = CapturedCalls(max_graphs=max_graphs)
        self._capacities: dict[int, int] = {}

    @property
    def num_items(self) -> int:
        return self.scorer.num_items

    @property
    def nbytes(self) -> int:
        """Bytes on the device for the items."""
        return self.scorer.nbytes + 2 * 8 * self.num_items

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """See `Index.search`."""
        check_request(k=k, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        self.scorer.check(queries)
        started = time.perf_counter()
        with self._lock:
            prepared = self.scorer.prepare(queries)
            mask = self._mask(allowed)
            size = self.pool_size
            found = self._found(prepared, mask, size, k)
            kth_scores = found.answer.kth_scores.cpu().numpy()
            bounds = self._bounds(queries, prepared, mask, found.pool, kth_scores)
            if size < k and bool(((kth_scores == -np.inf) & (bounds != -np.inf)).any()):
                # A union of fewer than k items with others left out: k per list are enough for anybody.
                found = self._found(prepared, mask, k, k)
                kth_scores = found.answer.kth_scores.cpu().numpy()
                bounds = self._bounds(queries, prepared, mask, found.pool, kth_scores)
            rows, scores = found.answer.rows.cpu().numpy(), found.answer.scores.cpu().numpy()
            evaluated = found.answer.evaluated.cpu().numpy().astype(np.int64)
            scored = self._everything(queries)
            if found.pool.rows is not None:
                scored = (found.pool.rows >= 0).sum(dim=1).cpu().numpy()
        passes = [Pass("full", time.perf_counter() - started, scored), Pass("float64", 0.0, evaluated)]
        if found.pool.rows is not None:
            passes = [Pass("first_stage", passes[0].seconds, self._everything(queries)), Pass("full", 0.0, scored)]
            passes.append(Pass("float64", 0.0, evaluated))
        return TopK(
            item_indices=rows,
            scores=scores,
            certificates=tuple(_certificate(bound, kth) for bound, kth in zip(bounds, kth_scores, strict=True)),
            passes=tuple(passes),
        )

    def device_search(self, queries: DeviceQueries, k: int) -> DeviceAnswer:
        """The device's part of an unfiltered search alone, as a benchmark times it: valid until the next call."""
        return self._found(queries, None, self.pool_size, k).answer

    def _found(self, prepared: DeviceQueries, mask: torch.Tensor | None, size: int, k: int) -> _Found:
        """Search, again with more room or without the fast path where the device reports that it was needed."""
        plain = False
        # About twice the answer is within the error on fitted states; what a catalogue really needs is remembered.
        capacity = self._capacities.get(k, min(_power_of_two(4 * k), self.num_items))
        while True:
            function = partial(self._on_device, mask=mask, size=size, k=k, capacity=capacity, plain=plain)
            if mask is None:
                found = self._graphs((size, k, capacity, plain), prepared, function)
            else:
                found = function(prepared)
            needed = int(found.answer.evaluated.max()) if len(prepared) else 0
            if not plain and bool(found.pool.overflowed):
                plain = True
            elif needed > capacity:
                capacity = min(_power_of_two(needed), self.num_items)
                self._capacities[k] = capacity
            else:
                return found

    def _on_device(
        self,
        prepared: DeviceQueries,
        *,
        mask: torch.Tensor | None,
        size: int,
        k: int,
        capacity: int,
        plain: bool,
    ) -> _Found:
        pool = self._pool(prepared, mask, max(size, self._least_pool(k)), plain)
        answer = exact_answer(self.scorer, prepared, self._ranks, pool.rows, mask, k=k, capacity=capacity)
        return _Found(pool=pool, answer=answer)

    @abstractmethod
    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """See `Index.first_stage`."""

    def _least_pool(self, k: int) -> int:
        """The least N that an answer of `k` items asks for from the start."""
        return 1

    @abstractmethod
    def _pool(self, prepared: DeviceQueries, mask: torch.Tensor | None, size: int, plain: bool) -> _DevicePool:
        """First-stage pools, without waiting for the device."""

    @abstractmethod
    def _bounds(
        self,
        queries: QueryStates,
        prepared: DeviceQueries,
        mask: torch.Tensor | None,
        pool: _DevicePool,
        kth_scores: Scores,
    ) -> Scores:
        """No allowed item outside the pool has s above this: (B,); -inf: nothing left out; NaN: no proof."""

    def _mask(self, allowed: Mask | None) -> torch.Tensor | None:
        if allowed is None:
            return None
        return torch.from_numpy(np.atleast_2d(allowed).view(np.uint8).copy()).to(self.scorer.device)

    def _everything(self, queries: QueryStates) -> Indices:
        return np.full(len(queries), self.num_items, dtype=np.int64)

    def _vectors(self, prepared: DeviceQueries) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Item and query components as first stages read them, and whether kernels take them."""
        if prepared.half_fits and self.scorer.half is not None:
            return self.scorer.half, prepared.half, True
        return self.scorer.components, prepared.components, False


class DeviceBruteForce(DeviceIndex):
    """Scores every allowed item. Certificate: always exact."""

    name = "brute_force"

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The exact top `size`; nothing left out scores above its last."""
        answer = self.search(queries, size, allowed)
        bounds = answer.scores[:, -1].copy() if size < self.num_items else np.full(len(queries), -np.inf)
        # Scores that float64 cannot tell apart were made equal to the largest: what was left out is not above it.
        error = self.scorer.prepare(queries).double_error.cpu().numpy()
        bounds = np.where(bounds > -np.inf, bounds + 2 * error, -np.inf)
        return Pool(item_indices=answer.item_indices, scores=answer.scores, bounds=bounds, passes=answer.passes)

    def _pool(self, prepared: DeviceQueries, mask: torch.Tensor | None, size: int, plain: bool) -> _DevicePool:
        return _DevicePool(rows=None, evidence=(), overflowed=_no(self.scorer))

    def _bounds(
        self,
        queries: QueryStates,
        prepared: DeviceQueries,
        mask: torch.Tensor | None,
        pool: _DevicePool,
        kth_scores: Scores,
    ) -> Scores:
        return np.full(len(queries), -np.inf)


class DeviceTopKAvg(DeviceIndex):
    """The N best by averaged components, reordered by s. Certificate: the radius bound, as `TopKAvg`'s."""

    name = "top_k_avg"

    def __init__(
        self,
        items: ItemStates | DeviceScorer,
        pair_gate: PairGate | None = None,
        *,
        pool_size: int,
        device: torch.device | str = "cuda",
        tie_ranks: npt.NDArray[np.integer] | None = None,
        max_graphs: int = 8,
    ) -> None:
        """As `DeviceIndex`; `pool_size` is N, raised to k where a search asks for more."""
        check_pool_size("pool_size", pool_size)
        super().__init__(items, pair_gate, device=device, tie_ranks=tie_ranks, max_graphs=max_graphs)
        self.pool_size = pool_size
        self._averages = Averages(self.scorer)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._averages.nbytes

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best by averaged components, scored by that average, and the bound on the rest."""
        check_request(k=size, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        self.scorer.check(queries)
        started = time.perf_counter()
        with self._lock:
            prepared, mask = self.scorer.prepare(queries), self._mask(allowed)
            pool = self._pool(prepared, mask, size, False)
            if bool(pool.overflowed):
                pool = self._pool(prepared, mask, size, True)
            assert pool.rows is not None
            bounds = self._bounds(queries, prepared, mask, pool, np.full(len(queries), -np.inf))
            rows = pool.rows.cpu().numpy()
            scores = pool.evidence[2].double().cpu().numpy()
        first = Pass("first_stage", time.perf_counter() - started, self._everything(queries))
        return Pool(item_indices=rows, scores=scores, bounds=bounds, passes=(first,))

    def _least_pool(self, k: int) -> int:
        return k

    def _pool(self, prepared: DeviceQueries, mask: torch.Tensor | None, size: int, plain: bool) -> _DevicePool:
        rows, scores, *evidence, overflowed = self._averages.best(
            prepared, self._ranks, self._row_of_rank, size, mask, plain=plain
        )
        left_out, witnessed = evidence
        return _DevicePool(rows=rows, evidence=(left_out, witnessed, scores), overflowed=overflowed)

    def _bounds(
        self,
        queries: QueryStates,
        prepared: DeviceQueries,
        mask: torch.Tensor | None,
        pool: _DevicePool,
        kth_scores: Scores,
    ) -> Scores:
        assert pool.rows is not None
        left_out, witnessed = (pool.evidence[place].double().cpu().numpy() for place in (0, 1))
        return self._averages.bounds(queries, prepared, mask, pool.rows, left_out, witnessed, kth_scores)


class DeviceTopKPerEmbedding(DeviceIndex):
    """The union of the N best per component pair, reordered by s. Certificate: as `TopKPerEmbedding`'s."""

    name = "top_k_per_embedding"

    def __init__(
        self,
        items: ItemStates | DeviceScorer,
        pair_gate: PairGate | None = None,
        *,
        pool_size: int,
        device: torch.device | str = "cuda",
        tie_ranks: npt.NDArray[np.integer] | None = None,
        max_graphs: int = 8,
    ) -> None:
        """As `DeviceIndex`; `pool_size` is N per pair, raised to k where a union has fewer than k items."""
        check_pool_size("pool_size", pool_size)
        super().__init__(items, pair_gate, device=device, tie_ranks=tie_ranks, max_graphs=max_graphs)
        self.pool_size = pool_size
        # Reads the magnitudes, gate range and pair gate alone, which both scorers have.
        self._gate_bounds = GateBounds(cast(MolScorer, self.scorer))

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` items with the best cosines, whichever pair's, scored by them; no other has s above the next."""
        check_request(k=size, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        self.scorer.check(queries)
        started = time.perf_counter()
        with self._lock:
            prepared, mask = self.scorer.prepare(queries), self._mask(allowed)
            vectors = self._vectors(prepared)
            found = best_of_groups(
                *vectors[:2], self._ranks, self._row_of_rank, size + 1, mask, fused=vectors[2], plain=False
            )
            if bool(found.overflowed):
                found = best_of_groups(
                    *vectors[:2], self._ranks, self._row_of_rank, size + 1, mask, fused=False, plain=True
                )
            all_rows = found.rows.flatten(1).cpu().numpy()
            all_cosines = found.scores.flatten(1).double().cpu().numpy()
            error = self.scorer.cosine_errors(queries, prepared).max(axis=1, initial=0)
        item_indices, scores = empty_answer(len(queries), min(size, self.num_items))
        bounds = np.full(len(queries), -np.inf)
        for query, (rows, cosines) in enumerate(zip(all_rows, all_cosines, strict=True)):
            order = np.lexsort((self._host_ranks[rows], -cosines))
            order = order[rows[order] >= 0]
            _, first = np.unique(rows[order], return_index=True)
            order = order[np.sort(first)]  # the best cosine of each row, in order
            if len(order) > size:
                bounds[query] = cosines[order[size]] + error[query]
            order = order[:size]
            item_indices[query, : len(order)], scores[query, : len(order)] = rows[order], cosines[order]
        first_pass = Pass("first_stage", time.perf_counter() - started, self._everything(queries))
        return Pool(item_indices=item_indices, scores=scores, bounds=bounds, passes=(first_pass,))

    def _pool(self, prepared: DeviceQueries, mask: torch.Tensor | None, size: int, plain: bool) -> _DevicePool:
        items, components, fused = self._vectors(prepared)
        found = best_of_groups(items, components, self._ranks, self._row_of_rank, size, mask, fused=fused, plain=plain)
        rows = _each_once(found.rows.flatten(1))
        return _DevicePool(rows=rows, evidence=(found.following.flatten(1),), overflowed=found.overflowed)

    def _bounds(
        self,
        queries: QueryStates,
        prepared: DeviceQueries,
        mask: torch.Tensor | None,
        pool: _DevicePool,
        kth_scores: Scores,
    ) -> Scores:
        thresholds = pool.evidence[0].double().cpu().numpy()
        return self._gate_bounds.upper_bounds(queries, thresholds + self.scorer.cosine_errors(queries, prepared))


class DeviceCombinedTopK(DeviceTopKPerEmbedding):
    """The union of TopKPerEmbedding(N1)'s and TopKAvg(N2)'s pools. Certificate: the pairs' bound."""

    name = "combined_top_k"

    def __init__(
        self,
        items: ItemStates | DeviceScorer,
        pair_gate: PairGate | None = None,
        *,
        pair_pool_size: int,
        average_pool_size: int,
        device: torch.device | str = "cuda",
        tie_ranks: npt.NDArray[np.integer] | None = None,
        max_graphs: int = 8,
    ) -> None:
        """As `DeviceIndex`; `pair_pool_size` is N1 per pair, `average_pool_size` N2, raised to k."""
        check_pool_size("pair_pool_size", pair_pool_size)
        check_pool_size("average_pool_size", average_pool_size)
        super().__init__(
            items, pair_gate, pool_size=pair_pool_size, device=device, tie_ranks=tie_ranks, max_graphs=max_graphs
        )
        self.average_pool_size = average_pool_size
        self._averages = Averages(self.scorer)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._averages.nbytes

    def _pool(self, prepared: DeviceQueries, mask: torch.Tensor | None, size: int, plain: bool) -> _DevicePool:
        pairs = super()._pool(prepared, mask, size, plain)
        averaged, *_, overflowed = self._averages.best(
            prepared, self._ranks, self._row_of_rank, max(size, self.average_pool_size), mask, plain=plain
        )
        assert pairs.rows is not None
        rows = _each_once(torch.cat([pairs.rows, averaged], dim=1))
        return _DevicePool(rows=rows, evidence=pairs.evidence, overflowed=pairs.overflowed | overflowed)


def _each_once(rows: torch.Tensor) -> torch.Tensor:
    """Rows (B, n) with every repetition replaced by -1."""
    ordered = torch.sort(rows, dim=1).values
    ordered[:, 1:].masked_fill_(ordered[:, 1:] == ordered[:, :-1].clone(), -1)
    return ordered


def _no(scorer: DeviceScorer) -> torch.Tensor:
    return torch.zeros((), dtype=torch.bool, device=scorer.device)


def _certificate(bound: float, kth_score: float) -> Certificate:
    if bound == -np.inf:
        return EXACT
    return certificate(
        bound=None if np.isnan(bound) else float(bound),
        kth_score=None if kth_score == -np.inf else float(kth_score),
    )


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
