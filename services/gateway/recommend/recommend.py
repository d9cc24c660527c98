"""Recommend: find the user's state, search, rerank if rules need it.

A history in the request is encoded. Without one, the state is the stored state if it reflects the user's whole
history, else one encoded now from the stored history, else the older stored state. If possible, the state includes the
event that the request's token names.

After a failure the next fallback (`rankings`) answers, and the answer is marked. Beyond the concurrency limit, the
answer is popular items. Only a bad request, an exceeded deadline or a further page can fail.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.algorithms.rules.ranking_rules import Rule
from services.contracts.topics.experiments import Assignment
from services.contracts.topics.rules import StandingRules
from services.gateway.dependencies import AcknowledgedLag
from services.gateway.domain import (
    Degradation,
    FreshnessToken,
    HistoryEvent,
    Ranking,
    Recommendation,
    RecommendQuery,
    Seen,
    last_event_ms,
    seen_in,
    turned_down_in,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.new_items import NewItems
from services.gateway.recommend.pages import (
    LIST_TTL_S,
    MAX_LISTS,
    PagePosition,
    PageTokens,
    ServedList,
    find_list,
    packed_list,
)
from services.gateway.recommend.rankings import Rankings
from services.gateway.recommend.repeats import (
    ANSWERS_TTL_S,
    MAX_ANSWERS,
    MAX_IMPRESSIONS,
    MAX_ITEMS_OF_ANSWER,
    discounts_of,
    not_again,
    packed_items,
)
from services.gateway.recommend.standing_rules import LiveRules
from services.gateway.recommend.token_waits import TokenWaits, is_reached
from services.gateway.stages import FoundState, Preferences, Stages, Work
from services.gateway.validation import check_query, with_times
from services.platform.errors import DependencyUnavailable
from services.platform.rpc import admission
from services.platform.threads import in_turn
from services.user_state.layout import ANSWERS, IMPRESSIONS, PAGES
from services.user_state.values import StoredState, UserView, now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStates:
    """Finds states, and adds seen items and recent exposures to the request's `Work`."""

    stages: Stages
    tokens: TokenWaits
    lag: AcknowledgedLag
    preferences: Preferences

    async def find(self, work: Work[RecommendQuery], *, asked_ms: int, at_ms: int) -> FoundState:
        """Find the state. at_ms: the time for which the request asks, Unix milliseconds."""
        query = work.query
        if query.not_again is not None or (query.user_id and self.preferences.impression_discount):
            await self._read_shown(work, asked_ms)
        if query.history:
            return await self._of_history(work, with_times(query.history, at_ms))
        return await self._of_store(work)

    async def _read_shown(self, work: Work[RecommendQuery], asked_ms: int) -> None:
        preferences, asked = self.preferences, work.query.not_again
        wanted = {} if asked is None else {ANSWERS: MAX_ANSWERS}
        if preferences.impression_discount:
            wanted[IMPRESSIONS] = MAX_IMPRESSIONS
        sessions = await self.stages.read_sessions(work, wanted)
        if sessions is None:
            work.mark(Degradation.STATE_STORE_DOWN)
            return
        if asked is not None:
            wants = work.query.filter
            denied = (*wants.deny_item_ids, *not_again(sessions[ANSWERS], asked, asked_ms))
            work.query = replace(work.query, filter=replace(wants, deny_item_ids=denied))
        if preferences.impression_discount:
            work.discounts = discounts_of(
                sessions[IMPRESSIONS],
                asked_ms,
                discount=preferences.impression_discount,
                half_life_s=preferences.impression_half_life_s,
            )

    async def _of_store(self, work: Work[RecommendQuery]) -> FoundState:
        """Use the stored state; if it does not reflect all events, encode the stored history."""
        view = await self._read_user(work)
        if view is None:
            return FoundState()
        found = await self.stages.find_state(work, view)
        if not found.answered:
            # Popular items answer, and the user's events may not be among those they reflect, so the token is not
            # honoured.
            token_failed(work)
        if not found.is_whole:
            _token_behind(work, found.stored)
        return found

    async def _of_history(self, work: Work[RecommendQuery], history: tuple[HistoryEvent, ...]) -> FoundState:
        """Encode the request's own history; if that fails, use the stored state, which is marked as stale."""
        if work.query.user_id:
            view, encoded = await asyncio.gather(self._read_user(work), self.stages.encode(work, history))
        else:
            view, encoded = None, await self.stages.encode(work, history)
        schema = self.stages.model.schema
        own = seen_in(reversed(history), schema)
        # Items of the stored history are excluded too, but only items of the request's history add votes for their
        # neighbours.
        silent = [*turned_down_in(history, schema), *(set(work.seen.item_ids) - set(own))]
        work.seen = Seen([*own, *work.seen.item_ids], silent)
        if encoded is not None:
            work.num_had = len(set(own))
            if encoded.query_state is None:
                return FoundState()
            last_ms = last_event_ms(history, schema)
            return FoundState(query_state=encoded.query_state, last_event_ms=last_ms, source="request")
        if view is not None and view.state is not None:
            work.mark(Degradation.STALE_STATE)
            if not view.reaches_history:
                _token_behind(work, view.state)
            return FoundState.of_stored(view.state)
        return FoundState()

    async def _read_user(self, work: Work[RecommendQuery]) -> UserView | None:
        """Wait for the token and return the user's view; None if the store does not answer."""
        token = work.query.token
        partition = None if token is None else token.partition
        view = await self.stages.read_user(work, with_seen=True, partition=partition)
        if view is not None and token is not None and not is_reached(view, token):
            view = await self._wait_for(work, view, token)
        if view is None:
            work.mark(Degradation.STATE_STORE_DOWN)
            token_failed(work)
            return None
        if token is not None and not is_reached(view, token):
            token_failed(work)
        if view.is_lost:
            work.mark(Degradation.HISTORY_INCOMPLETE)
            token_failed(work)
        if self.lag.behind(view.partition, view.watermark):
            work.mark(Degradation.NOT_FRESH)
        if self.lag.reads_yield(view.partition, view.watermark):
            admission.yield_to_others()
        work.seen, work.num_had = Seen(view.seen, view.turned_down), len(view.seen)
        return view

    async def _wait_for(self, work: Work[RecommendQuery], view: UserView, token: FreshnessToken) -> UserView | None:
        """Wait as `TokenWaits.wait`, then read again. Do not wait if the token's epoch has ended or the log
        is unreachable, since waiting would not help.
        """
        began = time.monotonic()
        until = work.deadline - self.stages.limits.token_reserve_s
        is_futile = view.epoch != token.epoch or not self.stages.ports.stream.log_reachable
        if is_futile or not await self.tokens.wait(work.query.user_id, token, until):
            return view
        work.times.queue_ms += (time.monotonic() - began) * 1000
        return await self.stages.read_user(work, with_seen=True, partition=token.partition)


