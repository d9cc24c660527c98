"""Popular items score more while the user has few events (docs/decisions/057-popularity.md).

An item of count n scores WEIGHT · tau · ln(n / n_200) more, where n_200 is the 200th item's count. Other scores do not
change, so the search and one more among the boosted items prove an answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.algorithms.indexes.protocol import ESTIMATE, Certificate
from services.gateway.domain import Ranking, ScoredItem

# In units of tau, the model's scale of scores.
WEIGHT = 2.0
MAX_BOOSTED = 200


def boosts(popular: Sequence[ScoredItem], tau: float) -> dict[str, float]:
    """Return the boosts of popular items, whose scores are shares."""
    counted = [item for item in popular if item.score > 0]
    if not counted:
        return {}
    least = counted[-1].score
    return {item.item_id: WEIGHT * tau * math.log(item.score / least) for item in counted}


def with_boosts(found: Ranking, among: Ranking, boost: Mapping[str, float], k: int) -> Ranking:
    """Return the k best by boosted scores. found: the k best of all. among: all boosted ones."""
    own = {item.item_id for item in found.items}
    items = [*found.items, *(item for item in among.items if item.item_id not in own)]

    def boosted(item: ScoredItem) -> float:
        return item.score + boost.get(item.item_id, 0.0)

    best = [
        replace(item, score=boosted(item), source=item.source if item.item_id in own else "popular")
        for item in sorted(items, key=boosted, reverse=True)[:k]
    ]
    return replace(found, items=best, certificate=of_both(found, among))


def of_both(found: Ranking, among: Ranking) -> Certificate:
    """Return what both searches prove; nothing if they used different indexes."""
    if found.index_version != among.index_version:
        return ESTIMATE
    return max(found.certificate, among.certificate, key=lambda one: math.inf if one.gap is None else one.gap)
