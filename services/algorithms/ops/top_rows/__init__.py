"""Rows of a score matrix that may be among the top k: the selection after a pass over a whole catalogue.

One pass with a rising threshold instead of a partition of every row of scores, which took 8 ms per query at X 674,044
(the kernel: 0.2 ms). It allows for errors in the scores and for a filter, and leaves order and ties to the caller.

Letters: B queries, X items.
"""

import ctypes
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, load_kernels
from services.algorithms.native.threads import compute_threads

Rows = npt.NDArray[np.int64]

_SCORES_PER_THREAD = 250_000  # a thread takes about 20 us to start


def top_rows(
    scores: npt.NDArray[np.float32],
    k: int,
    slack: npt.NDArray[np.float64],
    allowed: npt.NDArray[np.bool_] | None = None,
    *,
    backend: Literal["auto", "numpy"] = "auto",
) -> list[Rows]:
    """For each query the rows whose score reaches the `k`-th best allowed one less `slack` (at most one float less).

    Shapes: scores (B, X) float32, slack (B,) at least 0, allowed (X,) or (B, X), None for all -> B arrays of rows in
            ascending order; all allowed rows where there are no more than k. Rows at -inf are never taken.
    Cost:   one pass over B X scores; memory about 12 bytes per row that was ever in reach.
    Raises: ValueError if k is below 1.
    """
    if k < 1:
        raise ValueError(f"k={k} allowed: at least 1")
    library = load_kernels("top_rows") if backend == "auto" else None
    if library is None:
        return _by_partition(scores, k, slack, allowed)
    return top_rows_native(library, scores, k, slack, allowed)


def top_rows_native(
    library: ctypes.CDLL,
    scores: npt.NDArray[np.float32],
    k: int,
    slack: npt.NDArray[np.float64],
    allowed: npt.NDArray[np.bool_] | None,
) -> list[Rows]:
    """`top_rows` by one compiled library."""
    scores = np.ascontiguousarray(scores, dtype=np.float32)
    slack = np.ascontiguousarray(slack, dtype=np.float64)
    mask = None if allowed is None else np.ascontiguousarray(allowed)
    num_queries, num_items = scores.shape
    counts = np.zeros(num_queries, dtype=np.int64)
    function = library.freshet_top_rows
    function.restype = ctypes.c_void_p
    memory = function(
        address(scores),
        *map(ctypes.c_int64, (num_queries, num_items, k)),
        address(slack),
        address(mask),
        *map(ctypes.c_int64, (0 if mask is None or mask.ndim == 1 else num_items, _threads(scores.size))),
        address(counts),
    )
    if memory is None:
        raise MemoryError(f"no memory for {counts.sum()} rows")
    try:
        found = (ctypes.c_int64 * int(counts.sum())).from_address(memory)
        rows = np.array(found, dtype=np.int64)
    finally:
        library.freshet_free(ctypes.c_void_p(memory))
    return np.split(rows, np.cumsum(counts)[:-1]) if num_queries else []


def _threads(num_scores: int) -> int:
    return min(compute_threads(), 1 + num_scores // _SCORES_PER_THREAD)


def _by_partition(
    scores: npt.NDArray[np.float32], k: int, slack: npt.NDArray[np.float64], allowed: npt.NDArray[np.bool_] | None
) -> list[Rows]:
    found = []
    for query, row_scores in enumerate(scores):
        mask = row_scores > -np.inf
        if allowed is not None:
            mask &= allowed if allowed.ndim == 1 else allowed[query]
        rows = np.flatnonzero(mask)
        if len(rows) > k:
            best = row_scores[rows]
            kth = float(np.partition(best, len(best) - k)[len(best) - k])
            rows = rows[best >= np.nextafter(np.float32(kth - slack[query]), np.float32(-np.inf))]
        found.append(rows)
    return found