def token_failed(work: Work[RecommendQuery]) -> None:
    """Mark that the answer does not honour the request's token."""
    if work.query.token is not None:
        work.token_honoured = False
        work.mark(Degradation.TOKEN_NOT_HONOURED)


def _token_behind(work: Work[RecommendQuery], state: StoredState | None) -> None:
    """Mark the token as not honoured if `state` does not reach it. The state may be older than the watermark."""
    token = work.query.token
    if token is None:
        return
    if state is None or state.partition != token.partition or state.offset < token.offset:
        token_failed(work)


def with_arms(query: RecommendQuery) -> RecommendQuery:
    """Return the query with the rules of its arms added. A setting that the query lacks is taken from its arms."""
    arms = [one.arm for one in query.assignments if one.arm is not None and one.arm.has_settings]
    if not arms:
        return query
    diversity, most, share, gap = query.diversity, query.max_per_category, query.new_item_share, query.max_gap
    for arm in arms:
        diversity, most = diversity or arm.diversity, most or arm.max_per_category
        share = share if arm.new_item_share is None else arm.new_item_share
        # A further page comes from a stored list.
        gap = arm.max_gap if gap is None and not query.page_token else gap
    rules = (*query.rules, *rules_of_arms(query.assignments))
    return replace(query, rules=rules, diversity=diversity, max_per_category=most, new_item_share=share, max_gap=gap)


