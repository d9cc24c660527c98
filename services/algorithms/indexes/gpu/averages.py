"""TopKAvg's first stage on a device: averaged components, the best by them, and how far the others may reach.

As in `top_k_avg.py`: with an item's mean g-bar and radius rho = max_p ||g_p - g-bar||, every cosine of a query's
component f_q is at most its reach <f_q, g-bar> + ||f_q|| rho, hence so is s. Bounds come in steps that mostly make
the next unnecessary: a few left-out items whose reach is as large as the norms allow (an estimate, nothing more to
know), the largest average left out plus how far components are from it (no scan), and a scan of every reach.

Letters: B queries, X items, P_q query components, d width, N pool size.
"""

import numpy as np
import torch

from services.algorithms.indexes.protocol import Scores
from services.algorithms.ops.grouped_top_k.device import best_of_groups
from services.algorithms.ops.mol_scores.device import DeviceQueries, DeviceScorer
from services.algorithms.states import QueryStates

_WITNESSES = 8
_CHUNK_ELEMENTS = 16 << 20
_ITEMS = 65_536
_SUM = 2.0**-22  # a float32 sum, truncating, per term: see mol_scores/kernel_error.py


class Averages:
    """Mean components (X, 1, d) and radii (X,) of a catalogue, measured from the means as stored."""

    def __init__(self, scorer: DeviceScorer) -> None:
        """Average the scorer's items, in its half precision where that is in use."""
        self._scorer = scorer
        dtype = torch.float32 if scorer.half is None else scorer.half.dtype
        self._means = torch.empty((scorer.num_items, 1, scorer.width), dtype=dtype, device=scorer.device)
        self._radii = torch.empty(scorer.num_items, device=scorer.device)
        self._largest_mean = 0.0
        for x in range(0, scorer.num_items, _ITEMS):
            exact = scorer.components[x : x + _ITEMS].double()
            means = exact.mean(dim=1, keepdim=True).to(dtype)
            radii = torch.linalg.vector_norm(exact - means.double(), dim=-1).amax(dim=1)
            self._means[x : x + _ITEMS] = means
            self._radii[x : x + _ITEMS] = (radii * (1 + 2.0**-22)).float()
            lengths = torch.linalg.vector_norm(means.double(), dim=-1)
            self._largest_mean = max(self._largest_mean, float(lengths.max()))
        self._largest_radius = float(self._radii.max())
        self._largest_norm = float(scorer.magnitudes.norms.max(initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._means, self._radii))

    def best(
        self,
        queries: DeviceQueries,
        ranks: torch.Tensor,
        row_of_rank: torch.Tensor,
        size: int,
        allowed: torch.Tensor | None,
        *,
        plain: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The `size` best: rows (B, N') and scores (B, N'); the best average left out and the largest reach among the
        next few (B,), -inf without any; whether to ask again with `plain`."""
        means = self._query_means(queries)[:, None]
        fused = queries.half_fits
        items = self._means if fused else self._means.float()
        found = best_of_groups(items, means, ranks, row_of_rank, size + _WITNESSES, allowed, fused=fused, plain=plain)
        rows, scores = found.rows[:, 0, 0], found.scores[:, 0, 0]
        size = min(size, self._scorer.num_items)
        beyond = rows[:, size:]
        left_out = scores[:, size] if scores.shape[1] > size else torch.full_like(scores[:, 0], -torch.inf)
        witnessed = torch.full_like(left_out, -torch.inf)
        if beyond.shape[1]:
            reach = self._reach(queries, beyond.clamp_min(0))
            witnessed = torch.where(beyond >= 0, reach, -torch.inf).amax(dim=1)
        return rows[:, :size], scores[:, :size], left_out, witnessed, found.overflowed

    def bounds(
        self,
        queries: QueryStates,
        prepared: DeviceQueries,
        allowed: torch.Tensor | None,
        pool: torch.Tensor,
        left_out: Scores,
        witnessed: Scores,
        kth_scores: Scores,
    ) -> Scores:
        """No allowed item outside `pool` (B, N) has s above this: (B,); -inf: nothing left out; NaN: no proof."""
        components = queries.components.astype(np.float64)
        norms = np.linalg.norm(components, axis=-1)
        largest = norms.max(axis=1, initial=0)
        stored = self._query_means(prepared).double().cpu().numpy()
        terms = (self._scorer.width + 8) * _SUM
        error = terms * largest * (self._largest_mean + self._largest_radius)
        apart = np.linalg.norm(components - stored[:, None, :], axis=-1).max(axis=1, initial=0)
        free = left_out + apart * self._largest_mean + largest * self._largest_radius
        free = free + 2 * error + terms * np.linalg.norm(stored, axis=1) * self._largest_mean
        trivial = largest * self._largest_norm
        bounds = np.where(free < trivial, free, np.nan)
        bounds[left_out == -np.inf] = -np.inf
        open_ = (left_out > -np.inf) & ~(free < kth_scores) & (witnessed + error < trivial)
        chosen = np.flatnonzero(open_)
        if len(chosen):
            reach = self._scanned(prepared, allowed, pool, chosen) + error[chosen]
            bounds[chosen] = np.where(reach < trivial[chosen], reach, np.nan)
        return np.asarray(bounds, dtype=np.float64)

    def _query_means(self, queries: DeviceQueries) -> torch.Tensor:
        """The queries' averaged components as the scan reads them: (B, d)."""
        means = queries.components.double().mean(dim=1)
        return means.to(self._means.dtype if queries.half_fits else torch.float32)

    def _reach(self, queries: DeviceQueries, rows: torch.Tensor) -> torch.Tensor:
        """The reach of items `rows` (B, n), as computed in float32: (B, n)."""
        dots = torch.einsum("bqd,bnd->bnq", queries.components, self._means[rows, 0].float())
        norms: torch.Tensor = torch.linalg.vector_norm(queries.components, dim=-1)
        reach = dots + norms[:, None, :] * self._radii[rows][:, :, None]
        return torch.amax(reach, dim=2)

    def _scanned(
        self, queries: DeviceQueries, allowed: torch.Tensor | None, pool: torch.Tensor, chosen: np.ndarray
    ) -> Scores:
        """The largest reach of allowed items outside the pools of queries `chosen` (n,): (n,)."""
        picked = torch.from_numpy(chosen).to(pool.device)
        components = queries.components[picked]
        norms = torch.linalg.vector_norm(components, dim=-1)
        outside = torch.ones((len(chosen), self._scorer.num_items + 1), dtype=torch.bool, device=pool.device)
        if allowed is not None:
            outside[:, :-1] = (allowed if len(allowed) == 1 else allowed[picked]).bool()
        # Row -1, no item, falls on the last column, which is cut off.
        outside.scatter_(1, torch.where(pool[picked] >= 0, pool[picked], self._scorer.num_items), False)
        best = torch.full((len(chosen),), -torch.inf, device=pool.device)
        step = max(1, _CHUNK_ELEMENTS // components[..., 0].numel())
        for x in range(0, self._scorer.num_items, step):
            dots = torch.einsum("bqd,xd->bqx", components, self._means[x : x + step, 0].float())
            reach = (dots + norms[:, :, None] * self._radii[x : x + step]).amax(dim=1)
            kept = outside[:, x : min(x + step, self._scorer.num_items)]
            best = torch.maximum(best, torch.where(kept, reach, -torch.inf).amax(dim=1))
        return np.asarray(best.double().cpu().numpy())
