"""The output layer: a row per phrase, in int8 or half precision, memory-mapped.

log P~_t(v | q) = <x_t, w_v>: training drives the partition sum to 1 (loss l3), so nothing is summed over the
vocabulary. Five million int8 rows of width 384 have 1.9 GB; a query reads a shortlist of 25,000 rows.

Letters: V vocabulary size, D width, s positions, U requested tokens.
"""

from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.token_scores import CodedRows, HalfRows, code_rows, token_scores

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


class OutputLayer:
    """Weights (V, D) of the vocabulary's phrases. Immutable, so thread-safe."""

    def __init__(self, rows: CodedRows | HalfRows) -> None:
        self._rows = rows

    @classmethod
    def from_weights(cls, weights: Floats, *, precision: Literal["int8", "float16"] = "int8") -> Self:
        """Build from float32 (V, D). With int8, each row has its own quantisation step, so a score's error is at most
        ||x||_1 step / 2 plus the query's rounding.

        Raises: ValueError for no rows, other precisions, or a non-finite weight.
        """
        if weights.ndim != 2 or 0 in weights.shape:
            raise ValueError(f"weights have shape {weights.shape}; allowed: (V, D), both at least 1")
        if not np.isfinite(weights).all():
            raise ValueError("weights hold a value that is not finite")
        if precision == "int8":
            return cls(code_rows(weights))
        if precision == "float16":
            if np.abs(weights).max() > np.finfo(np.float16).max:
                raise ValueError(f"weights reach {np.abs(weights).max()}; float16 ends at {np.finfo(np.float16).max}")
            return cls(HalfRows(np.ascontiguousarray(weights, dtype=np.float16)))
        raise ValueError(f"precision={precision!r} allowed: int8, float16")

    def __len__(self) -> int:
        return len(self._rows.weights)

    @property
    def width(self) -> int:
        return int(self._rows.weights.shape[1])

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def scores(self, x: Floats, tokens: Tokens | None = None) -> Floats:
        """<x_t, w_v> at every position for `tokens`, or for all: x (s, D), tokens (U,) -> (s, U), a view of (U, s).

        Raises: ValueError for another width, a non-finite value, or an unknown token.
        """
        if x.ndim != 2 or x.shape[1] != self.width:
            raise ValueError(f"x has shape {x.shape}; allowed: (s, {self.width})")
        if not np.isfinite(x).all():
            raise ValueError("x holds a value that is not finite")
        if tokens is not None:
            if len(tokens) and not (tokens.min() >= 0 and tokens.max() < len(self)):
                raise ValueError(f"tokens {tokens.min()} to {tokens.max()}; allowed: 0 to {len(self) - 1}")
            tokens = np.ascontiguousarray(tokens, dtype=np.int32)
        return token_scores(self._rows, np.ascontiguousarray(x, dtype=np.float32), tokens)

    def decoded(self, which: slice | npt.NDArray[np.integer]) -> Floats:
        return self._rows.decoded(which)

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Weights and scales for a file; float16 has no scales."""
        scales = self._rows.scales if isinstance(self._rows, CodedRows) else np.zeros(0, dtype=np.float32)
        return {"weights": self._rows.weights, "scales": scales}

    @classmethod
    def from_arrays(cls, weights: npt.NDArray[Any], scales: Floats) -> Self:
        """The inverse of `arrays`, without a copy. Raises: ValueError for shapes that disagree."""
        is_half = weights.dtype == np.float16
        if 0 in weights.shape or len(scales) != (0 if is_half else len(weights)):
            raise ValueError(f"{weights.dtype} weights of shape {weights.shape} with {len(scales)} scales")
        return cls(HalfRows(weights) if is_half else CodedRows(weights, scales))