def rules_of_arms(assignments: Sequence[Assignment]) -> tuple[Rule, ...]:
    return tuple(rule for one in assignments if one.arm is not None for rule in one.arm.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommend:
    """The handler."""

    stages: Stages
    states: RequestStates
    rankings: Rankings
    new_items: NewItems
    rules: LiveRules
    exposures: Exposures
    pages: PageTokens
    metrics: GatewayMetrics

    async def __call__(self, query: RecommendQuery) -> Recommendation:
        """Answer a request. Raises: InvalidRequest; DeadlineExceeded; for a further page, as `_next_page`."""
        asked_ms = now_ms()
        await in_turn(check_query, query, asked_ms, self.stages.model.kinds)
        standing = StandingRules() if query.without_standing_rules else self.rules.now
        asked = replace(
            query,
            k=max(query.k, query.page_depth),
            rules=(*standing.rules, *query.rules),
            rules_revision=standing.revision,
            max_gap=None if query.page_token else query.max_gap,
        )
        asked = with_arms(asked)
        work = Work.begin(asked, budget_s=self.stages.limits.budget_s)
        if query.page_token:
            return await self._next_page(work, asked_ms)
        ranking, found = await self._ranked(work, asked_ms)
        if asked.max_gap is not None and not ranking.certificate.proves(asked.max_gap):
            work.mark(Degradation.GAP_NOT_PROVEN)
        served = ServedList(
            ranking=ranking,
            model_version=self.stages.model.version,
            degradations=tuple(work.degradations),
            rules_revision=standing.revision,
        )
        next_page = await self._kept(work, served, query)
        answer = await self._answer(work, query.k, served, next_page, stored=found.stored, source=found.source)
        self.metrics.answered(answer, had_token=query.token is not None)
        return answer

    async def _ranked(self, work: Work[RecommendQuery], asked_ms: int) -> tuple[Ranking, FoundState]:
        """Return the ranking and its state, which is empty for popular items."""
        query, slot = work.query, admission.current.get()
        at_ms = asked_ms if query.as_of_ms is None else query.as_of_ms
        found = FoundState()
        if slot is not None and slot.is_surplus:
            work.mark(Degradation.BUSY)
            token_failed(work)
        else:
            found = await self.states.find(work, asked_ms=asked_ms, at_ms=at_ms)
        query_state = self.stages.asked_with(work, found, at_ms)
        if not self.stages.ports.stream.log_reachable:
            work.mark(Degradation.NOT_FRESH)
        if query_state is not None:
            ranking = await self.rankings.best(work, query_state)
            if ranking is not None:
                if self.new_items.preferences.new_item_share or query.new_item_share:
                    ranking = await self.new_items.among(work, query_state, ranking, asked_ms)
                return replace(ranking, searched_share=work.searched_share), found
            # Popular items do not use the state.
            token_failed(work)
        ranking = self.rankings.popular_items(work)
        work.absence_bucket = 0
        return replace(ranking, searched_share=work.searched_share), FoundState()

    async def _kept(self, work: Work[RecommendQuery], served: ServedList, query: RecommendQuery) -> PagePosition | None:
        """Store a list for further pages; return the next page's position, None if it is not stored."""
        if not query.page_depth or len(served.ranking.items) <= query.k or Degradation.BUSY in work.degradations:
            return None
        place = self.pages.begin(query.k, work.absence_bucket)
        is_kept = await self.stages.keep(
            work, PAGES, packed_list(place, served), most=MAX_LISTS, ttl_seconds=LIST_TTL_S
        )
        return place if is_kept else None

    async def _next_page(self, work: Work[RecommendQuery], asked_ms: int) -> Recommendation:
        """Return the stored list's next items that are still served.

        Raises: as `PageTokens.place`; PreconditionFailed for an expired list; DependencyUnavailable.
        """
        query = work.query
        place = self.pages.place(query.page_token, query.user_id)
        sessions = await self.stages.read_sessions(work, {PAGES: MAX_LISTS})
        if sessions is None:
            raise DependencyUnavailable("the state store, which keeps the list, did not answer", retry_after_ms=500)
        served = find_list(sessions[PAGES], place)
        work.degradations, work.searched_share = list(served.degradations), served.ranking.searched_share
        work.absence_bucket = place.absence_bucket
        work.token_honoured = Degradation.TOKEN_NOT_HONOURED not in work.degradations
        items = served.ranking.items
        withdrawn = self.rankings.popular.are_withdrawn([item.item_id for item in items])
        rows = [row for row in range(place.offset, len(items)) if not withdrawn[row]]
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
        next_page: PagePosition | None,
        *,
        stored: StoredState | None,
        source: str,
        first_position: int = 1,
    ) -> Recommendation:
        user_id, ranking = work.query.user_id, served.ranking
        items = ranking.items[:k]
        if work.query.not_again is not None and items:
            entry = packed_items(now_ms(), [item.item_id for item in items[:MAX_ITEMS_OF_ANSWER]])
            await self.stages.keep(work, ANSWERS, entry, most=MAX_ANSWERS, ttl_seconds=ANSWERS_TTL_S)
        work.end()
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
                items,
                model_version=served.model_version,
                index_version=ranking.index_version,
                first_position=first_position,
                context=work.query.context,
                absence_bucket=work.absence_bucket,
                assignments=work.query.assignments,
                rules_revision=served.rules_revision,
            ),
            next_page_token="" if next_page is None else self.pages.token(next_page, user_id),
            searched_share=work.searched_share,
            warnings=self.stages.model.warnings(work.query.filter),
            absence_bucket=work.absence_bucket,
            max_gap=work.query.max_gap,
            items_touched=work.items_touched,
            assignments=work.query.assignments,
            rules_revision=served.rules_revision,
        )
