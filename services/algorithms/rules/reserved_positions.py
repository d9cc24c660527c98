"""Reserve positions of an answer for new items, at random, with known chances.

R of the k positions are reserved. R is share * k, rounded up or down at random so that its mean is share * k, but at
most m. The reserved positions are drawn uniformly, and so are their R new items.

A new item is at a position with chance E[R] / (k m). With ranks and positions from 1, the ordinary item of rank r is at
position j if j - r positions before it are reserved and j is not. The chance is C(j-1, j-r) C(k-j, R-j+r) / C(k, R),
averaged over R.

Letters: k positions, m new items, R reserved positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# Beyond this position, chances are too small to learn from, and binomials too large.
MAX_POSITIONS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """The item at each position, with the chance that it is there.

    rows: an ordinary item's rank (from 0), or -1 - n for new item n.
    """

    rows: Sequence[int]
    propensities: Sequence[float]


def draw_slots(k: int, num_new: int, share: float, rng: Random) -> Slots:
    """Fill k positions; only the first `MAX_POSITIONS` may get new items."""
    taking = min(k, MAX_POSITIONS)
    chances = _counts(taking, num_new, share)
    drawn = rng.choices(list(chances), weights=list(chances.values()))[0]
    reserved = set(rng.sample(range(taking), drawn))
    order = rng.sample(range(num_new), drawn)
    of_new = sum(count * chance for count, chance in chances.items()) / (taking * num_new) if taking * num_new else 0.0
    rows: list[int] = []
    propensities: list[float] = []
    ordinary = 0
    for position in range(k):
        if position in reserved:
            rows.append(-1 - order.pop())
            propensities.append(of_new)
        else:
            rows.append(ordinary)
            propensities.append(_chance(position, ordinary, taking, chances))
            ordinary += 1
    return Slots(rows=rows, propensities=propensities)


def _counts(taking: int, num_new: int, share: float) -> dict[int, float]:
    wanted = share * taking
    least = math.floor(wanted)
    chances: dict[int, float] = {}
    for count, chance in ((least, 1 - (wanted - least)), (least + 1, wanted - least)):
        if chance > 0:
            num_reserved = min(count, num_new, taking)
            chances[num_reserved] = chances.get(num_reserved, 0.0) + chance
    return chances


def _chance(position: int, rank: int, taking: int, chances: dict[int, float]) -> float:
    if position >= taking:
        return chances.get(position - rank, 0.0)
    before = position - rank
    return sum(
        chance
        * math.comb(position, before)
        * math.comb(taking - position - 1, count - before)
        / math.comb(taking, count)
        for count, chance in chances.items()
        if count >= before
    )
