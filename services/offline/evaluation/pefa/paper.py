"""PEFA on matrices, as in the paper, for text retrieval, where all queries are known at once.

Unlike in equation 8 as printed, a passage without training queries does not change.
The streamed forms (sums.py, memory.py) equal these with one component, weights of 1 and no decay. Per query, XS costs
as much as the model alone, because its passages replace the model's. XL adds a second search over m queries, and stores
m d + nnz(Y) numbers (the paper's table 1).

Letters: n passages, m training queries, B queries asked, d width, k neighbours, E pairs.
"""

import numpy as np
import numpy.typing as npt
from scipy import sparse

from services.algorithms.pefa.refresh import unit
from services.algorithms.scoring.states import FloatArray
from services.offline.evaluation.engine.metrics import top_rows

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

_QUERIES_AT_ONCE = 256
_NONE = np.zeros(0, dtype=np.int64)


def relevance(pairs: npt.ArrayLike, *, num_queries: int, num_passages: int) -> sparse.csr_matrix:
    """Return the relevance matrix Y (m, n), 0 or 1, of pairs (E, 2) of (query row, passage row).

    A repeated pair counts once. Raises: ValueError for a row out of range.
    """
    rows, columns = np.unique(np.asarray(pairs, dtype=np.int64).reshape(-1, 2), axis=0).T
    return sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(num_queries, num_passages))


def xs_passages(passages: FloatArray, queries: FloatArray, relevant: sparse.csr_matrix, share: float) -> FloatArray:
    """Return lambda P + (1 - lambda) Pi(Y^T Q): the embeddings of a PEFA-XS index.

    Shapes: passages (n, d), queries (m, d), relevant (m, n) -> (n, d). A passage without training queries does not
    change (lambda = 1).
    Raises: ValueError for a share outside [0, 1], shapes that disagree, values that are not finite.
    Source: arXiv:2312.02429, equation 8.
    """
    _check_share(share)
    sums = relevant.T @ queries.astype(np.float64)
    shares = np.where((sums != 0).any(axis=1), share, 1.0)[:, None]
    return (shares * passages + (1 - shares) * unit(sums)).astype(np.float32)


def nearest_queries(asked: FloatArray, queries: FloatArray, k: int) -> tuple[Rows, Scores]:
    """Return rows and inner products of the k nearest training queries to each query asked, by exact search.

    Shapes: asked (B, d), queries (m, d) -> two arrays (B, min(k, m)), best first, ties by row.
    """
    rows = np.empty((len(asked), min(k, len(queries))), dtype=np.int64)
    products = np.empty(rows.shape)
    for start in range(0, len(asked), _QUERIES_AT_ONCE):
        block = asked[start : start + _QUERIES_AT_ONCE].astype(np.float64) @ queries.astype(np.float64).T
        for row, similarities in enumerate(block, start):
            rows[row] = top_rows(similarities, _NONE, k=k)
            products[row] = similarities[rows[row]]
    return rows, products


def xl_votes(neighbours: Rows, products: Scores, relevant: sparse.csr_matrix, *, k: int) -> sparse.csr_matrix:
    """Return the votes for passages (B, n): (1/k) times the sum over the nearest training queries of <q, q_i> Y_ij.

    Shapes: neighbours and products (B, k') with k' <= k, padded with row -1; relevant (m, n).
    Source: arXiv:2312.02429, equation 5 with D_ii = 1/k.
    """
    query, place = np.nonzero(neighbours >= 0)
    shape = (len(neighbours), relevant.shape[0])
    similar = sparse.csr_matrix((products[query, place], (query, neighbours[query, place])), shape=shape)
    return similar @ relevant / k


def xl_scores(scores: npt.NDArray[np.floating], votes: sparse.csr_matrix, share: float) -> Scores:
    """Return lambda f_ERM + (1 - lambda) f_kNN over all passages (B, n). Raises: ValueError for a share outside [0, 1].

    Source: arXiv:2312.02429, equation 6, divided by k.
    """
    _check_share(share)
    return np.asarray(share * np.asarray(scores, dtype=np.float64) + (1 - share) * votes.toarray())


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} allowed: 0 to 1")
