"""Forward decay: an item's recent interactions weigh more; earlier sums do not change.

An interaction at time t weighs 2 ** ((t - landmark) / half_life) relative to the landmark before it. Sums of one
landmark's segment add in any order. Readers combine segments (8 half-lives each) by exact powers of two. A decay common
to all interactions of an item cancels in the normalisation; the model weight (policy.py) handles items that age as a
whole.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.exact_floats import Doubles, exp_of_negative

_LN2 = 0.6931471805599453
SEGMENT_HALF_LIVES = 8
"""Weights within a segment differ by at most 2**8; an item has one sum per segment with interactions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardDecay:
    """half_life_seconds: of an interaction's weight, whole seconds; 0 turns decay off (one segment, all factors 1)."""

    half_life_seconds: int = 0
    epoch_seconds: int = 0

    def __post_init__(self) -> None:
        if self.half_life_seconds < 0:
            raise ValueError(f"half_life_seconds={self.half_life_seconds} allowed: 0 (no decay) or more")

    @property
    def segment_seconds(self) -> int:
        return SEGMENT_HALF_LIVES * self.half_life_seconds

    def segments(self, event_seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the segment of each time, counted from the epoch; negative before it."""
        if not self.half_life_seconds:
            return np.zeros(len(event_seconds), dtype=np.int64)
        return np.asarray((event_seconds - self.epoch_seconds) // self.segment_seconds)

    def factors(self, event_seconds: npt.NDArray[np.int64]) -> Doubles:
        """Return the factors of interactions' weights within their segments: 1 to 2**8."""
        if not self.half_life_seconds:
            return np.ones(len(event_seconds))
        into = (event_seconds - self.epoch_seconds) % self.segment_seconds
        before_end = (self.segment_seconds - into).astype(np.float64)
        return np.asarray(np.ldexp(exp_of_negative(before_end * (-_LN2 / self.half_life_seconds)), SEGMENT_HALF_LIVES))
