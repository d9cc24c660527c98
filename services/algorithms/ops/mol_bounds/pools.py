"""A pool of probably good items for each query, by int8 averages: where thresholds come from, with no promise.

Letters: B queries, X items, P_q query components, d component width, N pool size.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, load_kernels
from services.algorithms.native.threads import compute_threads
from services.algorithms.ops.mol_bounds.items import LEVELS, AverageItems
from services.algorithms.states import QueryStates


def best_averages(
    averages: AverageItems,
    queries: QueryStates,
    size: int,
    allowed: npt.NDArray[np.bool_] | None = None,
    *,
    kernels: ctypes.CDLL | None = None,
) -> list[npt.NDArray[np.int64]]:
    """The `size` allowed items whose mean component lies nearest to each query's: B arrays of rows, ascending.

    All allowed items where there are at most `size`. `kernels` as in `BoundPass`.
    """
    size = min(size, averages.num_items)
    width = averages.width
    means = queries.components.mean(axis=1)
    reach = np.abs(means).max(axis=1, keepdims=True, initial=0.0)
    codes = np.zeros((len(queries), 4 * averages.quads), dtype=np.int8)
    codes[:, :width] = np.rint(means / np.where(reach > 0, reach, 1) * LEVELS)
    library = kernels or load_kernels("mol_bounds")
    corrections = -128 * codes.astype(np.int32).sum(axis=1, dtype=np.int32)
    mask = None if allowed is None else np.ascontiguousarray(allowed)
    rows = np.empty((len(queries), size), dtype=np.int64)
    library.freshet_best_averages(
        address(averages.codes),
        ctypes.c_int64(averages.num_items),
        averages.quads,
        address(codes),
        address(corrections),
        len(queries),
        address(mask),
        ctypes.c_int64(0 if mask is None or mask.ndim == 1 else averages.num_items),
        ctypes.c_int64(size),
        address(rows),
        compute_threads(),
    )
    return [np.sort(row[row >= 0]) for row in rows]
