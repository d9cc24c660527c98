"""Items of a boost or a pin may be outside the pool, so they get a separate search, whose bound limits the boosted
scores of omitted items (`algorithms.rules.ranking_rules`). Limits, caps and pins are applied here if the reranker is
unavailable.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from services.algorithms.rules.diversity import select
from services.algorithms.rules.filters import MAX_CATEGORIES, MAX_IDS, ItemFilter
from services.algorithms.rules.ranking_rules import Rule, bound_with_boosts
from services.gateway.domain import Pool, RecommendQuery, ScoredItem
from services.gateway.recommend.popular import PopularItems


def searched_for(rule: Rule, wanted: ItemFilter) -> ItemFilter | None:
    """Return the filter for the items that a rule boosts or pins, or for all except those that it buries or caps; None
    if no filter can express it.
    """
    which = rule.which
    if rule.boost or rule.pin:
        allowed = which.allow_item_ids or wanted.allow_item_ids
        if which.allow_item_ids and wanted.allow_item_ids:
            there = frozenset(wanted.allow_item_ids)
            allowed = tuple(item_id for item_id in allowed if item_id in there)
            if not allowed:
                return None
        # An item needs a category of both lists. The filter has the rule's; the reranker applies the request's.
        categories = which.allow_categories or wanted.allow_categories
        where = (*wanted.where, *which.where)
        return replace(wanted, allow_item_ids=allowed, allow_categories=categories, where=where)
    if which.where or bool(which.allow_item_ids) == bool(which.allow_categories):
        return None
    return replace(
        wanted,
        deny_item_ids=(*wanted.deny_item_ids, *which.allow_item_ids),
        deny_categories=(*wanted.deny_categories, *which.allow_categories),
    )


def with_own_pools(pool: Pool, own: Sequence[tuple[Rule, Pool | None]]) -> Pool:
    """Join the rules' search results. The bound is valid with boosts; there is none if a boost's search failed or used
    another index version.
    """
    boosts: list[tuple[float, float | None]] = []
    joined = pool
    for rule, found in own:
        fits = found is not None and found.index_version == pool.index_version
        if rule.boost:
            boosts.append((rule.boost, found.bound if found is not None and fits else None))
        if found is not None and fits:
            joined = with_items_of(joined, found)
    return replace(joined, bound=_bound(pool, boosts))


def with_items_of(pool: Pool, other: Pool) -> Pool:
    """Append the items that only the other pool has."""
    there = set(pool.item_ids)
    rows = [row for row, item_id in enumerate(other.item_ids) if item_id not in there]
    return replace(
        pool,
        item_ids=[*pool.item_ids, *(other.item_ids[row] for row in rows)],
        scores=[*pool.scores, *(other.scores[row] for row in rows)],
        votes=[*pool.votes, *(other.votes[row] if other.votes else 0.0 for row in rows)] if pool.votes else (),
    )


def with_room(
    wanted: ItemFilter, answer: Sequence[ScoredItem], query: RecommendQuery, popular: PopularItems
) -> ItemFilter:
    """Return `wanted` without the categories and ids whose limits or caps are reached. Caps that no filter can express
    are ignored.
    """
    item_ids = [item.item_id for item in answer]
    categories: list[str] = []
    if query.max_per_category:
        counts = Counter(name for names in popular.categories_of(item_ids) for name in set(names))
        categories = [name for name, count in counts.items() if count >= query.max_per_category]
    ids: list[str] = []
    for rule in query.rules:
        which = rule.which
        is_one = not which.where and bool(which.allow_item_ids) != bool(which.allow_categories)
        if rule.cap and is_one and popular.named(item_ids, [which])[0].sum() >= rule.cap:
            ids += which.allow_item_ids
            categories += which.allow_categories
    return replace(
        wanted,
        deny_item_ids=tuple(dict.fromkeys([*wanted.deny_item_ids, *ids]))[:MAX_IDS],
        deny_categories=tuple(dict.fromkeys([*wanted.deny_categories, *categories]))[:MAX_CATEGORIES],
    )


def rescored(
    items: Sequence[ScoredItem], query: RecommendQuery, discounts: Mapping[str, float], popular: PopularItems
) -> list[ScoredItem]:
    """Return the items with boosts, buries and discounts in their scores, best first."""
    item_ids = [item.item_id for item in items]
    rules = [rule for rule in query.rules if rule.boost or rule.bury]
    moving = list(zip(rules, popular.named(item_ids, [rule.which for rule in rules]), strict=True))
    found = []
    for row, item in enumerate(items):
        here = [rule for rule, mask in moving if mask[row]]
        score = item.score + sum(rule.adds for rule in here) - discounts.get(item.item_id, 0.0)
        found.append(replace(item, score=score, rules=tuple(rule.name for rule in here)))
    return sorted(found, key=lambda item: -item.score)


def within_rules(
    items: Sequence[ScoredItem], k: int, query: RecommendQuery, popular: PopularItems, *, pins: bool = True
) -> list[ScoredItem]:
    """Return the first k items that category limits and caps admit, with pins at their positions."""
    item_ids = [item.item_id for item in items]
    rules = [rule for rule in query.rules if rule.cap or rule.pin]
    masks = list(zip(rules, popular.named(item_ids, [rule.which for rule in rules]), strict=True))
    rows = select(
        -np.arange(len(items), dtype=np.float64),
        k,
        categories=popular.categories_of(item_ids) if query.max_per_category else None,
        max_per_category=query.max_per_category,
        caps=[(mask, rule.cap) for rule, mask in masks if rule.cap],
        pins=[(mask, rule.pin) for rule, mask in masks if rule.pin and pins],
    )
    return [items[row] for row in rows.tolist()]


def _bound(pool: Pool, boosts: Sequence[tuple[float, float | None]]) -> float | None:
    """With votes, final scores contain similarity * model_share, so boosts are divided by model_share."""
    if not boosts or pool.bound is None:
        return pool.bound
    share = pool.model_share if pool.votes else 1.0
    if share <= 0:
        return None
    bound = bound_with_boosts(pool.bound, [(boost / share, own) for boost, own in boosts])
    return bound if bound is None or math.isinf(bound) else math.nextafter(bound, math.inf)
