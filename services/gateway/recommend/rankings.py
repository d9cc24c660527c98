"""Rank items by the user's state; without a state, return popular items.

Candidates find the k best. With words, rules or limits, the reranker chooses from a pool. If it fails, the answer
has the first stage's order, with limits, caps and pins applied here. Items of a boost or a pin may be outside the pool,
so they get a separate search, whose bound limits the boosted scores of omitted items
(`algorithms.rules.ranking_rules`).

Without a pool, popular items score more while the user has few items (decision 057): an item of count n scores
BOOST_WEIGHT * tau * ln(n / n_200) more, where n_200 is the 200th item's count. The answer's certificate is the weaker
one of the search and a second search among the boosted items.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.algorithms.indexes.protocol import ESTIMATE, Certificate
from services.algorithms.rules.diversity import select
from services.algorithms.rules.filters import MAX_CATEGORIES, MAX_IDS, ItemFilter
from services.algorithms.rules.ranking_rules import Rule, bound_with_boosts
from services.algorithms.text.rank_fusion import reciprocal_rank_fusion
from services.contracts.wire import PackedQueryState
from services.gateway.domain import Degradation, Pool, Ranking, RecommendQuery, RerankQuery, ScoredItem
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.repeats import discounted
from services.gateway.search import TextRetrieval, without_seen
from services.gateway.stages import Stages, Work
from services.gateway.validation import MAX_K


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
        # An item needs a category of each list. The filter has the rule's list; the reranker applies the request's.
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
    """Return the bound with boosts.

    With votes, scores contain similarity * model_share, so boosts are divided by model_share.
    """
    if not boosts or pool.bound is None:
        return pool.bound
    share = pool.model_share if pool.votes else 1.0
    if share <= 0:
        return None
    bound = bound_with_boosts(pool.bound, [(boost / share, own) for boost, own in boosts])
    return bound if bound is None or math.isinf(bound) else math.nextafter(bound, math.inf)


MAX_POOL = 10_000
# Most widenings of a pool; with 18 categories, more are rarely needed.
MAX_WIDENINGS = 8
# Items requested of each text source, at least k.
WORDS_DEPTH = 100
# The weight is in units of tau, the scale of scores.
BOOST_WEIGHT = 2.0
MAX_BOOSTED = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rankings:
    """Ranks items. cold_items: users with fewer items get boosts of popular items."""

    stages: Stages
    text: TextRetrieval
    popular: PopularItems
    cold_items: int

    async def best(self, work: Work[RecommendQuery], state: PackedQueryState) -> Ranking | None:
        """Return the k best; None if candidates do not answer."""
        query = work.query
        by_words: Sequence[str] = ()
        # Limits, diversity and caps need a larger pool.
        chooses = query.max_per_category or query.diversity or any(rule.cap for rule in query.rules)
        size = max(self.stages.limits.pool_size, query.k * (4 if chooses else 2)) + len(work.discounts)
        size = min(MAX_POOL, size)
        if query.query:
            proposed = self._propose(work, state, query.filter, size)
            pool, by_words = await asyncio.gather(proposed, self._find(work))
        elif chooses or query.rules:
            pool = await self._propose(work, state, query.filter, size)
        else:
            found = await self._searched(work, state, query.k + len(work.discounts))
            return found if found is None or not work.discounts else discounted(found, work.discounts, query.k)
        return None if pool is None else await self._rank(work, state, pool, by_words, size)

    async def _searched(self, work: Work[RecommendQuery], state: PackedQueryState, k: int) -> Ranking | None:
        """Search; for users with few items, boost popular items."""
        if work.num_had >= self.cold_items:
            return await self.stages.search(work, state, k)
        # Exclusions of single items do not affect boosts.
        popular = replace(work.query.filter, deny_item_ids=(), exclude_seen=False)
        boost = boosts(self.popular.top(MAX_BOOSTED, popular, (), 0), self.stages.model.tau)
        if not boost:
            return await self.stages.search(work, state, k)
        found, among = await asyncio.gather(
            self.stages.search(work, state, k), self.stages.search(work, state, len(boost), list(boost))
        )
        return found if found is None or among is None else with_boosts(found, among, boost, k)

    async def _propose(
        self, work: Work[RecommendQuery], state: PackedQueryState, wanted: ItemFilter, size: int
    ) -> Pool | None:
        query = work.query
        if not query.rules:
            return await self.stages.propose(work, state, size, wanted)
        among = [(rule, named) for rule in query.rules if (named := searched_for(rule, wanted)) is not None]
        pool, *own = await asyncio.gather(
            self.stages.propose(work, state, size, wanted),
            *(self.stages.propose(work, state, 2 * query.k + len(work.discounts), named) for _, named in among),
        )
        return pool and with_own_pools(pool, [(rule, found) for (rule, _), found in zip(among, own, strict=True)])

    async def _find(self, work: Work[RecommendQuery]) -> Sequence[str]:
        query = work.query
        answers = await self.text.find(
            query.query,
            k=min(MAX_K, max(WORDS_DEPTH, query.k)),
            filter=without_seen(query.filter, work.seen.item_ids),
            # This leaves time to rank the pool.
            left_s=(work.left_s - self.stages.limits.answer_reserve_s) * 2 / 3,
        )
        if any(answer.failed for answer in answers):
            work.mark(Degradation.PARTIAL_SOURCES)
        rankings = {a.source: [hit.item_id for hit in a.hits.items] for a in answers if a.hits is not None}
        return [one.item_id for one in reciprocal_rank_fusion(rankings)]

    async def _rank(
        self, work: Work[RecommendQuery], state: PackedQueryState, pool: Pool, by_words: Sequence[str], size: int
    ) -> Ranking:
        query, wanted = work.query, work.query.filter
        if not pool.item_ids:
            # The filter allows no item of the index.
            return Ranking(items=(), index_version=pool.index_version, index_freshness=pool.index_freshness)
        asked = RerankQuery(
            k=query.k,
            filter=query.filter,
            seen=work.seen.item_ids,
            max_per_category=query.max_per_category,
            diversity=query.diversity,
            discounts=work.discounts,
            rules=query.rules,
        )
        ranking = await self.stages.rerank(work, state, _joined(pool, by_words), asked)
        if ranking is None:
            work.mark(Degradation.FIRST_STAGE_ORDER)
            found = [ScoredItem(*one, "first_stage") for one in zip(pool.item_ids, pool.scores, strict=True)]
            items = within_rules(rescored(found, query, work.discounts, self.popular), query.k, query, self.popular)
            return Ranking(items=items, index_version=pool.index_version, index_freshness=pool.index_freshness)
        is_limited = query.max_per_category or any(rule.cap for rule in query.rules)
        for _ in range(MAX_WIDENINGS):
            is_short = bool(is_limited) and len(ranking.items) < query.k and pool.bound != -math.inf
            if not is_short and (query.max_gap is None or ranking.certificate.proves(query.max_gap)):
                return ranking
            # A proof of `max_gap` needs a bound for the whole filter.
            beside = with_room(wanted, ranking.items, query, self.popular) if is_short else query.filter
            if beside == wanted and size == MAX_POOL:
                break
            size = size if is_short and beside != wanted else min(MAX_POOL, 4 * size)
            more = await self._propose(work, state, beside, size)
            if more is None:
                break
            joined = with_items_of(more, pool)
            longer = await self.stages.rerank(work, state, _joined(joined, by_words), asked)
            if longer is None or len(joined.item_ids) > MAX_POOL:
                break
            # Only a pool under the request's own filter has a bound for the whole filter.
            is_narrowed = beside != query.filter
            ranking = replace(longer, certificate=of_both(longer, ranking)) if is_narrowed else longer
            pool, wanted = joined, beside
        # A short answer is an estimate if the pool may lack items.
        is_full = not is_limited or len(ranking.items) == query.k or pool.bound == -math.inf
        return ranking if is_full else replace(ranking, certificate=ESTIMATE)

    def popular_items(self, work: Work[RecommendQuery]) -> Ranking:
        query = work.query
        work.mark(Degradation.POPULAR_FALLBACK)
        if not self.popular.knows_withdrawn:
            work.mark(Degradation.PARTIAL_CATALOGUE)
        # Boosts and buries are in units of the model's scores; pins and caps are not.
        ruled = [rule for rule in query.rules if rule.pin or rule.cap]
        among = [query.filter, *filter(None, (searched_for(rule, query.filter) for rule in ruled))]
        most = 2 * query.k if ruled else query.k
        best = [self.popular.top(most, wanted, work.seen.item_ids, query.max_per_category) for wanted in among]
        if not ruled:
            return Ranking(items=best[0])
        found = {item.item_id: item for items in best for item in items}
        ranked = sorted(found.values(), key=lambda one: -one.score)
        return Ranking(items=within_rules(ranked, query.k, query, self.popular))


def _joined(pool: Pool, by_words: Sequence[str]) -> Pool:
    """Append items found by words, with vote 0, since all items with votes are in the pool. The bound stays valid."""
    there = set(pool.item_ids)
    joining = [item_id for item_id in by_words if item_id not in there][: max(0, MAX_POOL - len(there))]
    if not joining:
        return pool
    return replace(
        pool,
        item_ids=[*pool.item_ids, *joining],
        votes=[*pool.votes, *(0.0 for _ in joining)] if pool.votes else (),
    )


def boosts(popular: Sequence[ScoredItem], tau: float) -> dict[str, float]:
    """Return the boosts of popular items, whose scores are shares of all counts."""
    counted = [item for item in popular if item.score > 0]
    if not counted:
        return {}
    least = counted[-1].score
    return {item.item_id: BOOST_WEIGHT * tau * math.log(item.score / least) for item in counted}


def with_boosts(found: Ranking, among: Ranking, boost: Mapping[str, float], k: int) -> Ranking:
    """Return the k best by boosted scores. found: the k best of all items. among: all boosted items."""
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
    """Return the weaker certificate; ESTIMATE if the searches used different index versions."""
    if found.index_version != among.index_version:
        return ESTIMATE
    return max(found.certificate, among.certificate, key=lambda one: math.inf if one.gap is None else one.gap)
