"""Adaptive pools: a heuristic whose N is raised, query by query, until its answer is good enough.

Targets: "gap 0" stops when the certificate proves that nothing left out can enter the top K (or, "gap 0.05", that
nothing left out scores more than that above the K-th); "recall 0.99" stops by a rule calibrated on sample queries
(recall_estimate.py): an estimate, and the certificate beside it goes on saying what is proven. What was scanned and
scored is kept as N doubles. Where a pool would become a large part of the catalogue, scoring everything is cheaper
and proven, so that is the last step.

Letters: B queries, X items, K results, N pool size.
"""

import re
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.pools import PooledIndex, PoolScan, certificates
from services.algorithms.indexes.protocol import (
    ESTIMATE,
    Indices,
    Mask,
    Pass,
    Pool,
    Scores,
    TopK,
    check_request,
    empty_answer,
)
from services.algorithms.indexes.rescoring import finish
from services.algorithms.scoring.states import QueryStates
from services.offline.evaluation.retrieval.recall_estimate import RecallEstimate, agreement

_AHEAD = 8  # a scan goes this many times deeper than the pool it is for: longer lists cost far less than a second scan
_LARGE_POOL = 0.25  # share of X from which scoring everything, in order, costs no more than gathering a pool


@dataclass(frozen=True, slots=True)
class Target:
    """What an answer must reach: a proven gap of at most `value`, or an estimated recall of at least `value`."""

    kind: Literal["gap", "recall"]
    value: float


def parse_target(text: str) -> Target:
    """Read "gap 0" or "recall 0.99". Raises: ValueError naming the value and what is allowed."""
    match = re.fullmatch(r"(gap|recall) +(\d*\.?\d+)", text.strip())
    if match and match[1] == "gap":
        return Target("gap", float(match[2]))
    if match and 0 < float(match[2]) <= 1:
        return Target("recall", float(match[2]))
    raise ValueError(f"target={text!r} allowed: 'gap G' with G >= 0, or 'recall R' with 0 < R <= 1")


