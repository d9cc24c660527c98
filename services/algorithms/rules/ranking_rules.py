"""Rules over a ranking: boosts and buries of scores, pinned positions, caps.

A boost adds to the score of every item that it names, a bury takes from it; of several the sum counts. Of what the
first stage left out nothing is known but bounds: its own, and one for each boost from a search among that boost's
items. An item that was left out and that the boosts S name scores at most the least of these bounds and the sum of S;
buries only lower. So an answer under rules is exact, or says how far off it may be, like any other.

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
    """`which` names items by everything that it gives: ids, categories, conditions. One of the effects is not 0."""

    name: str
    which: ItemFilter
    boost: float = 0.0
    bury: float = 0.0
    pin: int = 0
    cap: int = 0

    @property
    def adds(self) -> float:
        """What it adds to a score, in similarity units."""
        return self.boost - self.bury


def added(rules: Sequence[Rule], masks: Sequence[Mask]) -> npt.NDArray[np.float64]:
    """What the rules add to the scores of n items: (n,). masks: for each rule, which items it names."""
    return np.asarray(np.sum([rule.adds * mask for rule, mask in zip(rules, masks, strict=True)], axis=0))


def bound_with_boosts(bound: float | None, boosts: Sequence[tuple[float, float | None]]) -> float | None:
    """Of what was left out of the pool and of every boost's own search: no final score is above it.

    bound: of the pool. boosts: what each adds, above 0, and the bound of the search among its items; None: no proof.
    For every least bound the most is added by all boosts whose own bound is no lower.
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
