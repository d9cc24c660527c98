"""Pools for rules: what a boost or a pin names may lie far behind the pool, and is searched for by itself.

The bounds of these searches say how much what was left out could score with its boosts (`algorithms.rules`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from services.algorithms.rules import bound_with_boosts
from services.gateway.domain import AskedRule, Filter, Pool


def searched_for(rule: AskedRule, wanted: Filter) -> Filter | None:
    """The items that a rule needs in the pool: those that it lifts, or those that are left beside what it holds down;
    None where no filter says it (then the pool has to do)."""
    which = rule.which
    if rule.boost or rule.pin:
        allowed = which.allow_item_ids or wanted.allow_item_ids
        if which.allow_item_ids and wanted.allow_item_ids:
            there = frozenset(wanted.allow_item_ids)
            allowed = tuple(item_id for item_id in allowed if item_id in there)
            if not allowed:
                return None
        # An item of both lists of categories: the reranker decides about the request's.
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


def with_own_pools(pool: Pool, own: Sequence[tuple[AskedRule, Pool | None]]) -> Pool:
    """The pool with what was searched for rules, and a bound that holds with boosts, in the pool's units.

    A search that gave nothing, or of another version of the index, leaves no proof where the rule adds something.
    """
    votes = dict(zip(pool.item_ids, pool.votes or [0.0] * len(pool.item_ids), strict=True))
    boosts: list[tuple[float, float | None]] = []
    for rule, found in own:
        fits = found is not None and found.index_version == pool.index_version
        if rule.boost:
            boosts.append((rule.boost, found.bound if found is not None and fits else None))
        if found is not None and fits:
            for item_id, vote in zip(found.item_ids, found.votes or [0.0] * len(found.item_ids), strict=True):
                votes.setdefault(item_id, vote)
    return replace(
        pool,
        item_ids=list(votes),
        votes=list(votes.values()) if pool.votes else (),
        bound=_bound(pool, boosts),
    )


def _bound(pool: Pool, boosts: Sequence[tuple[float, float | None]]) -> float | None:
    """Boosts add to final scores, which are `model_share` of similarities where there are votes."""
    if not boosts or pool.bound is None:
        return pool.bound
    share = pool.model_share if pool.votes else 1.0
    if share <= 0:
        return None
    bound = bound_with_boosts(pool.bound, [(boost / share, own) for boost, own in boosts])
    return bound if bound is None or math.isinf(bound) else math.nextafter(bound, math.inf)
