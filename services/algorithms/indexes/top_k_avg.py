"""TopKAvg(N): full scores of the N best items by averaged components, which take one dot product per item.

Its certificate uses that phi's pairs are the outer product of components (arXiv:2407.15462, equation 2). With the
item's mean component g-bar and radius rho_x = max_p ||g_p - g-bar||, every pair's cosine is at most <f_pq, g-bar> +
||f_pq|| rho_x. So s is at most the item's *reach*, the largest of these over p_q. The reach is useful if an item's
components are close together. If the norms alone give as good a bound, the answer is an estimate.

The bound on omitted items is computed in steps, each of which usually makes the next unnecessary:

1. *Witnesses*: the reach of the few best items beyond the pool. If it reaches the bound by norms, the answer is an
estimate and no scan follows.
2. *Free*: <f_pq, g-bar> is at most the average score plus Delta ||g-bar|| with Delta = max ||f_pq - f-bar||, and an
omitted item's average score is at most the best omitted one. This needs no scan.
3. *Scan*: the largest reach outside the pool, by the same grouped scan. It costs P_q times the first pass.

Means are in bfloat16 if P_x > 1; radii are measured from the stored means, so the proof stays valid.

Letters: B queries, X items, P_q, P_x query and item components, d component width, N pool size. Cost: X d multiply-adds
per query, then full scores of N items; step 3 costs X P_q d. Memory: 2 (d + 1) more bytes per item, or 4 (d + 1) if P_x
= 1.
"""

import time

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.passes import Array, Lists, Passes, Request
from services.algorithms.indexes.pools import Depths, PooledIndex
from services.algorithms.indexes.protocol import Indices, Mask, Pass, Pool, Scores
from services.algorithms.scoring.states import FloatArray, QueryStates

_WITNESSES = 32  # items beyond the pool whose reach is computed first
# Floats of components converted to float64 at once: 1 MB stays in cache (109,739 x 4 x 768 floats in one
# step took 17 s).
_FLOATS_AT_ONCE = 1 << 17
_FAN = 17  # number of directions of (Delta, ||f||) with a precomputed maximum over all items


class TopKAvg(PooledIndex):
    """The N best items by averaged components, reordered by s. Certificate: a bound from the items' radii."""

    name = "top_k_avg"

    def _prepare(self) -> None:
        self._averages = _Averages(self.passes)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._averages.items.nbytes

    def depths(self, k: int) -> Depths:
        return (max(k, self.pool_size),)

    def lists(self, request: Request, depths: Depths) -> tuple[Lists, ...]:
        return (self._averages.items.best(request, min(depths[0], self.num_items) + _WITNESSES),)

    def listed(self, lists: tuple[Lists, ...], depths: Depths) -> tuple[Array, ...]:
        return (lists[0].rows[:, :, : depths[0]],)

    def scanned(self, request: Request, lists: tuple[Lists, ...], depths: Depths) -> "AverageScan":
        return AverageScan(self.passes, self._averages, request, lists[0], min(depths[0], self.num_items))

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best items by averaged components, and a bound on all others. A score is the mean over p_q of
        <f_pq, g-bar>.
        """
        self.check(queries, size, allowed)

        def cut(request: Request, lists: tuple[Lists, ...]) -> Pool:
            scan = self.scanned(request, lists, (size,))
            bounds = scan.bounds()
            rows, scores = (self.passes.fetch(array[:, 0, : scan.depth]) for array in (lists[0].rows, lists[0].scores))
            first = Pass("first_stage", scan.seconds, self.every_item(queries))
            return Pool(item_indices=rows.copy(), scores=scores.astype(np.float64), bounds=bounds, passes=(first,))

        key = (self, "first stage", size)
        return self.passes.run(queries, allowed, key, lambda request: self.lists(request, (size,)), cut)


class AverageScan:
    """B queries' best by averaged components: lists (B, 1, n) with some items beyond `depth`."""

    def __init__(self, passes: Passes, averages: "_Averages", request: Request, lists: Lists, depth: int) -> None:
        self._passes, self._averages, self._request, self._lists = passes, averages, request, lists
        self.depth, self.seconds = depth, lists.seconds

    def pool(self, query: int) -> Indices:
        """One query's `depth` best rows: (n,)."""
        rows = self._passes.fetch(self._lists.rows[query, 0, : self.depth])
        return np.asarray(rows[rows >= 0])

    def average_scores(self, query: int, rows: Indices) -> Scores:
        """One query's float64 average scores of some items: (n,)."""
        means, _ = self._averages.items.at(rows)
        average = self._request.queries.components[query].astype(np.float64).mean(axis=0)
        return np.asarray(means.astype(np.float64) @ average)

    def bounds(self, kth_scores: Scores | None = None) -> Scores:
        """See `PoolScan.bounds`: NaN if the radii are no better than the norms."""
        started = time.perf_counter()
        queries: QueryStates = self._request.queries
        is_complete = self.is_complete()
        if is_complete.all():
            return np.full(len(queries), -np.inf)
        components = queries.components.astype(np.float64)
        norms = np.linalg.norm(components, axis=-1).max(axis=1, initial=0)
        trivial = norms * self._averages.largest_norm
        # The query's rounded average, and each component's distance from it.
        average = self._averages.items.average(self._request)
        apart = np.linalg.norm(components - average[:, None], axis=-1).max(axis=1, initial=0)
        error = self._averages.error(np.maximum(norms, np.linalg.norm(average, axis=-1)))
        left_out = self._passes.fetch(self._lists.scores[:, 0, self.depth]).astype(np.float64)
        free = left_out + self._averages.farthest(apart, norms) + error
        witnessed = self._witnessed()
        wanted = np.full(len(queries), -np.inf) if kth_scores is None else np.nan_to_num(kth_scores, nan=-np.inf)
        bounds = np.where(free < trivial, free, np.nan)
        bounds[is_complete] = -np.inf
        # A scan pays if it may prove that no omitted item reaches the K-th score, or if there is no bound yet. Without
        # a K-th score, the tightest bound is wanted.
        hopeful = witnessed + error < np.where(np.isnan(bounds) | (kth_scores is None), trivial, wanted)
        open_ = (left_out > -np.inf) & ~(free < wanted) & hopeful
        chosen = np.flatnonzero(open_)
        if len(chosen):
            reach = self._scanned(chosen) + error[chosen]
            bounds[chosen] = np.where(reach < trivial[chosen], reach, np.nan)
        self.seconds += time.perf_counter() - started
        return bounds

    def is_complete(self) -> npt.NDArray[np.bool_]:
        """Return, for each query, whether its pool has all allowed items (B,)."""
        following = self._passes.fetch(self._lists.scores[:, 0, self.depth : self.depth + 1])
        return np.asarray((following == -np.inf).all(axis=1))

    def _witnessed(self) -> Scores:
        """The largest reach (B,) of the items just beyond the pool, -inf if there are none."""
        rows = self._passes.fetch(self._lists.rows[:, 0, self.depth : self.depth + _WITNESSES])
        means, radii = self._averages.items.at(np.maximum(rows, 0))
        components = self._request.queries.components
        reach = np.einsum("bqd,bnd->bnq", components, means)
        reach += np.linalg.norm(components, axis=-1)[:, None, :] * radii[:, :, None]
        best = reach.max(axis=2, initial=-np.inf)
        return np.asarray(np.where(rows >= 0, best, -np.inf).max(axis=1, initial=-np.inf), dtype=np.float64)

    def _scanned(self, chosen: Indices) -> Scores:
        """The largest reach (n,) of allowed items outside the pools of some queries, in float32."""
        left_out = np.ones((len(chosen), self._passes.num_items), dtype=np.bool_)
        allowed = self._request.allowed
        if allowed is not None:
            left_out &= allowed if allowed.ndim == 1 else allowed[chosen]
        for number, query in enumerate(chosen):
            left_out[number, self.pool(int(query))] = False
        components = self._request.queries.components[chosen]
        norms = np.linalg.norm(components.astype(np.float64), axis=-1, keepdims=True)
        return self._averages.items.largest(np.concatenate([components, _round_up(norms)], axis=2), left_out)