class AdaptiveTopK:
    """A pool heuristic that raises N until each query's target is met. Certificate: as far as it got, or exact."""

    def __init__(self, index: PooledIndex, *, target: str | Target, estimate: RecallEstimate | None = None) -> None:
        """Start every search at the index's own N. A recall target needs the estimate calibrated for it.

        Raises: ValueError for a target that cannot be read, or a recall target without an estimate or with one that
        was calibrated for another index, starting N or recall.
        """
        self.target = parse_target(target) if isinstance(target, str) else target
        self.name = f"adaptive_{index.name}"
        self._index = index
        self._everything = BruteForce(index.scorer, tie_ranks=index.ranks)
        self._estimate = estimate
        if self.target.kind == "recall":
            wanted = (index.name, index.pool_size, self.target.value)
            found = None if estimate is None else (estimate.index, estimate.pool_size, estimate.target)
            if found != wanted:
                raise ValueError(
                    f"estimate={found} allowed: one that recall_estimate.calibrate made for (index, pool_size, recall) "
                    f"= {wanted}"
                )

    @property
    def num_items(self) -> int:
        return self._index.scorer.num_items

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The heuristic's own pool of `size`."""
        return self._index.first_stage(queries, size, allowed)

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """The top `k` by s of pools as large as each query's target needs. See `Index.search`.

        Raises: ValueError also for a recall target at another k than it was calibrated for.
        """
        check_request(k=k, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        self._index.scorer.check(queries)
        enough, smallest = np.inf, 0
        if self.target.kind == "recall" and self._estimate is not None:
            if k != self._estimate.k:
                raise ValueError(f"k={k} allowed: {self._estimate.k}, which the recall was calibrated for")
            enough, smallest = self._estimate.agreement, self._estimate.smallest_pool
        gap = self.target.value if self.target.kind == "gap" else 0.0
        growth = _Growth(self._index, queries, k, allowed, gap=gap, prove=self.target.kind == "gap")
        growth.agreement, growth.smallest_pool = enough, smallest
        growth.run()
        return self._answer(growth, queries, k, allowed)

    def _answer(self, growth: "_Growth", queries: QueryStates, k: int, allowed: Mask | None) -> TopK:
        """Float64 within the pools that met their target; the exact answer for those that grew too large."""
        item_indices, scores = empty_answer(len(queries), min(k, self.num_items))
        proven = [ESTIMATE] * len(queries)
        full = np.array([len(rows) for rows in growth.rows], dtype=np.int64)
        float64 = np.zeros(len(queries), dtype=np.int64)
        full_s, float64_s = growth.full_s, 0.0
        done = np.flatnonzero(~growth.too_large)
        if len(done):
            pools, pool_scores = [growth.rows[query] for query in done], [growth.scores[query] for query in done]
            answer = finish(self._index.scorer, _take(queries, done), pools, pool_scores, k, self._index.ranks)
            item_indices[done], scores[done] = answer.item_indices, answer.scores
            for query, one in zip(done, certificates(growth.bounds[done], answer.kth_scores), strict=True):
                proven[query] = one
            float64[done], float64_s = answer.passes[-1].touched, answer.passes[-1].seconds
        rest = np.flatnonzero(growth.too_large)
        if len(rest):
            top = self._everything.search(_take(queries, rest), k, _take_mask(allowed, rest))
            item_indices[rest], scores[rest] = top.item_indices, top.scores
            for query, one in zip(rest, top.certificates, strict=True):
                proven[query] = one
            full[rest], full_s = self.num_items, full_s + sum(one.seconds for one in top.passes[:-1])
            float64[rest], float64_s = top.passes[-1].touched, float64_s + top.passes[-1].seconds
        scanned = np.full(len(queries), self.num_items, dtype=np.int64)
        passes = (
            Pass("first_stage", growth.first_stage_s, scanned),
            Pass("full", full_s, full),
            Pass("float64", float64_s, float64),
        )
        return TopK(item_indices=item_indices, scores=scores, certificates=tuple(proven), passes=passes)


class _Growth:
    """The pools of one search while they grow: rows and float32 scores per query, every row scored once.

    A query is done once its gap is proven to be at most `gap` (`prove` lets bounds cost a scan of their own), or once,
    from `smallest_pool` on, its answer agrees with that of half its pool to at least `agreement`.
    """

    def __init__(
        self,
        index: PooledIndex,
        queries: QueryStates,
        k: int,
        allowed: Mask | None,
        *,
        gap: float,
        prove: bool,
    ) -> None:
        self._index, self._queries, self._k, self._allowed = index, queries, k, allowed
        self._gap, self._prove = gap, prove
        self.agreement, self.smallest_pool = np.inf, 0
        self._error = index.scorer.error_bounds(queries)
        self.rows: list[Indices] = [np.empty(0, dtype=np.int64)] * len(queries)
        self.scores: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(queries)
        self.bounds: Scores = np.full(len(queries), np.nan)
        self.too_large: npt.NDArray[np.bool_] = np.zeros(len(queries), dtype=np.bool_)
        self.first_stage_s = self.full_s = 0.0

    def run(self) -> None:
        """Grow every pool until its query is done, or too large to be worth it."""
        num_items = self._index.scorer.num_items
        open_ = np.arange(len(self._queries))
        size = min(self._index.pool_size, num_items)
        while len(open_):
            members = open_
            scan = self._index.scan(_take(self._queries, members), _AHEAD * size, _take_mask(self._allowed, members))
            deepest = scan.bounds(scan.depth, np.full(len(members), np.inf))
            hopeless: list[int] = []
            while len(open_) and size <= scan.depth:
                self._score(scan, members, open_, size)
                bounds = scan.bounds(size, self._kth_scores(members, open_))
                growing: list[int] = []
                for query in open_.tolist():
                    place = int(np.searchsorted(members, query))
                    if self._done(scan, place, query, size, bounds[place]):
                        continue
                    # What even the deepest pool of this scan leaves out is above the K-th score by more than allowed:
                    # the pools between need no scores.
                    skip = self._prove and deepest[place] - self._kth_score(query) > self._gap
                    largest = len(scan.pool(place, scan.depth)) if skip else len(self.rows[query])
                    self.too_large[query] = 2 * size > num_items or 2 * largest > _LARGE_POOL * num_items
                    if not self.too_large[query]:
                        (hopeless if skip else growing).append(query)
                open_ = np.array(growing, dtype=np.int64)
                size *= 2
            if hopeless:
                open_ = np.union1d(open_, np.array(hopeless, dtype=np.int64))
                size = max(size, 2 * scan.depth)
            self.first_stage_s += scan.seconds

    def _score(self, scan: PoolScan, members: Indices, open_: Indices, size: int) -> None:
        """Score what is new in the pools of `size`."""
        started = time.perf_counter()
        new = []
        for query in open_:
            pool = scan.pool(int(np.searchsorted(members, query)), size)
            new.append(pool[~np.isin(pool, self.rows[query])])
        scored = self._index.scorer.scores_at(_take(self._queries, open_), new)
        for query, rows, scores in zip(open_, new, scored, strict=True):
            self.rows[query] = np.concatenate([self.rows[query], rows])
            self.scores[query] = np.concatenate([self.scores[query], scores])
        self.full_s += time.perf_counter() - started

    def _kth_scores(self, members: Indices, open_: Indices) -> Scores:
        """Lower bounds on the K-th scores (members,): NaN for too small a pool; inf where no proof is worth a scan."""
        kth = np.full(len(members), np.inf)
        if self._prove:
            kth[np.searchsorted(members, open_)] = [self._kth_score(query) for query in open_]
        return kth

    def _kth_score(self, query: int) -> float:
        scores = self.scores[query]
        if len(scores) < self._k:
            return np.nan
        return float(np.partition(scores, len(scores) - self._k)[len(scores) - self._k] - self._error[query])

    def _done(self, scan: PoolScan, place: int, query: int, size: int, bound: float) -> bool:
        self.bounds[query] = bound
        kth = self._kth_score(query)
        if bound == -np.inf or bound < kth or (self._gap > 0 and bound - kth <= self._gap):
            return True
        if size < self.smallest_pool or self.agreement > 1:
            return False
        return agreement(self.rows[query], self.scores[query], scan.pool(place, size // 2), self._k) >= self.agreement


def _take(queries: QueryStates, chosen: Indices) -> QueryStates:
    """Some queries, in order."""
    return queries if len(chosen) == len(queries) else queries.take(chosen)


def _take_mask(allowed: Mask | None, chosen: Indices) -> Mask | None:
    return allowed if allowed is None or allowed.ndim == 1 else allowed[chosen]
