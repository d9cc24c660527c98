"""Rank items by the user's state; without a state, return popular items.

Candidates find the k best. With words, rules or limits, the reranker chooses from a pool (fallback: the first stage's
order). Popular items score more while the user has few events (decision 057): an item of count n scores
BOOST_WEIGHT * tau * ln(n / n_200) more, where n_200 is the 200th item's count. The search, and one more among the
boosted items, prove such an answer.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.algorithms.indexes.protocol import ESTIMATE, Certificate
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.text.rank_fusion import reciprocal_rank_fusion
from services.contracts.query_state import PackedQueryState
from services.gateway.domain import Degradation, Pool, Ranking, RecommendQuery, ScoredItem
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.repeats import discounted
from services.gateway.recommend.ruled_pools import (
    rescored,
    searched_for,
    with_items_of,
    with_own_pools,
    with_room,
    within_rules,
)
from services.gateway.search.text_retrieval import TextRetrieval, without_seen
from services.gateway.stages import Limits, Stages, Work
from services.gateway.validation import MAX_K

MAX_POOL = 10_000
# How often a pool is widened; a further time is rare on catalogues with 18 categories.
MAX_WIDENINGS = 8
# Items requested of each text source, at least k.
WORDS_DEPTH = 100
# In units of tau, the scale of scores.
BOOST_WEIGHT = 2.0
MAX_BOOSTED = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rankings:
    """Ranks. tau: the scale of scores. cold_items: users with fewer items get boosts of popular items."""

    stages: Stages
    text: TextRetrieval
    popular: PopularItems
    limits: Limits
    tau: float
    cold_items: int

    async def best(self, work: Work[RecommendQuery], state: PackedQueryState) -> Ranking | None:
        """Return the k best; None if candidates do not answer."""
        query = work.query
        by_words: Sequence[str] = ()
        # Limits, diversity and caps need a larger pool.
        chooses = query.max_per_category or query.diversity or any(rule.cap for rule in query.rules)
        size = max(self.limits.pool_size, query.k * (4 if chooses else 2)) + len(work.discounts)
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
        """Boost popular items for users with few items."""
        if work.num_had >= self.cold_items:
            return await self.stages.search(work, state, k)
        # Exclusions of single items do not affect boosts.
        popular = replace(work.query.filter, deny_item_ids=(), exclude_seen=False)
        boost = boosts(self.popular.top(MAX_BOOSTED, popular, (), 0), self.tau)
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
            # The pool must still be ranked.
            left_s=(work.left_s - self.limits.answer_reserve_s) * 2 / 3,
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
        rerank = partial(
            self.stages.rerank,
            work,
            state,
            k=query.k,
            max_per_category=query.max_per_category,
            diversity=query.diversity,
            discounts=work.discounts,
            rules=query.rules,
        )
        ranking = await rerank(_joined(pool, by_words))
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
            longer = await rerank(_joined(joined, by_words))
            if longer is None or len(joined.item_ids) > MAX_POOL:
                break
            # A pool under the request's own filter has a bound for it.
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
    """Append items found by words, with vote 0: the pool has every item with votes. Its bound stays valid."""
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
    """Return the boosts of popular items. Their scores are shares."""
    counted = [item for item in popular if item.score > 0]
    if not counted:
        return {}
    least = counted[-1].score
    return {item.item_id: BOOST_WEIGHT * tau * math.log(item.score / least) for item in counted}


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
