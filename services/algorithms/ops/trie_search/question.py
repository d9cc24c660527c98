"""What is asked of a trie and what comes back. Knows only arrays.

Letters: s positions, U tokens scored, K results.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_POSITIONS = 12  # a node keeps a score for each set of as many used positions as it is deep: C(12, 6) = 924


@dataclass(frozen=True, kw_only=True, slots=True)
class TrieQuestion:
    """Tokens (U,) int32, rising, and gains (U, s) float32, C-contiguous: what token u adds at position t.

    `beams` nodes are kept per level and part, `results` identifiers come back. `in_order`: token i at position i alone.
    """

    tokens: npt.NDArray[np.int32]
    gains: npt.NDArray[np.float32]
    beams: int
    results: int
    in_order: bool

    def __post_init__(self) -> None:
        if self.gains.shape[0] != len(self.tokens) or not 1 <= self.gains.shape[1] <= MAX_POSITIONS:
            raise ValueError(
                f"gains have shape {self.gains.shape}; allowed: ({len(self.tokens)}, 1 to {MAX_POSITIONS})"
            )
        for name in ("beams", "results"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} allowed: at least 1")


@dataclass(frozen=True, slots=True)
class Found:
    """Best first: identifiers (n,) int32, gains (n,) float32, n at most K. No identifier that was left out gains more
    than `bound`: -inf where no node was dropped for lack of beams."""

    identifiers: npt.NDArray[np.int32]
    gains: npt.NDArray[np.float32]
    bound: float
