"""Recommend: read the user's state, search, rerank; at each failure take the next best way and say so.

The order of retreat is the design's: stored state, request's history, stored history, popular items; the reranker's
order, then the first stage's. It never fails for a dependency's sake: only a bad request or a spent deadline ends in
an error. Words only widen the pool: the user's model orders it. Knows ports, not processes.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.algorithms.rank_fusion import reciprocal_rank_fusion
from services.common import request_context
from services.common.errors import DeadlineExceeded
from services.common.query_state import PackedQueryState
from services.gateway.attempts import Attempts
from services.gateway.domain import (
    Degradation,
    Encoded,
    FreshnessToken,
    HistoryEvent,
    Pool,
    Ranking,
    Recommendation,
    RecommendQuery,
    ScoredItem,
    StageTimes,
    StoredState,
    UserView,
)
from services.gateway.lag import AcknowledgedLag
from services.gateway.metrics import GatewayMetrics
from services.gateway.popular import PopularItems
from services.gateway.ports import Candidates, Encoder, InteractionLog, Reranker, StreamStatus, UserStates
from services.gateway.validation import MAX_K, check_query, with_times
from services.gateway.words import Words, without_seen

MAX_POOL = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendLimits:
    """Sizes and times of a Recommend; seconds."""

    # K': what the first stage proposes, at least twice k.
    pool_size: int = 200
    # For a caller without a deadline.
    budget_s: float = 2.0
    # Kept of the deadline for everything after the wait for a freshness token.
    token_reserve_s: float = 0.08
    token_poll_s: float = 0.008
    # Kept of the deadline to answer in a degraded way after a stage used its time up.
    answer_reserve_s: float = 0.01
    state_timeout_s: float = 0.25
    encode_timeout_s: float = 0.4
    search_timeout_s: float = 0.4
    # What each source of items by words is asked for, at least k.
    words_depth: int = 100
    rerank_timeout_s: float = 0.4


class _Work:
    """One request on its way: its deadline, its times, its marks."""

    __slots__ = ("deadline", "degradations", "query", "seen", "started", "times", "token_honoured")

    def __init__(self, query: RecommendQuery, started: float, deadline: float) -> None:
        self.query = query
        self.started = started
        self.deadline = deadline
        self.times = StageTimes()
        self.degradations: list[Degradation] = []
        self.token_honoured = True
        self.seen: Sequence[str] = ()

    def mark(self, kind: Degradation) -> None:
        if kind not in self.degradations:
            self.degradations.append(kind)


class Recommend:
    """The handler; one per process, called concurrently."""

    def __init__(
        self,
        *,
        states: UserStates,
        encoder: Encoder,
        candidates: Candidates,
        reranker: Reranker,
        words: Words,
        interactions: InteractionLog,
        stream: StreamStatus,
        lag: AcknowledgedLag,
        popular: PopularItems,
        metrics: GatewayMetrics,
        model_version: str,
        limits: RecommendLimits | None = None,
        breaker_seconds: float = 0.5,
    ) -> None:
        self._states = states
        self._encoder = encoder
        self._candidates = candidates
        self._reranker = reranker
        self._words = words
        self._interactions = interactions
        self._stream = stream
        self._lag = lag
        self._popular = popular
        self._metrics = metrics
        self._model_version = model_version
        self._limits = limits or RecommendLimits()
        self._attempt = Attempts(
            ("state_store", "encoder", "candidates", "reranker"),
            reserve_s=self._limits.answer_reserve_s,
            breaker_seconds=breaker_seconds,
        )

    async def __call__(self, query: RecommendQuery) -> Recommendation:
        """Answer `query`.

        Raises: InvalidRequest naming the field; DeadlineExceeded when the caller's time was spent on the way.
        """
        started = time.monotonic()
        now_ms = time.time_ns() // 1_000_000
        check_query(query, now_ms)
        remaining = request_context.remaining_seconds()
        deadline = started + (self._limits.budget_s if remaining is None else remaining)
        work = _Work(query, started, deadline)
        if query.history:
            query_state, stored, source = await self._from_request(work, with_times(query.history, now_ms))
        else:
            query_state, stored, source = await self._from_store(work)
        if stored is not None and not self._stream.encoder_serving:
            work.mark(Degradation.STALE_STATE)
        if not self._stream.log_reachable:
            work.mark(Degradation.NOT_FRESH)

        pool: Pool | None = None
        by_words: Sequence[str] = ()
        if query_state is not None and query.query:
            pool, by_words = await asyncio.gather(self._search(work, query_state), self._find(work))
        elif query_state is not None:
            pool = await self._search(work, query_state)
        if query_state is None or pool is None:
            if query_state is not None:
                # There is a state as fresh as the token says, and popular items are not answered from it.
                self._token_failed(work)
            ranking = self._popular_items(work)
            stored, source = None, "none"
        else:
            ranking = await self._rank(work, query_state, pool, by_words)
        if time.monotonic() > deadline:
            raise DeadlineExceeded("the deadline passed before the answer was ready")
        work.times.close((time.monotonic() - started) * 1000)
        answer = Recommendation(
            items=ranking.items,
            model_version=self._model_version,
            index_version=ranking.index_version,
            state=stored,
            token_honoured=work.token_honoured,
            degradations=work.degradations,
            certificate=ranking.certificate,
            stage_times=work.times,
            state_source=source,
            index_freshness=None if pool is None else pool.index_freshness,
        )
        self._metrics.answered(answer, had_token=query.token is not None)
        return answer

    async def _from_store(self, work: _Work) -> tuple[PackedQueryState | None, StoredState | None, str]:
        """The state that the stream made; computed from the stored history where this model has none yet."""
        view = await self._read_user(work)
        if view is None:
            return None, None, "none"
        if view.state is not None:
            return view.state.query_state, view.state, "stored"
        if view.epoch is None:
            return None, None, "none"
        user_id = work.query.user_id
        limit = self._limits.state_timeout_s
        history = await self._attempt(work.deadline, "state_store", limit, lambda _: self._states.read_history(user_id))
        encoded = await self._encode(work, history) if history else None
        if encoded is None and (history is None or history):
            # The store or the encoder did not answer: there may be more to know than popular items tell.
            self._token_failed(work)
        if encoded is None or encoded.query_state is None:
            return None, None, "none"
        return encoded.query_state, None, "stored"

    async def _from_request(
        self, work: _Work, history: tuple[HistoryEvent, ...]
    ) -> tuple[PackedQueryState | None, StoredState | None, str]:
        """The state of the request's own history; the stored one, marked, when it can't be computed."""
        if work.query.user_id:
            view, encoded = await asyncio.gather(self._read_user(work), self._encode(work, history))
        else:
            view, encoded = None, await self._encode(work, history)
        if work.query.filter.exclude_seen:
            work.seen = [*work.seen, *(event.item_id for event in history)]
        if encoded is not None:
            source = "none" if encoded.query_state is None else "request"
            return encoded.query_state, None, source
        if view is not None and view.state is not None:
            work.mark(Degradation.STALE_STATE)
            return view.state.query_state, view.state, "stored"
        return None, None, "none"

    async def _read_user(self, work: _Work) -> UserView | None:
        """The user's view, waiting for the token where there is one; None when the store does not answer."""
        query, token = work.query, work.query.token
        partition = self._interactions.partition_of(query.user_id) if token is None else token.partition
        view = await self._view(work, partition, with_seen=query.filter.exclude_seen)
        if view is not None and token is not None and not _reached(view, token):
            view = await self._wait_for(work, view, token)
        if view is None:
            work.mark(Degradation.STATE_STORE_DOWN)
            self._token_failed(work)
            return None
        if token is not None and not _reached(view, token):
            self._token_failed(work)
        if self._lag.behind(partition, view.watermark):
            work.mark(Degradation.NOT_FRESH)
        work.seen = view.seen
        return view

    async def _wait_for(self, work: _Work, view: UserView, token: FreshnessToken) -> UserView | None:
        """Poll until the token is reached, its epoch is gone, or the time for waiting is up; then read in full."""
        began = time.monotonic()
        until = work.deadline - self._limits.token_reserve_s
        waited = False
        while view.epoch == token.epoch and time.monotonic() + self._limits.token_poll_s < until:
            await asyncio.sleep(self._limits.token_poll_s)
            waited = True
            found = await self._view(work, token.partition, with_seen=False)
            if found is None:
                return None
            view = replace(found, seen=view.seen)
            if _reached(view, token):
                break
        work.times.queue_ms += (time.monotonic() - began) * 1000
        if waited and work.query.filter.exclude_seen:
            return await self._view(work, token.partition, with_seen=True)
        return view

    async def _view(self, work: _Work, partition: int, *, with_seen: bool) -> UserView | None:
        user_id = work.query.user_id
        return await self._attempt(
            work.deadline,
            "state_store",
            self._limits.state_timeout_s,
            lambda _: self._states.read_user(user_id, with_seen=with_seen, partition=partition),
        )

    def _token_failed(self, work: _Work) -> None:
        if work.query.token is not None:
            work.token_honoured = False
            work.mark(Degradation.TOKEN_NOT_HONOURED)

    async def _encode(self, work: _Work, history: Sequence[HistoryEvent]) -> Encoded | None:
        user_id = work.query.user_id
        encoded = await self._attempt(
            work.deadline,
            "encoder",
            self._limits.encode_timeout_s,
            lambda timeout_s: self._encoder.encode(user_id, history, timeout_s),
        )
        if encoded is not None:
            work.times.queue_ms += encoded.queue_ms
            work.times.encode_ms += encoded.encode_ms
        return encoded

    async def _search(self, work: _Work, state: PackedQueryState) -> Pool | None:
        query = work.query
        # Category limits and diversity choose among the pool: give them more to choose from.
        wanted = query.k * (4 if query.max_per_category or query.diversity else 2)
        size = min(MAX_POOL, max(self._limits.pool_size, wanted))
        pool = await self._attempt(
            work.deadline,
            "candidates",
            self._limits.search_timeout_s,
            lambda timeout_s: self._candidates.search(
                state, pool_size=size, filter=query.filter, seen=work.seen, timeout_s=timeout_s
            ),
        )
        if pool is not None:
            work.times.queue_ms += pool.queue_ms
            work.times.first_stage_ms += pool.search_ms
        return pool

    async def _find(self, work: _Work) -> Sequence[str]:
        """What the request's words find, best first."""
        query = work.query
        left = work.deadline - time.monotonic() - self._limits.answer_reserve_s
        answers = await self._words.find(
            query.query,
            k=min(MAX_K, max(self._limits.words_depth, query.k)),
            filter=without_seen(query.filter, work.seen),
            # The pool still has to be ranked.
            left_s=left * 2 / 3,
        )
        if any(answer.failed for answer in answers):
            work.mark(Degradation.PARTIAL_SOURCES)
        places = {a.source: [item.item_id for item in a.found.items] for a in answers if a.found is not None}
        return [one.item_id for one in reciprocal_rank_fusion(places)]

    async def _rank(self, work: _Work, state: PackedQueryState, pool: Pool, by_words: Sequence[str]) -> Ranking:
        query = work.query
        if not pool.item_ids:
            # The filter allows nothing that the index has.
            return Ranking(items=(), index_version=pool.index_version)
        ranking = await self._attempt(
            work.deadline,
            "reranker",
            self._limits.rerank_timeout_s,
            lambda timeout_s: self._reranker.rerank(
                state,
                _joined(pool, by_words),
                k=query.k,
                filter=query.filter,
                seen=work.seen,
                max_per_category=query.max_per_category,
                diversity=query.diversity,
                timeout_s=timeout_s,
            ),
        )
        if ranking is not None:
            work.times.queue_ms += ranking.queue_ms
            work.times.rerank_ms += ranking.rerank_ms
            return ranking
        work.mark(Degradation.FIRST_STAGE_ORDER)
        places = self._popular.limit_categories(pool.item_ids, query.k, query.max_per_category)
        items = [ScoredItem(pool.item_ids[place], pool.scores[place], "first_stage") for place in places]
        return Ranking(items=items, index_version=pool.index_version)

    def _popular_items(self, work: _Work) -> Ranking:
        query = work.query
        work.mark(Degradation.POPULAR_FALLBACK)
        return Ranking(items=self._popular.top(query.k, query.filter, work.seen, query.max_per_category))


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


def _reached(view: UserView, token: FreshnessToken) -> bool:
    return view.epoch == token.epoch and view.watermark is not None and view.watermark >= token.offset
