"""Popularity for people of whom little is known: popular items score more, as long as few events speak for somebody.

A favoured item of count n scores WEIGHT · tau · ln(n / n_200) more, n_200 the count of the 200th: those beyond score
what they scored, so an answer is proven with one more search, among the favoured. A model trained with sampled
negatives leaves popularity out, and the states of a few events say little (docs/decisions/057-popularity.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.algorithms.indexes.protocol import ESTIMATE, Certificate
from services.gateway.domain import Ranking, ScoredItem

# In units of tau, the model's own scale of scores.
WEIGHT = 2.0
MAX_FAVOURED = 200


def favours(popular: Sequence[ScoredItem], tau: float) -> dict[str, float]:
    """What popular items, with their shares as scores, score more, by id."""
    counted = [item for item in popular if item.score > 0]
    if not counted:
        return {}
    least = counted[-1].score
    return {item.item_id: WEIGHT * tau * math.log(item.score / least) for item in counted}


def with_favours(found: Ranking, among: Ranking, favour: Mapping[str, float], k: int) -> Ranking:
    """The best k by favoured scores. found: the best k of all items. among: all favoured ones."""
    own = {item.item_id for item in found.items}
    items = [*found.items, *(item for item in among.items if item.item_id not in own)]

    def favoured(item: ScoredItem) -> float:
        return item.score + favour.get(item.item_id, 0.0)

    # Of some 200 items k go out: only those are made anew.
    best = [
        replace(item, score=favoured(item), source=item.source if item.item_id in own else "popular")
        for item in sorted(items, key=favoured, reverse=True)[:k]
    ]
    return replace(found, items=best, certificate=of_both(found, among))


def of_both(found: Ranking, among: Ranking) -> Certificate:
    """What holds of both searches; nothing where the index changed in between."""
    if found.index_version != among.index_version:
        return ESTIMATE
    return max(found.certificate, among.certificate, key=lambda one: math.inf if one.gap is None else one.gap)
