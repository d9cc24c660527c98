"""Dot products of a few vectors with chosen rows of a large int8 or half-precision matrix, and unions of row sets.

It serves an output layer over millions of phrases. One native call (`cpu.cpp`) reads 25,000 scattered rows once and
multiplies them for all positions.

Letters: V rows, D width, s vectors (positions), U requested rows.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, load_kernels

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_INT64 = ctypes.c_int64
ZERO = 128
LARGEST = 127


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Row v is (weights[v] - 128) * scales[v]. Shapes: weights (V, D) uint8, scales (V,) float32."""

    weights: npt.NDArray[np.uint8]
    scales: Floats

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.scales.nbytes

    def decoded(self, which: slice | npt.NDArray[np.integer]) -> Floats:
        part: Floats = self.weights[which].astype(np.float32) - ZERO
        return part * self.scales[which][:, None]


@dataclass(frozen=True, slots=True)
class HalfRows:
    """Rows (V, D) in float16."""

    weights: npt.NDArray[np.float16]

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def decoded(self, which: slice | npt.NDArray[np.integer]) -> Floats:
        return self.weights[which].astype(np.float32)


def code_rows(weights: Floats) -> CodedRows:
    codes = np.empty(weights.shape, dtype=np.uint8)
    scales = np.empty(len(weights), dtype=np.float32)
    step = max(1, (1 << 24) // weights.shape[1])
    for begin in range(0, len(weights), step):
        part = weights[begin : begin + step]
        scale = np.maximum(np.abs(part).max(axis=1), np.float32(1e-30)) / np.float32(LARGEST)
        codes[begin : begin + step] = np.rint(part / scale[:, None]) + ZERO
        scales[begin : begin + step] = scale
    return CodedRows(codes, scales)


def code_vectors(vectors: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Vector t is codes[t] * steps[t]: codes (s, D), steps (s,)."""
    steps = np.maximum(np.abs(vectors).max(axis=1), np.float32(1e-30)) / np.float32(LARGEST)
    return np.rint(vectors / steps[:, None]).astype(np.int8), steps.astype(np.float32)


def token_scores(
    rows: CodedRows | HalfRows, vectors: Floats, chosen: Ints | None, *, kernels: ctypes.CDLL | None = None
) -> Floats:
    """Products of `vectors` (s, D) with the `chosen` rows (U,), None for all -> (s, U), a view of a (U, s) array.

    With int8 rows, vectors are coded, too (`code_vectors`), and integer products are exact. With float16 rows, products
    and sums are in float32. kernels: library, by default this processor's. Cost: U D bytes read, twice that in float16,
    and U D s multiply-adds.
    """
    library = kernels or load_kernels("token_scores")
    count = len(rows.weights) if chosen is None else len(chosen)
    out = np.empty((count, len(vectors)), dtype=np.float32)
    arrays: tuple[npt.NDArray[np.generic], ...]
    if isinstance(rows, CodedRows):
        function, arrays = library.freshet_integer_scores, (rows.weights, rows.scales, *code_vectors(vectors))
    else:
        function, arrays = library.freshet_half_scores, (rows.weights, vectors)
    places = (address(array) for array in arrays)
    function(*places, *map(_INT64, vectors.shape), address(chosen), _INT64(count), address(out))
    return out.T


def products(rows: Floats, vector: Floats, *, kernels: ctypes.CDLL | None = None) -> Floats:
    """Products (m,) of float32 rows (m, D) with one vector (D,), in one thread, because BLAS takes 0.1 ms to wake
    more.
    """
    library = kernels or load_kernels("token_scores")
    vector, out = np.ascontiguousarray(vector), np.empty(len(rows), dtype=np.float32)
    library.freshet_products(address(rows), address(vector), *map(_INT64, rows.shape), address(out))
    return out


def union(sets: Ints, chosen: npt.NDArray[np.int64], num_rows: int, *, kernels: ctypes.CDLL | None = None) -> Ints:
    """The sorted union of the `chosen` rows of `sets` (m, r) and {0}: (U,). Numbers are 0 to num_rows - 1."""
    function = (kernels or load_kernels("token_scores")).freshet_union
    function.restype = _INT64
    out = np.empty(min(len(chosen) * sets.shape[1] + 1, num_rows), dtype=np.int32)
    count = function(
        address(sets), _INT64(sets.shape[1]), address(chosen), *map(_INT64, (len(chosen), num_rows)), address(out)
    )
    return out[:count].copy() if 2 * count < len(out) else out[:count]
