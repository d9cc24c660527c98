"""The compiled products and union of `cpu.cpp`.

Knows memory layouts only; `reference.py` says what the numbers mean.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address
from services.algorithms.ops.token_scores.rows import CodedRows, CodedVectors, HalfRows

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_INT64 = ctypes.c_int64


def integer_scores_native(library: ctypes.CDLL, rows: CodedRows, vectors: CodedVectors, chosen: Ints | None) -> Floats:
    """(s, U), a view of (U, s)."""
    count = len(rows.weights) if chosen is None else len(chosen)
    num_vectors, width = vectors.codes.shape
    out = np.empty((count, num_vectors), dtype=np.float32)
    library.freshet_integer_scores(
        *(address(array) for array in (rows.weights, rows.scales, vectors.codes, vectors.steps)),
        *map(_INT64, (num_vectors, width)),
        address(chosen),
        _INT64(count),
        address(out),
    )
    return out.T


def half_scores_native(library: ctypes.CDLL, rows: HalfRows, vectors: Floats, chosen: Ints | None) -> Floats:
    """(s, U), a view of (U, s)."""
    count = len(rows.weights) if chosen is None else len(chosen)
    out = np.empty((count, len(vectors)), dtype=np.float32)
    library.freshet_half_scores(
        *(address(array) for array in (rows.weights, vectors)),
        *map(_INT64, vectors.shape),
        address(chosen),
        _INT64(count),
        address(out),
    )
    return out.T


def products_native(library: ctypes.CDLL, rows: Floats, vector: Floats) -> Floats:
    """(m,)."""
    out = np.empty(len(rows), dtype=np.float32)
    library.freshet_products(address(rows), address(vector), *map(_INT64, rows.shape), address(out))
    return out


def union_native(library: ctypes.CDLL, sets: Ints, chosen: npt.NDArray[np.int64], num_rows: int) -> Ints:
    """Sorted, unique, with 0: (U,) int32."""
    out = np.empty(min(len(chosen) * sets.shape[1] + 1, num_rows), dtype=np.int32)
    function = library.freshet_union
    function.restype = _INT64
    count = function(
        address(sets), _INT64(sets.shape[1]), address(chosen), *map(_INT64, (len(chosen), num_rows)), address(out)
    )
    return out[:count].copy() if 2 * count < len(out) else out[:count]
