"""When a growing pool has enough: an estimate of recall, calibrated on sample queries with exact answers. No proof.

What is looked at is *agreement*: the share of the top K of a pool of N that a pool of N / 2 held already. While
doubling the pool still brings in new answers, more are missing; once it brings none, few are. The rule "stop at the
first N with an agreement of at least a" is tried on the samples as a whole, so the recall it states is that of the
answers it would have stopped at, not of pools that it would have let grow.

Letters: B queries, X items, K results, N pool size.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.pools import PooledIndex
from services.algorithms.indexes.protocol import Indices
from services.algorithms.states import QueryStates

_CONFIDENCE = 1.645  # standard errors: one-sided 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallEstimate:
    """A stopping rule with the recall that it had on samples.

    Attributes: index and pool_size, whose pools it was calibrated on, doubling from pool_size; target and k (recall at
    K); agreement, from which to stop, above 1 where no stop kept the target; mean_recall of the sampled answers and
    lower_recall, the one-sided 95 % bound on it that had to reach the target; num_queries sampled.
    """

    index: str
    pool_size: int
    target: float
    k: int
    agreement: float
    mean_recall: float
    lower_recall: float
    num_queries: int


def agreement(rows: Indices, scores: npt.NDArray[np.float32], smaller: Indices, k: int) -> float:
    """The share of the `k` best of a pool (n,) with scores (n,) that lies in the smaller pool; 0 for n < k."""
    if len(rows) < k:
        return 0.0
    best = rows[np.argpartition(scores, len(scores) - k)[len(scores) - k :]]
    return float(np.isin(best, smaller).mean())


def calibrate(index: PooledIndex, queries: QueryStates, *, recall: float, k: int) -> RecallEstimate:
    """The lowest agreement to stop at that keeps `recall` at `k` on the samples, with 95 % confidence.

    One observation of recall 0 is added to the samples, so few of them cannot promise much: 0.99 takes at least 99.
    Raises: ValueError naming `recall`, `k` or `queries` when out of range.
    Cost: one exact search and full scores of the largest pools per sample.
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall={recall} allowed: above 0, at most 1")
    if not 1 <= k <= index.scorer.num_items:
        raise ValueError(f"k={k} allowed: 1 to the number of items, {index.scorer.num_items}")
    if not len(queries):
        raise ValueError("queries: 0 samples; expected at least 1")
    agreements, recalls = _ladder(index, queries, k)
    best = (np.inf, 1.0, 1.0)  # never stop: everything is scored in the end, and that is exact
    for level in np.unique(agreements)[::-1]:
        stops = np.argmax(agreements >= level, axis=1)
        reached = (agreements >= level).any(axis=1)
        found = np.where(reached, recalls[np.arange(len(recalls)), stops], 1.0)
        mean = float(found.sum() / (len(found) + 1))
        lower = mean - _CONFIDENCE * float(found.std()) / float(np.sqrt(len(found)))
        if lower < recall:
            break
        best = (float(level), float(found.mean()), lower)
    return RecallEstimate(
        index=index.name,
        pool_size=index.pool_size,
        target=recall,
        k=k,
        agreement=best[0],
        mean_recall=best[1],
        lower_recall=best[2],
        num_queries=len(queries),
    )


def _ladder(index: PooledIndex, queries: QueryStates, k: int) -> tuple[npt.NDArray[np.float64], ...]:
    """Agreement and recall at each doubling of the pool, up to the catalogue: (B, steps) each."""
    truth = BruteForce(index.scorer, tie_ranks=index.ranks).search(queries, k).item_indices
    sizes = [index.pool_size]
    while 2 * sizes[-1] < index.scorer.num_items:
        sizes.append(2 * sizes[-1])
    agreements, recalls = np.zeros((len(queries), len(sizes))), np.zeros((len(queries), len(sizes)))
    for step, size in enumerate(sizes):
        scan = index.scan(queries, size, None)
        pools = [scan.pool(query, scan.depth) for query in range(len(queries))]
        scored = index.scorer.scores_at(queries, pools)
        for query, (pool, scores) in enumerate(zip(pools, scored, strict=True)):
            agreements[query, step] = agreement(pool, scores, scan.pool(query, size // 2), k)
            recalls[query, step] = np.isin(truth[query], pool).mean()
    return agreements, recalls
