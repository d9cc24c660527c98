"""Counts that halve per half-life, without a clock: forward decay in logarithms.

An item's level is log2 of the sum over its events of w 2^(t / h): w an event's weight, t its time, h the half-life. Its
count now is 2^(level - now / h), so items have the same order by level and by count. A level is about the number of
half-lives since 1970.

Source: Cormode, Shkapenyuk, Srivastava, Xu: Forward Decay, ICDE 2009, section III; in logarithms.
"""

import math


def level_of(weight: float, time_ms: int, half_life_s: float) -> float:
    """An event's level. weight: above 0. time_ms: Unix milliseconds."""
    return math.log2(weight) + time_ms / (1000 * half_life_s)


def joined(one: float, other: float) -> float:
    """The level of both sets of events."""
    high, low = max(one, other), min(one, other)
    return high + math.log2(1 + math.exp2(low - high))


def without(level: float, taken: float) -> float | None:
    """The level without events of level `taken`; None if none remain."""
    left = 1 - math.exp2(min(0.0, taken - level))
    # A remainder of 1e-9 or less is rounding error.
    return level + math.log2(left) if left > 1e-9 else None


def count_at(level: float, now_ms: int, half_life_s: float) -> float:
    """The count of a level: an event of weight 1 counts 0.71 after half a half-life."""
    return math.exp2(min(1000.0, level - now_ms / (1000 * half_life_s)))
