"""When a growing pool has enough: an estimate of recall, calibrated on sample queries with exact answers. No proof.

What is looked at is *agreement*: the share of the top K of a pool of N that a pool of N / 2 held already. While
doubling the pool still brings in new answers, more are missing; once it brings none, few are. Every rule "stop at the
first N of at least n with an agreement of at least a" is tried on the samples as a whole, so the recall it states is
that of the answers it stops at; the one that keeps the target with the smallest pools is taken.

Letters: B queries, X items, K results, N pool size.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.pools import PooledIndex
from services.algorithms.indexes.protocol import Indices, take_queries
from services.algorithms.scoring.states import QueryStates

DoubleArray = npt.NDArray[np.float64]

_CONFIDENCE = 1.645  # standard errors: one-sided 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallEstimate:
    """A stopping rule with the recall that it had on samples.

    Attributes: index and pool_size, whose pools it was calibrated on, doubling from pool_size; target and k (recall at
    K); smallest_pool and agreement, from which to stop, the latter infinite where no rule kept the target; mean_recall
    of the sampled answers and lower_recall, the one-sided 95 % bound on it that had to reach the target; mean_pool, N
    where it stopped on average; num_queries sampled.
    """

    index: str
    pool_size: int
    target: float
    k: int
    smallest_pool: int
    agreement: float
    mean_recall: float
    lower_recall: float
    mean_pool: float
    num_queries: int


def agreement(rows: Indices, scores: npt.NDArray[np.float32], smaller: Indices, k: int) -> float:
    """The share of the `k` best of a pool (n,) with scores (n,) that lies in the smaller pool; 0 for n < k."""
    if len(rows) < k:
        return 0.0
    best = rows[np.argpartition(scores, len(scores) - k)[len(scores) - k :]]
    return float(np.isin(best, smaller).mean())


def calibrate(index: PooledIndex, queries: QueryStates, *, recall: float, k: int) -> RecallEstimate:
    """The rule with the smallest pools that keeps `recall` at `k` on the samples, with 95 % confidence.

    One observation of recall 0 is added to the samples, so few of them cannot promise much: 0.99 takes at least 99.
    Raises: ValueError naming `recall`, `k` or `queries` when out of range.
    Cost: one exact search and full scores of pools up to half the catalogue per sample.
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall={recall} allowed: above 0, at most 1")
    if not 1 <= k <= index.scorer.num_items:
        raise ValueError(f"k={k} allowed: 1 to the number of items, {index.scorer.num_items}")
    if not len(queries):
        raise ValueError("queries: 0 samples; expected at least 1")
    sizes, agreements, recalls = _ladder(index, queries, k)
    # Without any stop everything is scored in the end, and that is exact.
    best = RecallEstimate(
        index=index.name,
        pool_size=index.pool_size,
        target=recall,
        k=k,
        smallest_pool=index.pool_size,
        agreement=np.inf,
        mean_recall=1.0,
        lower_recall=1.0,
        mean_pool=float(index.scorer.num_items),
        num_queries=len(queries),
    )
    every = np.arange(len(queries))
    for first, smallest in enumerate(sizes):
        for level in np.unique(agreements[:, first:]):
            stops = agreements[:, first:] >= level
            reached = stops.any(axis=1)
            place = first + np.argmax(stops, axis=1)
            found = np.where(reached, recalls[every, place], 1.0)
            pool = float(np.where(reached, sizes[place], index.scorer.num_items).mean())
            error = _CONFIDENCE * float(found.std()) / len(found) ** 0.5
            lower = float(found.sum()) / (len(found) + 1) - error
            if lower >= recall and pool < best.mean_pool:
                best = replace(
                    best,
                    smallest_pool=int(smallest),
                    agreement=float(level),
                    mean_recall=float(found.mean()),
                    lower_recall=lower,
                    mean_pool=pool,
                )
    return best


def _ladder(index: PooledIndex, queries: QueryStates, k: int) -> tuple[Indices, DoubleArray, DoubleArray]:
    """Pool sizes (steps,) doubling below the catalogue, and each query's agreement and recall there (B, steps)."""
    truth = BruteForce(index.scorer, tie_ranks=index.ranks).search(queries, k).item_indices
    sizes = [index.pool_size]
    while 4 * sizes[-1] <= index.scorer.num_items:
        sizes.append(2 * sizes[-1])
    scan = index.scan(queries, sizes[-1], None)
    agreements, recalls = np.zeros((len(queries), len(sizes))), np.zeros((len(queries), len(sizes)))
    for query in range(len(queries)):
        one = take_queries(queries, query, query + 1)
        largest = scan.pool(query, min(sizes[-1], scan.depth))
        scores = index.scorer.scores_at(one, [largest])[0]
        for step, size in enumerate(sizes):
            inside = np.isin(largest, scan.pool(query, min(size, scan.depth)))
            smaller = scan.pool(query, min(size // 2, scan.depth))
            agreements[query, step] = agreement(largest[inside], scores[inside], smaller, k)
            recalls[query, step] = np.isin(truth[query], largest[inside]).mean()
    return np.array(sizes, dtype=np.int64), agreements, recalls
