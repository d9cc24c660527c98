"""Select and order the best of a row of scores; ties by item id. All indexes and the reranker use this order.

Letters: X items, n candidates.
"""

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import Indices, Scores
from services.algorithms.ops.top_rows import top_rows


def order_by_score_then_id(scores: Scores, ranks: Indices, *, tolerance: float = 0.0) -> tuple[Indices, Scores]:
    """Order n candidates by (-score, rank): positions (n,) and their scores (n,).

    Scores connected by a chain of steps of at most `tolerance` count as equal: all get the largest.
    """
    order = np.lexsort((ranks, -scores))
    ordered = scores[order]
    if tolerance > 0 and len(ordered) > 1:
        new_group = np.empty(len(ordered), dtype=bool)
        new_group[0] = True
        np.greater(ordered[:-1] - ordered[1:], tolerance, out=new_group[1:])
        if not new_group.all():
            starts = np.flatnonzero(new_group)
            group = np.cumsum(new_group) - 1
            ordered = ordered[starts][group]
            order = order[np.lexsort((ranks[order], group))]
    return order, ordered


def best_rows(scores: npt.NDArray[np.float32], size: int) -> Indices:
    """The `size` best rows of scores (X,), by (-score, row); never rows at -inf."""
    rows = top_rows(scores[None], size, np.zeros(1))[0]
    return rows[np.argsort(-scores[rows], kind="stable")[:size]]
