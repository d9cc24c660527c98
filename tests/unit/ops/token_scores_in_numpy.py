"""The products in NumPy: what `cpu.cpp` is compared with.

Integer products are taken in float32, where they are exact up to width 1032 (127 * 128 * 1032 < 2^24), in float64
beyond. Knows only arrays.

Letters: V rows, D width, s vectors, U rows asked for.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.token_scores import ZERO, CodedRows, CodedVectors, HalfRows

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_EXACT_WIDTH = 1032
_CHUNK = 1 << 14


def integer_scores(rows: CodedRows, vectors: CodedVectors, chosen: Ints | None) -> Floats:
    """(s, U), a view of (U, s); bit for bit what the native products are."""
    count = len(rows.weights) if chosen is None else len(chosen)
    exact: npt.DTypeLike = np.float32 if rows.weights.shape[1] <= _EXACT_WIDTH else np.float64
    out = np.empty((count, len(vectors.steps)), dtype=np.float32)
    codes: npt.NDArray[Any] = vectors.codes.astype(exact).T
    for begin in range(0, count, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        which = part if chosen is None else chosen[part]
        weights: npt.NDArray[Any] = rows.weights[which].astype(exact)
        out[part] = ((weights - ZERO) @ codes).astype(np.float32) * (rows.scales[which][:, None] * vectors.steps)
    return out.T


def half_scores(rows: HalfRows, vectors: Floats, chosen: Ints | None) -> Floats:
    """(s, U), a view of (U, s); sums in BLAS's order."""
    count = len(rows.weights) if chosen is None else len(chosen)
    out = np.empty((count, len(vectors)), dtype=np.float32)
    for begin in range(0, count, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        which = part if chosen is None else chosen[part]
        out[part] = rows.weights[which].astype(np.float32) @ vectors.T
    return out.T
