"""HR@k, NDCG@k and MRR of ranked events, and the rank of a wanted item among scores.

Equal scores are ordered by item. Letters: B events of a batch, E events, X items.
"""

import numpy as np
import numpy.typing as npt

Ranks = npt.NDArray[np.int64]


def target_ranks(
    scores: npt.NDArray[np.floating], targets: npt.NDArray[np.integer], excluded: npt.NDArray[np.bool_]
) -> Ranks:
    """How many allowed items stand before each target: (B,).

    Shapes: scores (B, X), targets (B,), excluded (B, X) = seen before. Equal scores are ordered by item index.
    Raises: ValueError if a target's score is NaN, which would otherwise rank first.
    """
    rows = np.arange(len(targets))
    own = scores[rows, targets][:, None]
    if np.isnan(own).any():
        raise ValueError(f"{int(np.isnan(own).sum())} targets have the score NaN; scores must be numbers")
    before = (scores > own) | ((scores == own) & (np.arange(scores.shape[1]) < np.asarray(targets)[:, None]))
    return np.asarray((before & ~excluded).sum(axis=1), dtype=np.int64)


def hit_rate(ranks: Ranks, k: int) -> float:
    """HR@k, the share of targets among the first k; 0 of nothing is nan."""
    return float((ranks < k).mean()) if len(ranks) else float("nan")


def ndcg(ranks: Ranks, k: int) -> float:
    """NDCG@k with one relevant item per query."""
    gains = np.where(ranks < k, 1.0 / np.log2(ranks + 2.0), 0.0)
    return float(gains.mean()) if len(ranks) else float("nan")


def mean_reciprocal_rank(ranks: Ranks) -> float:
    """MRR over the whole ranking, not cut."""
    return float((1.0 / (ranks + 1.0)).mean()) if len(ranks) else float("nan")


def summary(ranks: Ranks) -> dict[str, float]:
    """The papers' row: HR@{1, 10, 50, 200}, NDCG@10, MRR."""
    rates = {f"hr@{k}": hit_rate(ranks, k) for k in (1, 10, 50, 200)}
    return {**rates, "ndcg@10": ndcg(ranks, 10), "mrr": mean_reciprocal_rank(ranks)}
