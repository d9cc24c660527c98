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
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.indexes.gate_bounds import GateBounds
from services.algorithms.indexes.gpu.answer import DeviceAnswer, exact_answer
from services.algorithms.indexes.gpu.averages import Averages
from services.algorithms.indexes.gpu.graphs import CapturedCalls
from services.algorithms.indexes.pools import certificates, check_pool_size
from services.algorithms.indexes.protocol import (
    Indices,
    Mask,
    Pass,
    Pool,
    Scores,
    TopK,
    asked_again,
    check_request,
    check_tie_ranks,
    empty_answer,
)
from services.algorithms.ops.grouped_top_k.device import DeviceBest, best_of_groups
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.device import DeviceQueries, DeviceScorer
from services.algorithms.states import ItemStates, PairGate, QueryStates


@dataclass(frozen=True, slots=True)
class _Request:
    """B queries as given and as prepared on the device, and the mask (1 or B, X) uint8 of what they allow."""

    queries: QueryStates
    prepared: DeviceQueries
    mask: torch.Tensor | None


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
        """Prepare X items on `device`, or share a DeviceScorer; `tie_ranks` (X,) is each item's position in id order.

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
        self._host_ranks = np.empty_like(order)
        self._host_ranks[order] = np.arange(len(order))
        self._ranks = torch.from_numpy(self._host_ranks).to(self.scorer.device)
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
        with self._lock:
            return self._search(queries, k, allowed, self.pool_size)

    def _search(self, queries: QueryStates, k: int, allowed: Mask | None, size: int) -> TopK:
        """With pools of `size` per list, and of k for the queries whose pool has fewer than k items."""
        started = time.perf_counter()
        request = self._request(queries, k, allowed)
        found = self._found(request.prepared, request.mask, size, k)
        kth_scores = found.answer.kth_scores.cpu().numpy()
        bounds = self._bounds(request, found.pool, kth_scores)
        rows, scores = found.answer.rows.cpu().numpy(), found.answer.scores.cpu().numpy()
        evaluated = found.answer.evaluated.cpu().numpy().astype(np.int64)
        scored = self._everything(queries)
        if found.pool.rows is not None:
            scored = (found.pool.rows >= 0).sum(dim=1).cpu().numpy()
        seconds = time.perf_counter() - started
        passes = [Pass("full", seconds, scored), Pass("float64", 0.0, evaluated)]
        if found.pool.rows is not None:
            passes = [Pass("first_stage", seconds, self._everything(queries)), Pass("full", 0.0, scored), passes[1]]
        answer = TopK(
            item_indices=rows,
            scores=scores,
            certificates=certificates(bounds, np.where(kth_scores == -np.inf, np.nan, kth_scores)),
            passes=tuple(passes),
        )
        short = np.flatnonzero((kth_scores == -np.inf) & (bounds != -np.inf))
        if size >= k:  # k per list are enough for anybody
            return answer
        return asked_again(
            answer, short, queries, allowed, lambda queries, allowed: self._search(queries, k, allowed, k)
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
        self, prepared: DeviceQueries, *, mask: torch.Tensor | None, size: int, k: int, capacity: int, plain: bool
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
    def _bounds(self, request: _Request, pool: _DevicePool, kth_scores: Scores) -> Scores:
        """No allowed item outside the pool has s above this: (B,); -inf: nothing left out; NaN: no proof."""

    def _request(self, queries: QueryStates, k: int, allowed: Mask | None) -> _Request:
        """Check a request and put it on the device. Raises as `Index.search`."""
        check_request(k=k, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        mask = None
        if allowed is not None:
            mask = torch.from_numpy(np.atleast_2d(allowed).view(np.uint8).copy()).to(self.scorer.device)
        return _Request(queries, self.scorer.prepare(queries), mask)

    def _everything(self, queries: QueryStates) -> Indices:
        return np.full(len(queries), self.num_items, dtype=np.int64)


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
        overflowed = torch.zeros((), dtype=torch.bool, device=self.scorer.device)
        return _DevicePool(rows=None, evidence=(), overflowed=overflowed)

    def _bounds(self, request: _Request, pool: _DevicePool, kth_scores: Scores) -> Scores:
        return np.full(len(request.queries), -np.inf)


class DeviceTopKAvg(DeviceIndex):
    """The N best by averaged components, reordered by s. Certificate: the radius bound, as `TopKAvg`'s."""

    name = "top_k_avg"

    def __init__(self, *items: Any, pool_size: int, **options: Any) -> None:
        """As `DeviceIndex`; `pool_size` is N, raised to k where a search asks for more."""
        check_pool_size("pool_size", pool_size)
        super().__init__(*items, **options)
        self.pool_size = pool_size
        self._averages = Averages(self.scorer)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._averages.nbytes

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best by averaged components, scored by that average, and the bound on the rest."""
        started = time.perf_counter()
        with self._lock:
            request = self._request(queries, size, allowed)
            pool = self._pool(request.prepared, request.mask, size, False)
            if bool(pool.overflowed):
                pool = self._pool(request.prepared, request.mask, size, True)
            assert pool.rows is not None
            bounds = self._bounds(request, pool, np.full(len(queries), -np.inf))
            rows = pool.rows.cpu().numpy()
            scores = pool.evidence[2].double().cpu().numpy()
        first = Pass("first_stage", time.perf_counter() - started, self._everything(queries))
        return Pool(item_indices=rows, scores=scores, bounds=bounds, passes=(first,))

    def _least_pool(self, k: int) -> int:
        return k

    def _pool(self, prepared: DeviceQueries, mask: torch.Tensor | None, size: int, plain: bool) -> _DevicePool:
        rows, scores, left_out, witnessed, overflowed = self._averages.best(
            prepared, self._ranks, self._row_of_rank, size, mask, plain=plain
        )
        return _DevicePool(rows=rows, evidence=(left_out, witnessed, scores), overflowed=overflowed)

    def _bounds(self, request: _Request, pool: _DevicePool, kth_scores: Scores) -> Scores:
        assert pool.rows is not None
        left_out, witnessed = (values.double().cpu().numpy() for values in pool.evidence[:2])
        return self._averages.bounds(
            request.queries, request.prepared, request.mask, pool.rows, left_out, witnessed, kth_scores
        )


class DeviceTopKPerEmbedding(DeviceIndex):
    """The union of the N best per component pair, reordered by s. Certificate: as `TopKPerEmbedding`'s."""

    name = "top_k_per_embedding"

    def __init__(self, *items: Any, pool_size: int, **options: Any) -> None:
        """As `DeviceIndex`; `pool_size` is N per pair, raised to k where a union has fewer than k items."""
        check_pool_size("pool_size", pool_size)
        super().__init__(*items, **options)
        self.pool_size = pool_size
        # Reads the magnitudes, gate range and pair gate alone, which both scorers have.
        self._gate_bounds = GateBounds(cast(MolScorer, self.scorer))

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` items with the best cosines, whichever pair's, scored by them; no other has s above the next."""
        started = time.perf_counter()
        with self._lock:
            request = self._request(queries, size, allowed)
            found = self._lists(request.prepared, request.mask, size + 1, False)
            if bool(found.overflowed):
                found = self._lists(request.prepared, request.mask, size + 1, True)
            all_rows = found.rows.flatten(1).cpu().numpy()
            all_cosines = found.scores.flatten(1).double().cpu().numpy()
            error = self.scorer.cosine_errors(queries, request.prepared).max(axis=1, initial=0)
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
        found = self._lists(prepared, mask, size, plain)
        rows = _each_once(found.rows.flatten(1))
        return _DevicePool(rows=rows, evidence=(found.following.flatten(1),), overflowed=found.overflowed)

    def _lists(self, prepared: DeviceQueries, mask: torch.Tensor | None, size: int, plain: bool) -> DeviceBest:
        """The `size` best of each pair, by the kernels where half precision holds the vectors."""
        items, components, fused = self.scorer.components, prepared.components, False
        if prepared.half_fits and self.scorer.half is not None:
            items, components, fused = self.scorer.half, prepared.half, True
        return best_of_groups(items, components, self._ranks, self._row_of_rank, size, mask, fused=fused, plain=plain)

    def _bounds(self, request: _Request, pool: _DevicePool, kth_scores: Scores) -> Scores:
        errors = self.scorer.cosine_errors(request.queries, request.prepared)
        return self._gate_bounds.upper_bounds(request.queries, pool.evidence[0].double().cpu().numpy() + errors)


class DeviceCombinedTopK(DeviceTopKPerEmbedding):
    """The union of TopKPerEmbedding(N1)'s and TopKAvg(N2)'s pools. Certificate: the pairs' bound."""

    name = "combined_top_k"

    def __init__(self, *items: Any, pair_pool_size: int, average_pool_size: int, **options: Any) -> None:
        """As `DeviceIndex`; `pair_pool_size` is N1 per pair, `average_pool_size` N2, raised to k."""
        check_pool_size("pair_pool_size", pair_pool_size)
        check_pool_size("average_pool_size", average_pool_size)
        super().__init__(*items, pool_size=pair_pool_size, **options)
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


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
