"""Forward decay: recent interactions of an item weigh more, without touching what was added before.

An interaction at time t weighs 2 ** ((t - landmark) / half_life) relative to the landmark before it, so sums of one
landmark's segment add in any order; segments meet only when they are read, where their ratio is an exact power of two
(a segment is 8 half-lives long). A decay that all of an item's interactions share cancels in the normalisation: that
an item as a whole grows stale is the model share's work (policy.py).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.exact_floats import Doubles, exp_of_negative

_LN2 = 0.6931471805599453
SEGMENT_HALF_LIVES = 8
"""Weights within a segment differ by 2**8 at most; an item holds one sum per segment in which it was used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardDecay:
    """`half_life_seconds` of an interaction's weight, whole seconds; 0 turns decay off (one segment, all factors 1)."""

    half_life_seconds: int = 0
    epoch_seconds: int = 0

    def __post_init__(self) -> None:
        if self.half_life_seconds < 0:
            raise ValueError(f"half_life_seconds={self.half_life_seconds} allowed: 0 (no decay) or more")

    @property
    def segment_seconds(self) -> int:
        return SEGMENT_HALF_LIVES * self.half_life_seconds

    def segments(self, event_seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The segment of each time, counted from the epoch; negative before it."""
        if not self.half_life_seconds:
            return np.zeros(len(event_seconds), dtype=np.int64)
        return np.asarray((event_seconds - self.epoch_seconds) // self.segment_seconds)

    def factors(self, event_seconds: npt.NDArray[np.int64]) -> Doubles:
        """What an interaction's weight is multiplied by within its segment: 1 up to 2**8."""
        if not self.half_life_seconds:
            return np.ones(len(event_seconds))
        into = (event_seconds - self.epoch_seconds) % self.segment_seconds
        before_end = (self.segment_seconds - into).astype(np.float64)
        return np.asarray(np.ldexp(exp_of_negative(before_end * (-_LN2 / self.half_life_seconds)), SEGMENT_HALF_LIVES))
