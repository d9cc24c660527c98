"""Dot products of a few vectors with chosen rows of a large matrix in int8 or half precision, and unions of row sets.

What an output layer over millions of phrases asks for: 25,000 rows scattered over gigabytes, read once, all positions
at a time. `reference.py` says in NumPy what the numbers are; `cpu.cpp` gathers and multiplies in one native call.
Which rows are worth asking for is not known here.

Letters: V rows, D width, s vectors (positions), U rows asked for.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.native import load_kernels
from services.algorithms.ops.token_scores.native import (
    half_scores_native,
    integer_scores_native,
    products_native,
    union_native,
)
from services.algorithms.ops.token_scores.reference import half_scores, integer_scores, union_reference
from services.algorithms.ops.token_scores.rows import CodedRows, CodedVectors, HalfRows, code_rows, code_vectors

__all__ = [
    "Backend",
    "CodedRows",
    "CodedVectors",
    "HalfRows",
    "code_rows",
    "code_vectors",
    "products",
    "token_scores",
    "union",
]

Backend = Literal["auto", "numpy"]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def token_scores(
    rows: CodedRows | HalfRows, vectors: Floats, chosen: Ints | None, *, backend: Backend = "auto"
) -> Floats:
    """Products of `vectors` (s, D) with the `chosen` rows (U,), None for all -> (s, U), a view of a (U, s) array.

    int8: the vectors are coded too (a step each of largest / 127), the integer product is exact. float16: products and
    sums in float32.   Cost: U D bytes read (twice that in float16), U D s multiply-adds.
    """
    library = load_kernels("token_scores") if backend == "auto" else None
    if isinstance(rows, CodedRows):
        coded = code_vectors(vectors)
        if library is None:
            return integer_scores(rows, coded, chosen)
        return integer_scores_native(library, rows, coded, chosen)
    if library is None:
        return half_scores(rows, vectors, chosen)
    return half_scores_native(library, rows, vectors, chosen)


def products(rows: Floats, vector: Floats, *, backend: Backend = "auto") -> Floats:
    """Products of float32 rows (m, D) with one vector (D,): (m,). One thread: BLAS would wake others for 0.1 ms."""
    library = load_kernels("token_scores") if backend == "auto" else None
    return rows @ vector if library is None else products_native(library, rows, np.ascontiguousarray(vector))


def union(sets: Ints, chosen: npt.NDArray[np.int64], num_rows: int, *, backend: Backend = "auto") -> Ints:
    """The sorted union of rows of `sets` (m, r), numbers 0 to num_rows - 1, and 0: (U,)."""
    library = load_kernels("token_scores") if backend == "auto" else None
    return union_reference(sets, chosen) if library is None else union_native(library, sets, chosen, num_rows)
