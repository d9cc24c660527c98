"""Matrices as they are kept for scoring: a byte per weight with a step per row, or half precision.

Codes are unsigned around 128, as the integer dot products of x86 want one side; -128 is not used.

Letters: V rows, D width, s vectors.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

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
    """Shapes: weights (V, D) float16."""

    weights: npt.NDArray[np.float16]

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def decoded(self, which: slice | npt.NDArray[np.integer]) -> Floats:
        return self.weights[which].astype(np.float32)


@dataclass(frozen=True, slots=True)
class CodedVectors:
    """Vector t is codes[t] * steps[t]. Shapes: codes (s, D) int8, steps (s,) float32."""

    codes: npt.NDArray[np.int8]
    steps: Floats


def code_rows(weights: Floats) -> CodedRows:
    """(V, D) float32 by rows, a million at a time or fewer."""
    codes = np.empty(weights.shape, dtype=np.uint8)
    scales = np.empty(len(weights), dtype=np.float32)
    step = max(1, (1 << 24) // weights.shape[1])
    for begin in range(0, len(weights), step):
        part = weights[begin : begin + step]
        scale = np.maximum(np.abs(part).max(axis=1), np.float32(1e-30)) / np.float32(LARGEST)
        codes[begin : begin + step] = np.rint(part / scale[:, None]) + ZERO
        scales[begin : begin + step] = scale
    return CodedRows(codes, scales)


def code_vectors(vectors: Floats) -> CodedVectors:
    """(s, D) float32, each with a step of its own."""
    steps = np.maximum(np.abs(vectors).max(axis=1), np.float32(1e-30)) / np.float32(LARGEST)
    return CodedVectors(np.rint(vectors / steps[:, None]).astype(np.int8), steps.astype(np.float32))
