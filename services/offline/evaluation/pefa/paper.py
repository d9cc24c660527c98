"""PEFA on matrices, exactly as in the paper: for text retrieval, where all queries are known at once.

The streamed forms (sums.py, memory.py) reduce to these with one component, weights of 1 and no decay. Y is sparse.
Compared with the model alone, XS costs nothing per query (its passages replace the model's); XL costs a second search,
over m queries, and m d + nnz(Y) numbers (the paper's table 1).

Letters: n passages, m training queries, B queries asked, d width, k neighbours.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.refresh import unit
from services.algorithms.scoring.states import FloatArray

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

_BLOCK_VALUES = 1 << 24  # similarities in memory at a time


@dataclass(frozen=True, slots=True)
class Pairs:
    """The relevance matrix Y (m, n), 0 or 1, by training query: passages[starts[i] : starts[i + 1]] are query i's."""

    starts: Rows
    passages: Rows
    num_passages: int

    @classmethod
    def of(cls, queries: npt.ArrayLike, passages: npt.ArrayLike, *, num_queries: int, num_passages: int) -> "Pairs":
        """Build Y from a query's row and a passage's row per pair; a repeated pair counts once.

        Raises: ValueError for rows out of range or columns of unequal length.
        """
        rows, columns = np.asarray(queries, dtype=np.int64), np.asarray(passages, dtype=np.int64)
        if rows.shape != columns.shape or rows.ndim != 1:
            raise ValueError(f"queries {rows.shape} and passages {columns.shape}; expected two lists of equal length")
        for name, values, size in (("queries", rows, num_queries), ("passages", columns, num_passages)):
            if len(values) and (values.min() < 0 or values.max() >= size):
                raise ValueError(f"{name} hold rows {values.min()} to {values.max()}; allowed: 0 to {size - 1}")
        keys = np.unique(rows * num_passages + columns)
        rows, columns = np.divmod(keys, max(num_passages, 1))
        return cls(np.searchsorted(rows, np.arange(num_queries + 1)), columns, num_passages)

    @property
    def num_queries(self) -> int:
        return len(self.starts) - 1

    @property
    def query_rows(self) -> Rows:
        """The training query of each pair."""
        return np.repeat(np.arange(self.num_queries), np.diff(self.starts))


def xs_passages(passages: FloatArray, queries: FloatArray, pairs: Pairs, share: float) -> FloatArray:
    """Return lambda P + (1 - lambda) Pi(Y^T Q): the embeddings of a PEFA-XS index.

    Shapes: passages (n, d), queries (m, d) -> (n, d). A passage without training queries does not change (lambda = 1).
    Raises: ValueError for a share outside [0, 1], shapes that disagree, values that are not finite.
    Source: arXiv:2312.02429, equation 8. Cost: nnz(Y) d additions.
    """
    _check_share(share)
    _check_shapes(passages, queries, pairs)
    order = np.argsort(pairs.passages, kind="stable")
    targets, starts = np.unique(pairs.passages[order], return_index=True)
    out = np.array(passages, dtype=np.float32)
    if not len(targets):
        return out
    ends = np.append(starts[1:], len(order))
    of_pair = pairs.query_rows[order]
    for start in range(0, len(targets), max(1, _BLOCK_VALUES // (8 * max(1, passages.shape[1])))):
        stop = min(start + max(1, _BLOCK_VALUES // (8 * max(1, passages.shape[1]))), len(targets))
        rows = of_pair[starts[start] : ends[stop - 1]]
        sums = np.add.reduceat(queries[rows].astype(np.float64), starts[start:stop] - starts[start], axis=0)
        directions = unit(sums)
        here = targets[start:stop]
        shares = np.where((sums != 0).any(axis=1), share, 1.0)[:, None]
        out[here] = shares * passages[here].astype(np.float64) + (1 - shares) * directions
    return out


def nearest_queries(asked: FloatArray, queries: FloatArray, k: int) -> tuple[Rows, Scores]:
    """Return rows and inner products of the k nearest training queries to each query asked, by exact search.

    Shapes: asked (B, d), queries (m, d) -> (B, min(k, m)) each, best first, ties by row.
    Raises: ValueError for k below 1 or widths that disagree.
    """
    if k < 1:
        raise ValueError(f"k={k} allowed: at least 1")
    if asked.shape[1:] != queries.shape[1:]:
        raise ValueError(f"asked has shape {asked.shape} and queries {queries.shape}; expected one width")
    k = min(k, len(queries))
    rows, products = np.empty((len(asked), k), dtype=np.int64), np.empty((len(asked), k))
    memory = queries.astype(np.float64).T
    step = max(1, _BLOCK_VALUES // max(1, len(queries)))
    for start in range(0, len(asked), step):
        block = asked[start : start + step].astype(np.float64) @ memory
        for row, similarities in enumerate(block, start):
            reach = np.partition(similarities, len(similarities) - k)[len(similarities) - k] if k else np.inf
            near = np.flatnonzero(similarities >= reach)
            rows[row] = near[np.argsort(-similarities[near], kind="stable")[:k]]
            products[row] = similarities[rows[row]]
    return rows, products


def xl_votes(neighbours: Rows, products: Scores, pairs: Pairs, *, k: int) -> list[tuple[Rows, Scores]]:
    """Return the nearest training queries' votes for passages: (1/k) sum over them of <q, q_i> Y_ij, if any Y_ij is 1.

    Shapes: neighbours and products (B, k') with k' <= k, row -1 for none -> per query asked passages (v,) ascending
            and their votes (v,).
    Raises: ValueError for k below 1 or shapes that disagree.
    Source: arXiv:2312.02429, equation 5 with D_ii = 1/k.
    """
    if k < 1 or neighbours.shape != products.shape or neighbours.shape[1:] > (k,):
        raise ValueError(f"k={k} with neighbours {neighbours.shape} and products {products.shape}; allowed: (B, <= k)")
    found = []
    for rows, similarities in zip(neighbours, products, strict=True):
        present = rows >= 0
        own = [pairs.passages[pairs.starts[row] : pairs.starts[row + 1]] for row in rows[present].tolist()]
        given = np.repeat(similarities[present], [len(passages) for passages in own])
        passages, places = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *own]), return_inverse=True)
        found.append((passages, np.bincount(places, given, minlength=len(passages)) / k))
    return found


def xl_scores(scores: npt.NDArray[np.floating], votes: list[tuple[Rows, Scores]], share: float) -> Scores:
    """Return lambda f_ERM + (1 - lambda) f_kNN over all passages (B, n). Raises: ValueError for a share outside [0, 1].

    Source: arXiv:2312.02429, equation 6, divided by k.
    """
    _check_share(share)
    out = share * np.asarray(scores, dtype=np.float64)
    for row, (passages, given) in enumerate(votes):
        out[row, passages] += (1 - share) * given
    return out


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} allowed: 0 to 1")


def _check_shapes(passages: FloatArray, queries: FloatArray, pairs: Pairs) -> None:
    if passages.ndim != 2 or queries.ndim != 2 or passages.shape[1] != queries.shape[1]:
        raise ValueError(f"passages {passages.shape} and queries {queries.shape}; expected (n, d) and (m, d)")
    if (pairs.num_queries, pairs.num_passages) != (len(queries), len(passages)):
        raise ValueError(
            f"pairs of {pairs.num_queries} queries and {pairs.num_passages} passages; "
            f"there are {len(queries)} and {len(passages)}"
        )
    if not (np.isfinite(passages).all() and np.isfinite(queries).all()):
        raise ValueError("passages or queries hold NaN or infinite values; every value must be finite")
