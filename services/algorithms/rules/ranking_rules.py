"""Rules over a ranking: boosts and buries of scores, pinned positions, caps.

Boosts add to their items' scores, buries subtract; several add up. The pool bounds s of items outside it, and per boost
a search among its items gives another bound. An omitted item with the boosts S scores at most the least of these bounds
plus the sum of S; buries only lower its score. So an answer under rules is certified as exact or with a gap.
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
    """A boost, bury, pin or cap for the items that match all ids, categories and conditions of `which`. The other three
    are 0.
    """

    name: str
    which: ItemFilter
    boost: float = 0.0
    bury: float = 0.0
    pin: int = 0
    cap: int = 0

    @property
    def adds(self) -> float:
        """The rule's addition to a score, in similarity units."""
        return self.boost - self.bury


def added(rules: Sequence[Rule], masks: Sequence[Mask]) -> npt.NDArray[np.float64]:
    """What the rules add to n items' scores (n,). masks: each rule's items."""
    return np.asarray(np.sum([rule.adds * mask for rule, mask in zip(rules, masks, strict=True)], axis=0))


def bound_with_boosts(bound: float | None, boosts: Sequence[tuple[float, float | None]]) -> float | None:
    """A bound of the final scores of all items outside the pool and every boost's search.

    bound: the pool's bound. boosts: what each boost adds, above 0, and the bound of its search. None means no proof. An
    item's s is at most the least bound of its boosts. For each least bound, the sum is largest with all boosts whose
    bound is not lower.
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
