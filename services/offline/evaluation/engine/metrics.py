"""HR@k, NDCG@k and MRR of events with one target item each, and the target's rank.

Equal scores are ordered by item. Letters: B events of a batch, E events, X items.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ranks = npt.NDArray[np.int64]


def target_ranks(
    scores: npt.NDArray[np.floating], targets: npt.NDArray[np.integer], excluded: npt.NDArray[np.bool_] | None = None
) -> Ranks:
    """Return the number of allowed items before each target: (B,).

    Shapes: scores (B, X), targets (B,), excluded (B, X) or None.
    Raises: ValueError if a target's score is NaN.
    """
    rows = np.arange(len(targets))
    own = scores[rows, targets][:, None]
    if np.isnan(own).any():
        raise ValueError(f"{int(np.isnan(own).sum())} targets have the score NaN; scores must be numbers")
    before = (scores > own) | ((scores == own) & (np.arange(scores.shape[1]) < np.asarray(targets)[:, None]))
    return np.asarray((before if excluded is None else before & ~excluded).sum(axis=1), dtype=np.int64)


def top_rows(scores: npt.NDArray[np.floating], had: npt.NDArray[np.int64], *, k: int) -> npt.NDArray[np.intp]:
    """Return at most k items with the highest finite `scores` (X,), without `had`; equal ones in order."""
    left = scores.copy()
    left[had] = -np.inf
    if len(left) > k:
        least = np.partition(left, len(left) - k)[len(left) - k]
        rows = np.flatnonzero((left >= least) & ~np.isneginf(left))
    else:
        rows = np.flatnonzero(~np.isneginf(left))
    return rows[np.argsort(-left[rows], kind="stable")[:k]]


METRICS = ("hr@1", "hr@10", "hr@50", "hr@200", "ndcg@10", "mrr")


def gains(ranks: npt.NDArray[np.integer], metric: str) -> npt.NDArray[np.float64]:
    """Return the gain of each rank (0-based, any shape).

    "hr@k" is 1 for the first k; "ndcg@k" is discounted by the logarithm of the position; "mrr" is 1 / position.
    """
    if metric == "mrr":
        return np.asarray(1.0 / (ranks + 1.0))
    name, depth = metric.split("@")
    inside = ranks < int(depth)
    return np.where(inside, 1.0 / np.log2(ranks + 2.0), 0.0) if name == "ndcg" else inside.astype(np.float64)


def summary(ranks: Ranks, metrics: Sequence[str] = METRICS) -> dict[str, float]:
    """Return the mean of each metric; NaN without ranks."""
    return {metric: float(gains(ranks, metric).mean()) if len(ranks) else float("nan") for metric in metrics}
