"""Recall of ranked answers, and ranks of wanted documents among scores.

Equal scores are ordered by row. Letters: B queries, n documents, E pairs, K results.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.engine.metrics import target_ranks

Rows = npt.NDArray[Any] | Sequence[Sequence[Hashable]]
Pairs = npt.NDArray[np.int64]
PerQuery = dict[str, npt.NDArray[np.float64]]

PAIR_CUTS = (1, 10, 100)
_MOST = 100


def recall(found: Rows, exact: Rows) -> float:
    """Return the mean over queries of the share of exact answers that were found; -1 pads a row.

    Shapes: found (B, any), exact (B, any). A query without exact answers has recall 0.
    Raises: ValueError if B differs.
    """
    shares = []
    for answers, truth in zip(found, exact, strict=True):
        wanted = set(np.asarray(truth).tolist()) - {-1}
        shares.append(len(wanted.intersection(np.asarray(answers).tolist())) / max(1, len(wanted)))
    return float(np.mean(shares))


def pair_ranks(scores: npt.NDArray[np.floating], pairs: Pairs) -> npt.NDArray[np.int64]:
    """Return the number of documents that rank before each pair's document, (E,).

    Shapes: scores (B, n), pairs (E, 2) of (query, document).

    Raises: ValueError if a wanted score is NaN.
    """
    ranks = np.empty(len(pairs), dtype=np.int64)
    for start in range(0, len(pairs), 256):
        query, document = pairs[start : start + 256].T
        ranks[start : start + 256] = target_ranks(scores[query], document)
    return ranks


def recalls(ranks: npt.NDArray[np.int64], pairs: Pairs, num_queries: int) -> PerQuery:
    """Return "recall@K" -> the share (B,) of each query's documents that are among the first K.

    Source: arXiv:2312.02429, section 4.1.
    Raises: ValueError if a query has no document.
    """
    wanted = np.bincount(pairs[:, 0], minlength=num_queries)
    if (wanted == 0).any():
        raise ValueError(f"{int((wanted == 0).sum())} of {num_queries} queries have no document; each needs one")
    return {
        f"recall@{cut}": np.bincount(pairs[:, 0], weights=ranks < cut, minlength=num_queries) / wanted
        for cut in PAIR_CUTS
    }


def ranks_of_answers(found: Sequence[npt.NDArray[np.integer]], pairs: Pairs) -> npt.NDArray[np.int64]:
    """Return the rank of each pair's document in its query's answer (E,); 100 if it is absent."""
    ranks = np.full(len(pairs), _MOST, dtype=np.int64)
    for number, (query, document) in enumerate(pairs.tolist()):
        ranks[number] = next(iter(np.flatnonzero(found[query] == document)), _MOST)
    return ranks
