"""The phrases to score: m vectors c_i, each with its r most probable phrases (PIXAR, section 4.2).

A query's x_0 selects the k vectors c_i with the largest <x_0, c_i>. The union of their sets and [PAD] is scored.

Letters: m vectors, r tokens of a set, k joined sets, U union, D width, V vocabulary size.
"""

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.token_scores import products, union

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


class Shortlist:
    def __init__(self, centers: Floats, sets: Tokens, *, num_tokens: int) -> None:
        """Take centers (m, D) float32 and sets (m, r) int32 of tokens below V = `num_tokens`. Raises: ValueError."""
        if centers.ndim != 2 or sets.ndim != 2 or len(centers) != len(sets) or 0 in centers.shape + sets.shape:
            raise ValueError(f"centers {centers.shape} and sets {sets.shape}; allowed: (m, D) and (m, r), at least 1")
        if not np.isfinite(centers).all():
            raise ValueError("centers hold a value that is not finite")
        if sets.min() < 0 or sets.max() >= num_tokens:
            raise ValueError(f"sets hold tokens {sets.min()} to {sets.max()}; allowed: 0 to {num_tokens - 1}")
        self.centers = np.ascontiguousarray(centers, dtype=np.float32)
        self.sets = np.ascontiguousarray(sets, dtype=np.int32)
        self.num_tokens = num_tokens

    @property
    def nbytes(self) -> int:
        return self.centers.nbytes + self.sets.nbytes

    def tokens(self, x0: Floats, k: int) -> Tokens:
        """The padding token and the tokens of the k sets nearest to x0 (D,): (U,) int32, sorted, unique.

        k above m selects all sets. Ties go to the lower number. Raises: ValueError for another width, k below 1, or a
        non-finite value.
        """
        if x0.shape != (self.centers.shape[1],):
            raise ValueError(f"x0 has shape {x0.shape}; allowed: ({self.centers.shape[1]},)")
        if k < 1:
            raise ValueError(f"k={k} allowed: at least 1")
        if not np.isfinite(x0).all():
            raise ValueError("x0 holds a value that is not finite")
        near = products(self.centers, x0.astype(np.float32))
        nearest = np.argsort(-near, kind="stable")[:k]
        return union(self.sets, nearest, self.num_tokens)
