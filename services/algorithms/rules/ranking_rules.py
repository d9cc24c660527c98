"""Rules over a ranking: boosts and buries of scores, pinned positions, caps.

A boost adds to the score of its items, a bury subtracts; several add up. Items outside the pool have only bounds: the
pool's, and one per boost from a search among that boost's items. An omitted item with the boosts S scores at most the
least of these bounds plus the sum of S; buries only lower that. So an answer under rules is exact or has a gap, like
any other.

Letters: n items.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.rules.filters import ItemFilter

MAX_RULES = 16
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """which: the items that match all its ids, categories and conditions. One of boost, bury, pin and cap is not 0."""

    name: str
    which: ItemFilter
    boost: float = 0.0
    bury: float = 0.0
    pin: int = 0
    cap: int = 0

    @property
    def adds(self) -> float:
        """What the rule adds to a score, in similarity units."""
        return self.boost - self.bury


def added(rules: Sequence[Rule], masks: Sequence[Mask]) -> npt.NDArray[np.float64]:
    """Return the sum of the rules for n items: (n,). masks: for each rule, its items."""
    return np.asarray(np.sum([rule.adds * mask for rule, mask in zip(rules, masks, strict=True)], axis=0))


def bound_with_boosts(bound: float | None, boosts: Sequence[tuple[float, float | None]]) -> float | None:
    """Return a bound of the final scores of all items outside the pool and every boost's search.

    bound: of the pool. boosts: what each adds, above 0, and the bound of the search among its items; None: no proof.
    An item's s is at most the least bound of its boosts. For each least bound, the largest sum is that of all boosts
    whose own bound is not lower.
    """
    if bound is None:
        return None
    found, total = bound, 0.0
    for own, boost in sorted(((math.inf if own is None else own, boost) for boost, own in boosts), reverse=True):
        if own == math.inf:
            return None
        total += boost
        found = max(found, min(bound, own) + total)
    return found
