"""Dot products of a few vectors with chosen rows of a large matrix in int8 or half precision, and unions of row sets.

What an output layer over millions of phrases asks for: 25,000 rows scattered over gigabytes, read once, all positions
at a time, gathered and multiplied in one native call (`cpu.cpp`). Which rows are worth asking for is not known here.

Letters: V rows, D width, s vectors (positions), U rows asked for.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, load_kernels
from services.algorithms.ops.token_scores.rows import CodedRows, CodedVectors, HalfRows, code_rows, code_vectors

__all__ = [
    "CodedRows",
    "CodedVectors",
    "HalfRows",
    "code_rows",
    "code_vectors",
    "products",
    "token_scores",
    "union",
]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_INT64 = ctypes.c_int64


def token_scores(
    rows: CodedRows | HalfRows, vectors: Floats, chosen: Ints | None, *, kernels: ctypes.CDLL | None = None
) -> Floats:
    """Products of `vectors` (s, D) with the `chosen` rows (U,), None for all -> (s, U), a view of a (U, s) array.

    int8: the vectors are coded too (a step each of largest / 127), the integer product is exact. float16: products and
    sums in float32. `kernels`: another library than this processor's.
    Cost: U D bytes read (twice that in float16), U D s multiply-adds.
    """
    library = kernels or load_kernels("token_scores")
    count = len(rows.weights) if chosen is None else len(chosen)
    out = np.empty((count, len(vectors)), dtype=np.float32)
    arrays: tuple[npt.NDArray[np.generic], ...]
    if isinstance(rows, CodedRows):
        coded = code_vectors(vectors)
        function, arrays = library.freshet_integer_scores, (rows.weights, rows.scales, coded.codes, coded.steps)
    else:
        function, arrays = library.freshet_half_scores, (rows.weights, vectors)
    places = (address(array) for array in arrays)
    function(*places, *map(_INT64, vectors.shape), address(chosen), _INT64(count), address(out))
    return out.T


def products(rows: Floats, vector: Floats, *, kernels: ctypes.CDLL | None = None) -> Floats:
    """Products of float32 rows (m, D) with one vector (D,): (m,). One thread: BLAS would wake others for 0.1 ms."""
    library = kernels or load_kernels("token_scores")
    vector, out = np.ascontiguousarray(vector), np.empty(len(rows), dtype=np.float32)
    library.freshet_products(address(rows), address(vector), *map(_INT64, rows.shape), address(out))
    return out


def union(sets: Ints, chosen: npt.NDArray[np.int64], num_rows: int, *, kernels: ctypes.CDLL | None = None) -> Ints:
    """The sorted union of rows of `sets` (m, r), numbers 0 to num_rows - 1, and 0: (U,)."""
    function = (kernels or load_kernels("token_scores")).freshet_union
    function.restype = _INT64
    out = np.empty(min(len(chosen) * sets.shape[1] + 1, num_rows), dtype=np.int32)
    count = function(
        address(sets), _INT64(sets.shape[1]), address(chosen), *map(_INT64, (len(chosen), num_rows)), address(out)
    )
    return out[:count].copy() if 2 * count < len(out) else out[:count]
