"""Recommend: read the user's state, search, rerank where rules ask; at each failure take the next best way and say so.

The order of retreat: a stored state that reflects the whole history, a state made of that history now, the stored state
as it is, popular items; the reranker's order, then the first stage's. Who comes beyond the door's limit is answered
popular items at once. It never fails for a dependency's sake: only a bad request or a spent deadline ends in an error.
Words only widen the pool: the user's model orders it. Knows ports, not processes.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from services.algorithms.attributes import Kinds
from services.algorithms.event_schema import EventSchema
from services.algorithms.filters import ItemFilter
from services.algorithms.indexes.protocol import ESTIMATE
from services.algorithms.rank_fusion import reciprocal_rank_fusion
from services.algorithms.reserved import MAX_POSITIONS, draw_slots
from services.algorithms.rules import Rule
from services.contracts.query_state import PackedQueryState
from services.gateway.domain import (
    Degradation,
    FreshnessToken,
    HistoryEvent,
    Pool,
    Ranking,
    Recommendation,
    RecommendQuery,
    ScoredItem,
    Seen,
    last_event_ms,
    now_ms,
    seen_in,
    turned_down_in,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Ports
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.favoured import MAX_FAVOURED, favours, of_both, with_favours
from services.gateway.recommend.pages import KEPT_S, MAX_LISTS, PageTokens, Place, ServedList, find_list, packed_list
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.ruled_pools import (
    rescored,
    searched_for,
    with_items_of,
    with_own_pools,
    with_room,
    within_rules,
)
from services.gateway.recommend.shown_before import (
    ANSWERS_KEPT_S,
    MAX_ANSWERS,
    MAX_IMPRESSIONS,
    MAX_ITEMS_OF_ANSWER,
    discounted,
    discounts_of,
    not_again,
    packed_items,
)
from services.gateway.recommend.token_waits import TokenWaits, is_reached
from services.gateway.search.text_retrieval import TextRetrieval, without_seen
from services.gateway.stages import FoundState, Limits, Stages, Work
from services.gateway.validation import MAX_K, check_query, with_times
from services.gateway.write.lag import AcknowledgedLag
from services.platform.errors import DependencyUnavailable
from services.platform.large_requests import in_turn
from services.platform.rpc import admission
from services.user_state.layout import ANSWERS, IMPRESSIONS, PAGES
from services.user_state.values import StoredState, UserView

MAX_POOL = 10_000
# How often a pool is widened for an answer that limits left short. One more is rare on catalogues with 18 categories.
MAX_WIDENINGS = 8
# So many of the newest items are looked at, and reserved positions drawn from so many of the person's best of them.
MAX_NEW, NEW_DRAWN_FROM = 500, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommend:
    """The handler; one per process, called concurrently."""

    ports: Ports
    stages: Stages
    text: TextRetrieval
    tokens: TokenWaits
    lag: AcknowledgedLag
    popular: PopularItems
    metrics: GatewayMetrics
    model_version: str
    schema: EventSchema
    exposures: Exposures
    pages: PageTokens
    kinds: Kinds
    # Of the model's scores.
    tau: float
    limits: Limits
    rules: Sequence[Rule]
    rng: Random

    async def __call__(self, query: RecommendQuery) -> Recommendation:
        """Answer `query`.

        Raises: InvalidRequest naming the field; DeadlineExceeded when the caller's time was spent on the way.
        """
        asked_ms = now_ms()
        await in_turn(check_query, query, asked_ms, self.kinds)
        asked = replace(query, k=max(query.k, query.page_depth), rules=(*self.rules, *query.rules))
        work = Work.begin(asked, budget_s=self.limits.budget_s)
        if query.page_token:
            return await self._next_page(work, asked_ms)
        slot = admission.current.get()
        at_ms = asked_ms if query.as_of_ms is None else query.as_of_ms
        found = FoundState()
        if slot is not None and slot.is_surplus:
            work.mark(Degradation.BUSY)
            self._token_failed(work)
        else:
            if query.not_again is not None or (query.user_id and self.limits.impression_discount):
                await self._read_shown(work, asked_ms)
            if query.history:
                found = await self._from_request(work, with_times(query.history, at_ms))
            else:
                found = await self._from_store(work)
        query_state = self.stages.asked_with(work, found, at_ms)
        if not self.ports.stream.log_reachable:
            work.mark(Degradation.NOT_FRESH)

        ranking: Ranking | None = None
        if query_state is not None:
            ranking = await self._found(work, query_state)
            if ranking is not None and self.limits.new_item_share:
                ranking = await self._with_new_items(work, query_state, ranking, asked_ms)
            if ranking is None:
                # There is a state as fresh as the token says, and popular items are not answered from it.
                self._token_failed(work)
        if ranking is None:
            ranking = self._popular_items(work)
            found, work.absence_bucket = FoundState(), 0
        ranking = replace(ranking, searched_share=work.searched_share)
        served = ServedList(ranking=ranking, model_version=self.model_version, degradations=tuple(work.degradations))
        next_page = None
        if query.page_depth and len(ranking.items) > query.k and Degradation.BUSY not in work.degradations:
            next_page = self.pages.begin(query.k, work.absence_bucket)
            entry = packed_list(next_page, served)
            if not await self.stages.keep(work, PAGES, entry, most=MAX_LISTS, ttl_seconds=KEPT_S):
                next_page = None
        answer = await self._answer(work, query.k, served, next_page, stored=found.stored, source=found.source)
        self.metrics.answered(answer, had_token=query.token is not None)
        return answer

    async def _next_page(self, work: Work[RecommendQuery], asked_ms: int) -> Recommendation:
        """The next items of a kept list that may still be answered.

        Raises: as `PageTokens.place`; PreconditionFailed for a list that has ended; DependencyUnavailable.
        """
        query = work.query
        place = self.pages.place(query.page_token, query.user_id)
        kept = await self.stages.read_sessions(work, {PAGES: MAX_LISTS})
        if kept is None:
            raise DependencyUnavailable("the state store, which keeps the list, did not answer", retry_after_ms=500)
        served = find_list(kept[PAGES], place)
        work.degradations, work.searched_share = list(served.degradations), served.ranking.searched_share
        work.absence_bucket = place.absence_bucket
        work.token_honoured = Degradation.TOKEN_NOT_HONOURED not in work.degradations
        items = served.ranking.items
        rows = [row for row in range(place.offset, len(items)) if items[row].item_id not in self.popular.withdrawn]
        rows = rows[: query.k]
        end = rows[-1] + 1 if rows else len(items)
        page = replace(served, ranking=replace(served.ranking, items=[items[row] for row in rows]))
        next_page = replace(place, offset=end) if end < len(items) else None
        return await self._answer(
            work, query.k, page, next_page, stored=None, source="page", first_position=place.offset + 1
        )

    async def _answer(
        self,
        work: Work[RecommendQuery],
        k: int,
        served: ServedList,
        next_page: Place | None,
        *,
        stored: StoredState | None,
        source: str,
        first_position: int = 1,
    ) -> Recommendation:
        """The first k items of what is served, as they go out."""
        user_id, ranking = work.query.user_id, served.ranking
        items = ranking.items[:k]
        if work.query.not_again is not None and items:
            entry = packed_items(now_ms(), [item.item_id for item in items[:MAX_ITEMS_OF_ANSWER]])
            await self.stages.keep(work, ANSWERS, entry, most=MAX_ANSWERS, ttl_seconds=ANSWERS_KEPT_S)
        work.times.close(work.end())
        return Recommendation(
            items=items,
            model_version=served.model_version,
            index_version=ranking.index_version,
            state=stored,
            token_honoured=work.token_honoured,
            degradations=work.degradations,
            certificate=ranking.certificate,
            stage_times=work.times,
            state_source=source,
            index_freshness=ranking.index_freshness,
            exposure_id=self.exposures.shown(
                "recommend",
                user_id,
                item_ids=[item.item_id for item in items],
                scores=[item.score for item in items],
                sources=[item.source for item in items],
                propensities=() if all(item.propensity == 1 for item in items) else [one.propensity for one in items],
                model_version=served.model_version,
                index_version=ranking.index_version,
                first_position=first_position,
                context=work.query.context,
                absence_bucket=work.absence_bucket,
            ),
            next_page_token="" if next_page is None else self.pages.token(next_page, user_id),
            searched_share=work.searched_share,
            absence_bucket=work.absence_bucket,
        )

    async def _read_shown(self, work: Work[RecommendQuery], asked_ms: int) -> None:
        """Leave out what is not to come again, and take discounts for what was seen."""
        limits, asked = self.limits, work.query.not_again
        wanted = {} if asked is None else {ANSWERS: MAX_ANSWERS}
        if limits.impression_discount:
            wanted[IMPRESSIONS] = MAX_IMPRESSIONS
        kept = await self.stages.read_sessions(work, wanted)
        if kept is None:
            work.mark(Degradation.STATE_STORE_DOWN)
            return
        if asked is not None:
            wants = work.query.filter
            denied = (*wants.deny_item_ids, *not_again(kept[ANSWERS], asked, asked_ms))
            work.query = replace(work.query, filter=replace(wants, deny_item_ids=denied))
        if limits.impression_discount:
            work.discounts = discounts_of(
                kept[IMPRESSIONS],
                asked_ms,
                discount=limits.impression_discount,
                half_life_s=limits.impression_half_life_s,
            )

    async def _from_store(self, work: Work[RecommendQuery]) -> FoundState:
        """The state that the stream made; made of the stored history where this model's does not reflect all of it."""
        view = await self._read_user(work)
        if view is None:
            return FoundState()
        found = await self.stages.find_state(work, view)
        if not found.answered:
            # The store or the encoder: there may be more to know than popular items tell.
            self._token_failed(work)
        if not found.is_whole:
            self._token_behind(work, found.stored)
        return found

    async def _from_request(self, work: Work[RecommendQuery], history: tuple[HistoryEvent, ...]) -> FoundState:
        """The state of the request's own history; the stored one, marked, when it can't be computed."""
        if work.query.user_id:
            view, encoded = await asyncio.gather(self._read_user(work), self.stages.encode(work, history))
        else:
            view, encoded = None, await self.stages.encode(work, history)
        own = seen_in(reversed(history), self.schema)
        turned_down = [*turned_down_in(history, self.schema), *(set(work.seen.turned_down) - set(own))]
        work.seen = Seen([*own, *work.seen.item_ids], turned_down)
        if encoded is not None:
            work.num_had = len(set(own))
            if encoded.query_state is None:
                return FoundState()
            last_ms = last_event_ms(history, self.schema)
            return FoundState(query_state=encoded.query_state, last_event_ms=last_ms, source="request")
        if view is not None and view.state is not None:
            work.mark(Degradation.STALE_STATE)
            if not view.reaches_history:
                self._token_behind(work, view.state)
            return FoundState.of_stored(view.state)
        return FoundState()

    async def _read_user(self, work: Work[RecommendQuery]) -> UserView | None:
        """The user's view, waiting for the token where there is one; None when the store does not answer."""
        token = work.query.token
        partition = None if token is None else token.partition
        view = await self.stages.read_user(work, with_seen=True, partition=partition)
        if view is not None and token is not None and not is_reached(view, token):
            view = await self._wait_for(work, view, token)
        if view is None:
            work.mark(Degradation.STATE_STORE_DOWN)
            self._token_failed(work)
            return None
        if token is not None and not is_reached(view, token):
            self._token_failed(work)
        if view.is_lost:
            work.mark(Degradation.HISTORY_INCOMPLETE)
            self._token_failed(work)
        if self.lag.behind(view.partition, view.watermark):
            work.mark(Degradation.NOT_FRESH)
        if self.lag.reads_stand_back(view.partition, view.watermark):
            admission.stand_back()
        work.seen, work.num_had = Seen(view.seen, view.turned_down), len(view.seen)
        return view

    async def _wait_for(self, work: Work[RecommendQuery], view: UserView, token: FreshnessToken) -> UserView | None:
        """Wait until the token is reached, its epoch is gone, or the time for waiting is up; then read again.

        Not while the log is unreachable, when nothing new is applied: the call would need nearly all of its time.
        """
        began = time.monotonic()
        until = work.deadline - self.limits.token_reserve_s
        is_futile = view.epoch != token.epoch or not self.ports.stream.log_reachable
        if is_futile or not await self.tokens.wait(work.query.user_id, token, until):
            return view
        work.times.queue_ms += (time.monotonic() - began) * 1000
        return await self.stages.read_user(work, with_seen=True, partition=token.partition)

    def _token_failed(self, work: Work[RecommendQuery]) -> None:
        if work.query.token is not None:
            work.token_honoured = False
            work.mark(Degradation.TOKEN_NOT_HONOURED)

    def _token_behind(self, work: Work[RecommendQuery], state: StoredState | None) -> None:
        """The state is older than the watermark that the token was judged by: its own position decides."""
        token = work.query.token
        if token is None:
            return
        if state is None or state.partition != token.partition or state.offset < token.offset:
            self._token_failed(work)

    async def _found(self, work: Work[RecommendQuery], state: PackedQueryState) -> Ranking | None:
        """From candidates alone, unless words widen the choice or rules look at more than the k best."""
        query = work.query
        by_words: Sequence[str] = ()
        # Category limits, diversity and caps choose among the pool: give them more to choose from.
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
        """The k best, popular ones favoured where the person has had few items."""
        if work.num_had >= self.limits.cold_items:
            return await self.stages.search(work, state, k)
        # Whatever is left out item by item: a score does not depend on what else is not answered.
        popular = replace(work.query.filter, deny_item_ids=(), exclude_seen=False)
        favour = favours(self.popular.top(MAX_FAVOURED, popular, (), 0), self.tau)
        if not favour:
            return await self.stages.search(work, state, k)
        found, among = await asyncio.gather(
            self.stages.search(work, state, k), self.stages.search_among(work, state, list(favour), len(favour))
        )
        return found if found is None or among is None else with_favours(found, among, favour, k)

    async def _with_new_items(
        self, work: Work[RecommendQuery], state: PackedQueryState, ranking: Ranking, asked_ms: int
    ) -> Ranking:
        """The ranking with some of its positions given to the person's best new items."""
        query, items = work.query, ranking.items
        since_ms = asked_ms - round(self.limits.new_item_age_s * 1000)
        asked_for = frozenset(query.filter.allow_item_ids)
        # What they score is heard of in its turn: those that stand in the answer already are not drawn again.
        shown = [item.item_id for item in items]
        in_answer = frozenset(shown)
        fresh = [
            item_id
            for item_id in self.popular.newest(since_ms, MAX_NEW)
            if item_id not in in_answer and (not asked_for or item_id in asked_for)
        ]
        for rule in query.rules:
            if rule.bury:  # a reserved position lifts nothing that a rule holds down
                buried = self.popular.named(rule.which, fresh)
                fresh = [item_id for item_id, is_buried in zip(fresh, buried, strict=True) if not is_buried]
        if not fresh:
            return ranking
        is_ruled = bool(query.rules or query.max_per_category or work.discounts)
        found = await self.stages.search_among(work, state, fresh, len(fresh) if is_ruled else NEW_DRAWN_FROM)
        if found is None:
            return ranking
        free, new, share = list(range(len(items))), list(found.items), self.limits.new_item_share
        if is_ruled:
            end = len(items)
            for pin in sorted({rule.pin for rule in query.rules if rule.pin}, reverse=True):
                # Behind the end of an answer a pin is at its end.
                at = min(pin, end) - 1
                there = shown[at : at + 1]
                if any(self.popular.named(rule.which, there).any() for rule in query.rules if rule.pin == pin):
                    free.remove(at)
                    end = at
            new = rescored(new, query, work.discounts, self.popular)
            # Any draw keeps the limits: they admit all of these together, beside what every draw leaves.
            for dropped in (math.floor(share * min(len(free), MAX_POSITIONS)), 0):
                gone = set(free[len(free) - dropped :])
                kept = [item for row, item in enumerate(items) if row not in gone]
                both = within_rules([*kept, *new], len(items) + NEW_DRAWN_FROM, query, self.popular, pins=False)
                admitted = [item for item in both if item.item_id not in in_answer][:NEW_DRAWN_FROM]
                if len(admitted) >= dropped:
                    break
            new = admitted
        if not new:
            return ranking
        slots = draw_slots(len(free), len(new), share, self.rng)
        drawn = list(items)
        for at, row, chance in zip(free, slots.rows, slots.propensities, strict=True):
            one = items[free[row]] if row >= 0 else replace(new[-1 - row], source="new")
            drawn[at] = replace(one, propensity=chance)
        return replace(ranking, items=drawn)

    async def _propose(
        self, work: Work[RecommendQuery], state: PackedQueryState, wanted: ItemFilter, size: int
    ) -> Pool | None:
        """What the first stage proposes of what is wanted, and what each rule needs of it."""
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
        """What the request's words find, best first."""
        query = work.query
        answers = await self.text.find(
            query.query,
            k=min(MAX_K, max(self.limits.recommend_depth, query.k)),
            filter=without_seen(query.filter, work.seen.item_ids),
            # The pool still has to be ranked.
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
            # The filter allows nothing that the index has.
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
            if not is_limited or len(ranking.items) == query.k or pool.bound == -math.inf:
                return ranking
            beside = with_room(wanted, ranking.items, query, self.popular)
            # Where no filter says what is full, a larger pool has to do.
            size = size if beside != wanted else min(MAX_POOL, 4 * size)
            more = await self._propose(work, state, beside, size)
            if more is None:
                break
            joined = with_items_of(more, pool)
            longer = await rerank(_joined(joined, by_words))
            if longer is None or len(joined.item_ids) > MAX_POOL:
                break
            ranking = replace(longer, certificate=of_both(longer, ranking))
            pool, wanted = joined, beside
        # There may be more that the limits admit.
        return replace(ranking, certificate=ESTIMATE)

    def _popular_items(self, work: Work[RecommendQuery]) -> Ranking:
        query = work.query
        work.mark(Degradation.POPULAR_FALLBACK)
        if not self.popular.knows_withdrawn:
            work.mark(Degradation.PARTIAL_CATALOGUE)
        # Boosts and buries are in units of the model's scores; pins and caps are in none.
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
    """The pool with what words found. Its bound stays true, since it speaks of all that the first stage left out; so
    does a vote of 0, since every voted item is in the first stage's pool."""
    there = set(pool.item_ids)
    joining = [item_id for item_id in by_words if item_id not in there][: max(0, MAX_POOL - len(there))]
    if not joining:
        return pool
    return replace(
        pool,
        item_ids=[*pool.item_ids, *joining],
        votes=[*pool.votes, *(0.0 for _ in joining)] if pool.votes else (),
    )
