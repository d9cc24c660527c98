"""Recommend: read the user's state, search, rerank where rules ask; at each failure take the next best way and say so.

The order of retreat: a stored state that reflects the whole history, a state made of that history now, the stored state
as it is, popular items; the reranker's order, then the first stage's. Who comes beyond the door's limit is answered
popular items at once. It never fails for a dependency's sake: only a bad request or a spent deadline ends in an error.
Words only widen the pool: the user's model orders it. Knows ports, not processes.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.algorithms.attributes import Kinds
from services.algorithms.event_schema import EventSchema
from services.algorithms.rank_fusion import reciprocal_rank_fusion
from services.common import admission
from services.common.query_state import PackedQueryState
from services.common.state_store import StoredState, UserView
from services.gateway.domain import (
    Degradation,
    FreshnessToken,
    HistoryEvent,
    Pool,
    Ranking,
    Recommendation,
    RecommendQuery,
    ScoredItem,
    now_ms,
    seen_in,
)
from services.gateway.exposures import Exposures
from services.gateway.lag import AcknowledgedLag
from services.gateway.metrics import GatewayMetrics
from services.gateway.popular import PopularItems
from services.gateway.ports import Ports
from services.gateway.stages import Limits, Stages, Work
from services.gateway.text_retrieval import TextRetrieval, without_seen
from services.gateway.token_waits import TokenWaits, is_reached
from services.gateway.validation import MAX_K, check_query, with_times

MAX_POOL = 10_000


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
    kinds: Kinds
    limits: Limits

    async def __call__(self, query: RecommendQuery) -> Recommendation:
        """Answer `query`.

        Raises: InvalidRequest naming the field; DeadlineExceeded when the caller's time was spent on the way.
        """
        work = Work.begin(query, budget_s=self.limits.budget_s)
        asked_ms = now_ms()
        check_query(query, asked_ms, self.kinds)
        slot = admission.current.get()
        if slot is not None and slot.is_surplus:
            work.mark(Degradation.BUSY)
            self._token_failed(work)
            query_state, stored, source = None, None, "none"
        elif query.history:
            query_state, stored, source = await self._from_request(work, with_times(query.history, asked_ms))
        else:
            query_state, stored, source = await self._from_store(work)
        if not self.ports.stream.log_reachable:
            work.mark(Degradation.NOT_FRESH)

        ranking: Ranking | None = None
        if query_state is not None:
            ranking = await self._found(work, query_state)
            if ranking is None:
                # There is a state as fresh as the token says, and popular items are not answered from it.
                self._token_failed(work)
        if ranking is None:
            ranking = self._popular_items(work)
            stored, source = None, "none"
        work.times.close(work.end())
        answer = Recommendation(
            items=ranking.items,
            model_version=self.model_version,
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
                query.user_id,
                item_ids=[item.item_id for item in ranking.items],
                scores=[item.score for item in ranking.items],
                sources=[item.source for item in ranking.items],
                model_version=self.model_version,
                index_version=ranking.index_version,
            ),
        )
        self.metrics.answered(answer, had_token=query.token is not None)
        return answer

    async def _from_store(self, work: Work[RecommendQuery]) -> tuple[PackedQueryState | None, StoredState | None, str]:
        """The state that the stream made; made of the stored history where this model's does not reflect all of it."""
        view = await self._read_user(work)
        if view is None:
            return None, None, "none"
        found = await self.stages.find_state(work, view)
        if not found.answered:
            # The store or the encoder: there may be more to know than popular items tell.
            self._token_failed(work)
        if not found.is_whole:
            self._token_behind(work, found.stored)
        return found.query_state, found.stored, found.source

    async def _from_request(
        self, work: Work[RecommendQuery], history: tuple[HistoryEvent, ...]
    ) -> tuple[PackedQueryState | None, StoredState | None, str]:
        """The state of the request's own history; the stored one, marked, when it can't be computed."""
        if work.query.user_id:
            view, encoded = await asyncio.gather(self._read_user(work), self.stages.encode(work, history))
        else:
            view, encoded = None, await self.stages.encode(work, history)
        work.seen = [*seen_in(reversed(history), self.schema), *work.seen]
        if encoded is not None:
            source = "none" if encoded.query_state is None else "request"
            return encoded.query_state, None, source
        if view is not None and view.state is not None:
            work.mark(Degradation.STALE_STATE)
            if not view.reaches_history:
                self._token_behind(work, view.state)
            return view.state.query_state, view.state, "stored"
        return None, None, "none"

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
        work.seen = view.seen
        return view

    async def _wait_for(self, work: Work[RecommendQuery], view: UserView, token: FreshnessToken) -> UserView | None:
        """Wait until the token is reached, its epoch is gone, or the time for waiting is up; then read again."""
        began = time.monotonic()
        until = work.deadline - self.limits.token_reserve_s
        if view.epoch != token.epoch or not await self.tokens.wait(work.query.user_id, token, until):
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
        if query.query:
            pool, by_words = await asyncio.gather(self._propose(work, state), self._find(work))
        elif query.max_per_category or query.diversity:
            pool = await self._propose(work, state)
        else:
            return await self.stages.search(work, state)
        return None if pool is None else await self._rank(work, state, pool, by_words)

    async def _propose(self, work: Work[RecommendQuery], state: PackedQueryState) -> Pool | None:
        query = work.query
        # Category limits and diversity choose among the pool: give them more to choose from.
        wanted = query.k * (4 if query.max_per_category or query.diversity else 2)
        return await self.stages.propose(work, state, min(MAX_POOL, max(self.limits.pool_size, wanted)))

    async def _find(self, work: Work[RecommendQuery]) -> Sequence[str]:
        """What the request's words find, best first."""
        query = work.query
        answers = await self.text.find(
            query.query,
            k=min(MAX_K, max(self.limits.recommend_depth, query.k)),
            filter=without_seen(query.filter, work.seen),
            # The pool still has to be ranked.
            left_s=(work.left_s - self.limits.answer_reserve_s) * 2 / 3,
        )
        if any(answer.failed for answer in answers):
            work.mark(Degradation.PARTIAL_SOURCES)
        rankings = {a.source: [hit.item_id for hit in a.hits.items] for a in answers if a.hits is not None}
        return [one.item_id for one in reciprocal_rank_fusion(rankings)]

    async def _rank(
        self, work: Work[RecommendQuery], state: PackedQueryState, pool: Pool, by_words: Sequence[str]
    ) -> Ranking:
        query = work.query
        if not pool.item_ids:
            # The filter allows nothing that the index has.
            return Ranking(items=(), index_version=pool.index_version, index_freshness=pool.index_freshness)
        ranking = await self.stages.rerank(
            work,
            state,
            _joined(pool, by_words),
            k=query.k,
            max_per_category=query.max_per_category,
            diversity=query.diversity,
        )
        if ranking is not None:
            return ranking
        work.mark(Degradation.FIRST_STAGE_ORDER)
        rows = self.popular.limit_categories(pool.item_ids, query.k, query.max_per_category)
        items = [ScoredItem(pool.item_ids[row], pool.scores[row], "first_stage") for row in rows]
        return Ranking(items=items, index_version=pool.index_version, index_freshness=pool.index_freshness)

    def _popular_items(self, work: Work[RecommendQuery]) -> Ranking:
        query = work.query
        work.mark(Degradation.POPULAR_FALLBACK)
        if not self.popular.knows_withdrawn:
            work.mark(Degradation.PARTIAL_CATALOGUE)
        return Ranking(items=self.popular.top(query.k, query.filter, work.seen, query.max_per_category))


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
