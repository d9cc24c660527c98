"""The passes over item states on a torch device (`passes.py`).

On a CUDA card, the kernels of `ops/` score in half precision with a certified error. Items whose order this error
leaves open are scored in float64. Small batches replay CUDA graphs. Device "cpu" runs plain PyTorch, for tests.

Letters: B queries, X items, d component width, K results.
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.indexes.passes import Answer, Found, Lists
from services.algorithms.indexes.protocol import Indices, Mask, Pass, Pool, Scores
from services.algorithms.indexes.rescoring import Rescored
from services.algorithms.ops.grouped_top_k.device import best_of_groups
from services.algorithms.ops.mol_scores.device import DeviceAnswer, DeviceQueries, DeviceScorer, exact_answer
from services.algorithms.ops.mol_scores.graphs import CapturedCalls
from services.algorithms.scoring.states import FloatArray, QueryStates


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRequest:
    """B queries, their prepared form on the device, and the mask of their allowed items: (1 or B, X) uint8.

    plain: build lists without the fast path. capacity: how many items float64 can score, 0 for the default.
    overflowed: for each use of the fast path, whether it lost items. evaluated: needed and available capacity.
    """

    queries: QueryStates
    prepared: DeviceQueries
    allowed: Mask | None
    mask: torch.Tensor | None
    started: float
    plain: bool = False
    capacity: int = 0
    overflowed: list[torch.Tensor] = field(default_factory=list)
    evaluated: list[tuple[torch.Tensor, int]] = field(default_factory=list)


class CardPasses:
    """X items on a torch device, searched under one lock. See `Passes`."""

    def __init__(self, scorer: DeviceScorer, *, max_graphs: int = 16) -> None:
        """max_graphs: limit of cached CUDA graphs, one per algorithm, batch size and K; 0 disables them."""
        self.scorer = scorer
        self._lock = threading.Lock()
        self._graphs: CapturedCalls[Any] = CapturedCalls(max_graphs=max_graphs)
        self._capacities: dict[Hashable, int] = {}

    @property
    def num_items(self) -> int:
        return self.scorer.num_items

    @property
    def nbytes(self) -> int:
        return self.scorer.nbytes

    def run(
        self,
        queries: QueryStates,
        allowed: Mask | None,
        key: Hashable,
        steps: Callable[[CardRequest], Found],
        then: Callable[[CardRequest, Found], Answer],
    ) -> Answer:
        with self._lock:
            request = self._request(queries, allowed)
            return then(request, self._found(request, key, steps))

    def on_device(
        self, queries: QueryStates, prepared: DeviceQueries, key: Hashable, steps: Callable[[CardRequest], Found]
    ) -> Found:
        """Run the device's part of an unfiltered search, for timing. The result is valid until the next call."""
        request = CardRequest(queries=queries, prepared=prepared, allowed=None, mask=None, started=0.0)
        return self._found(request, key, steps)

    def _request(self, queries: QueryStates, allowed: Mask | None) -> CardRequest:
        started, mask = time.perf_counter(), None
        if allowed is not None:
            mask = torch.from_numpy(np.atleast_2d(allowed).view(np.uint8).copy()).to(self.scorer.device)
        prepared = self.scorer.prepare(queries)
        return CardRequest(queries=queries, prepared=prepared, allowed=allowed, mask=mask, started=started)

    def _found(self, request: CardRequest, key: Hashable, steps: Callable[[CardRequest], Found]) -> Found:
        """Run steps; repeat with more capacity or without the fast path if the device reports the need."""
        request = replace(request, capacity=self._capacities.get(key, 0))
        while True:
            once = partial(_once, request, steps)
            if key is None or request.mask is not None:
                asked, found, reported = once(request.prepared)
            else:
                asked, found, reported = self._graphs((key, request.capacity, request.plain), request.prepared, once)
            counts = reported.tolist()  # waits for the device, once
            if not request.plain and any(counts[: len(asked.overflowed)]):
                request = replace(request, plain=True)
                continue
            rooms = [room for _, room in asked.evaluated]
            short = [most for most, room in zip(counts[len(asked.overflowed) :], rooms, strict=True) if most > room]
            if not short:
                return found
            self._capacities[key] = capacity = min(_power_of_two(max(short)), self.num_items)
            request = replace(request, capacity=capacity)

    def pairs(self, request: CardRequest, size: int) -> Lists:
        prepared = request.prepared
        if prepared.half_fits and self.scorer.half is not None:
            return self.lists(request, self.scorer.half, prepared.half, size)
        return self.lists(request, self.scorer.components, prepared.components, size)

    def cosine_errors(self, request: CardRequest) -> Scores:
        return self.scorer.cosine_errors(request.queries, request.prepared)

    def round_means(self, means: npt.NDArray[np.float64]) -> FloatArray:
        half = self.scorer.half
        dtype = torch.float32 if half is None else half.dtype
        return np.asarray(torch.from_numpy(means).to(dtype).float().numpy())

    def means(self, vectors: FloatArray) -> "_CardMeans":
        return _CardMeans(self, vectors)

    def lists(self, request: CardRequest, items: torch.Tensor, vectors: torch.Tensor, size: int) -> Lists:
        """The best items by vectors (B, Q, d), as lists (B, L)."""
        fused = request.prepared.half_fits
        found = best_of_groups(items, vectors, size, request.mask, fused=fused, plain=request.plain)
        request.overflowed.append(found.overflowed)
        rows, scores, following = found.rows.flatten(1, 2), found.scores.flatten(1, 2), found.following.flatten(1)
        return Lists(rows=rows, scores=scores, following=following, seconds=0.0)

    def pool(self, request: CardRequest, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(rows) == 1 and rows[0].shape[1] == 1:
            return rows[0][:, 0]
        ordered = torch.sort(torch.cat([lists.flatten(1) for lists in rows], dim=1), dim=1).values
        ordered[:, 1:].masked_fill_(ordered[:, 1:] == ordered[:, :-1].clone(), -1)
        return ordered

    def top_k(
        self, request: CardRequest, pool: torch.Tensor | None, k: int
    ) -> tuple[DeviceAnswer, torch.Tensor | None]:
        # On trained states, about 2 k items are within the error of the K-th.
        capacity = request.capacity or min(_power_of_two(4 * k), self.num_items)
        prepared, mask = request.prepared, request.mask
        answer = exact_answer(self.scorer, prepared, pool, mask, k=k, capacity=capacity)
        request.evaluated.append((answer.evaluated, capacity))
        return answer, None if pool is None else (pool >= 0).sum(dim=1)

    def best_of_all(self, queries: QueryStates, size: int, allowed: Mask | None) -> Pool:
        """Use exact scores, because the fast pass has only bounds."""
        key = ("best of all", size)
        top = self.run(queries, allowed, key, lambda request: self.top_k(request, None, size), self.rescored)
        # Scores that float64 cannot distinguish were set to the largest of them, so the last score bounds the omitted
        # scores.
        bounds = top.scores[:, -1] + 2 * self.scorer.error_bounds_float64(queries)
        if size >= self.num_items:
            bounds = np.full(len(queries), -np.inf)
        return Pool(item_indices=top.item_indices, scores=top.scores, bounds=bounds, passes=top.passes)

    def rescored(self, request: CardRequest, found: tuple[DeviceAnswer, torch.Tensor | None]) -> Rescored:
        """The pass "full" gets the whole time, because one graph runs all passes."""
        answer, pool = found
        kth_scores = self.fetch(answer.kth_scores)
        scored = np.full(len(kth_scores), self.num_items, dtype=np.int64) if pool is None else self.fetch(pool)
        rows, scores, evaluated = map(self.fetch, (answer.rows, answer.scores, answer.evaluated))
        seconds = time.perf_counter() - request.started
        return Rescored(
            item_indices=rows,
            scores=scores,
            kth_scores=np.where(kth_scores == -np.inf, np.nan, kth_scores),
            passes=(Pass("full", seconds, scored), Pass("float64", 0.0, evaluated.astype(np.int64))),
        )

    def fetch(self, array: torch.Tensor) -> npt.NDArray[Any]:
        return np.asarray(array.cpu().numpy())


class _CardMeans:
    """Means (X, 1, d), in half precision if the scorer uses it, and radii (X,)."""

    unit = 2.0**-22  # error per term of a truncating float32 sum, see mol_scores/kernel_error.py

    def __init__(self, passes: CardPasses, vectors: FloatArray) -> None:
        half = passes.scorer.half
        self._passes = passes
        self._means = torch.from_numpy(vectors[..., :-1].copy()).to(passes.scorer.device)
        self._means = self._means if half is None else self._means.to(half.dtype)
        self._radii = torch.from_numpy(vectors[:, 0, -1].copy()).to(passes.scorer.device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._means, self._radii))

    def best(self, request: CardRequest, size: int) -> Lists:
        items = self._means if request.prepared.half_fits else self._means.float()
        return self._passes.lists(request, items, self._average(request)[:, None], size)

    def average(self, request: CardRequest) -> Scores:
        return self._passes.fetch(self._average(request).double())

    def _average(self, request: CardRequest) -> torch.Tensor:
        means = request.prepared.components.double().mean(dim=1)
        return means.to(self._means.dtype if request.prepared.half_fits else torch.float32)

    def at(self, rows: Indices) -> tuple[FloatArray, FloatArray]:
        chosen = torch.from_numpy(rows).to(self._radii.device)
        return self._passes.fetch(self._means[chosen, 0].float()), self._passes.fetch(self._radii[chosen])

    def largest(self, vectors: FloatArray, allowed: Mask) -> Scores:
        device, passes = self._radii.device, self._passes
        items = torch.cat([self._means.float(), self._radii[:, None, None]], dim=2)
        queries = torch.from_numpy(vectors).to(device)
        mask = torch.from_numpy(allowed.view(np.uint8)).to(device)
        best = best_of_groups(items, queries, 1, mask, fused=False)
        return passes.fetch(best.scores[:, :, 0, 0].amax(dim=1).double())


def _once(
    request: CardRequest, steps: Callable[[CardRequest], Found], prepared: DeviceQueries
) -> tuple[CardRequest, Found, torch.Tensor]:
    """Run steps. Return the request and the device's report: overflowed lists, then needed capacities."""
    asked = replace(request, prepared=prepared, overflowed=[], evaluated=[])
    found = steps(asked)
    most = [needed.amax() if len(needed) else needed.new_zeros(()) for needed, _ in asked.evaluated]
    return asked, found, torch.stack([report.long() for report in (*asked.overflowed, *most)])


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
