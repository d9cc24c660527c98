"""Counts that fade by half in a half-life, without a clock: forward decay in logarithms.

An item's level is log2 of the sum over its events of w 2^(t / h): w an event's weight, t its time, h the half-life. The
sum grows with every event and nothing has to fade: what an item counts now is 2^(level - now / h), and the order of
items is that of their levels at any time. Logarithms keep the numbers small however long it goes on (a level is about
the number of half-lives since 1970).

Source: Cormode, Shkapenyuk, Srivastava, Xu: Forward Decay, ICDE 2009, section III; in logarithms.
"""

import math


def level_of(weight: float, time_ms: int, half_life_s: float) -> float:
    """Of one event. weight: above 0. time_ms: Unix milliseconds."""
    return math.log2(weight) + time_ms / (1000 * half_life_s)


def joined(one: float, other: float) -> float:
    """The level of the events of both."""
    high, low = max(one, other), min(one, other)
    return high + math.log2(1 + math.exp2(low - high))


def without(level: float, taken: float) -> float | None:
    """The level of what is left when events of `taken` go; None where that is nothing."""
    left = 1 - math.exp2(min(0.0, taken - level))
    # What is left of rounding is no event.
    return level + math.log2(left) if left > 1e-9 else None


def count_at(level: float, now_ms: int, half_life_s: float) -> float:
    """What events of this level count at a time: one of weight 1 half a half-life ago counts 0.71."""
    return math.exp2(min(1000.0, level - now_ms / (1000 * half_life_s)))
