"""Recall@K of a score matrix against judged pairs, by counting who stands before each wanted document.

Counting needs no sort, so a sweep of a hundred settings costs a comparison each. Equal scores are ordered by document
row, as everywhere here.

Letters: B queries, n documents, E pairs, K results.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.pefa.data import Pairs

CUTS = (1, 10, 100)


def pair_ranks(scores: npt.NDArray[np.floating], pairs: Pairs) -> npt.NDArray[np.int64]:
    """How many documents stand before each pair's own (E,), 0 for the best; scores (B, n), pairs (E, 2).

    Raises: ValueError if a wanted score is NaN, which would otherwise stand first.
    """
    ranks = np.empty(len(pairs), dtype=np.int64)
    columns = np.arange(scores.shape[1])
    for start in range(0, len(pairs), 256):
        query, document = pairs[start : start + 256].T
        rows = scores[query]
        own = rows[np.arange(len(rows)), document][:, None]
        if np.isnan(own).any():
            raise ValueError(f"{int(np.isnan(own).sum())} wanted documents have the score NaN; scores must be numbers")
        before = (rows > own) | ((rows == own) & (columns < document[:, None]))
        ranks[start : start + 256] = before.sum(axis=1)
    return ranks


def recalls(ranks: npt.NDArray[np.int64], pairs: Pairs, num_queries: int) -> dict[str, npt.NDArray[np.float64]]:
    """Each query's share of its documents among the first K (B,), by name "recall@K" (paper, section 4.1).

    Raises: ValueError if a query has no document: its recall is undefined.
    """
    wanted = np.bincount(pairs[:, 0], minlength=num_queries)
    if (wanted == 0).any():
        raise ValueError(f"{int((wanted == 0).sum())} of {num_queries} queries have no document; each needs one")
    return {
        f"recall@{cut}": np.bincount(pairs[:, 0], weights=ranks < cut, minlength=num_queries) / wanted for cut in CUTS
    }


def ranks_of_answers(found: Sequence[npt.NDArray[np.integer]], pairs: Pairs) -> npt.NDArray[np.int64]:
    """Where each pair's document stands in its query's ranked answer (E,); past the largest cut if it does not."""
    ranks = np.full(len(pairs), max(CUTS), dtype=np.int64)
    for number, (query, document) in enumerate(pairs.tolist()):
        places = np.flatnonzero(found[query] == document)
        if len(places):
            ranks[number] = places[0]
    return ranks