class _Averages:
    def __init__(self, passes: Passes) -> None:
        num_items, num_components, width = passes.scorer.components.shape
        vectors = np.empty((num_items, 1, width + 1), dtype=np.float32)
        angles = np.linspace(0, np.pi / 2, _FAN)
        self._directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        self._farthest = np.zeros(_FAN)
        self._largest_mean = 0.0
        step = max(1, _FLOATS_AT_ONCE // (num_components * width))
        for x in range(0, num_items, step):
            rows = slice(x, min(x + step, num_items))
            exact = passes.fetch(passes.scorer.components[rows]).astype(np.float64)
            means = passes.round_means(exact.mean(axis=1))
            exact -= means[:, None].astype(np.float64)
            radii = _bfloat16_above(_round_up(np.sqrt(np.einsum("xpd,xpd->xp", exact, exact).max(axis=1))))
            vectors[rows, 0, :-1], vectors[rows, 0, -1] = means, radii
            lengths = np.linalg.norm(means.astype(np.float64), axis=1)
            self._largest_mean = max(self._largest_mean, float(lengths.max()))
            spread = np.stack([lengths, radii.astype(np.float64)], axis=1) @ self._directions.T
            self._farthest = np.maximum(self._farthest, spread.max(axis=0))
        self._largest_radius = float(vectors[:, 0, -1].max())
        self.largest_norm = float(passes.scorer.magnitudes.norms.max(initial=0))
        self.items = passes.means(vectors)
        self._unit = (width + 9) * self.items.unit

    def farthest(self, apart: Scores, norms: Scores) -> Scores:
        """An upper bound (B,) on max_x (apart ||g-bar_x|| + norm rho_x).

        The maximum is a convex function of (apart, norm), so between two directions of the fan the chord is above it.
        """
        angle = np.arctan2(norms, apart)
        left = np.clip((angle / (np.pi / 2) * (_FAN - 1)).astype(np.int64), 0, _FAN - 2)
        (ax, ay), (bx, by) = self._directions[left].T, self._directions[left + 1].T
        determinant = ax * by - ay * bx
        a, b = (apart * by - norms * bx) / determinant, (norms * ax - apart * ay) / determinant
        # Rounding may put the angle outside its segment. A weight slightly below 0 becomes 0, so the bound stays valid.
        chord = np.maximum(a, 0) * self._farthest[left] + np.maximum(b, 0) * self._farthest[left + 1]
        return np.asarray(chord * (1 + 1e-12))

    def error(self, norms: Scores) -> Scores:
        """The rounding errors (B,) of a dot product of d + 1 terms, of the query's average and of the sum."""
        return np.asarray(self._unit * norms * (self._largest_mean + self._largest_radius))


def _round_up(values: Scores) -> FloatArray:
    return (values * (1 + 2.0**-23)).astype(np.float32)


def _bfloat16_above(values: FloatArray) -> FloatArray:
    """Non-negative values rounded up to bfloat16."""
    return ((values.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
