"""Search: every source of items by words at once, fused by rank, ordered for a user where one is given.

A source that is away costs its share of the answer, never the answer; only when none of them answered is there an
error. Nor does a user's state that can't be had: the answer is then everybody's, and says so. Knows ports, not
processes.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.algorithms.rank_fusion import Fused, reciprocal_rank_fusion
from services.common import request_context
from services.common.errors import DeadlineExceeded
from services.common.query_state import PackedQueryState
from services.gateway.attempts import Attempts
from services.gateway.domain import Degradation, Pool, Ranking, UserView
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Encoder, InteractionLog, Reranker, StreamStatus, UserStates
from services.gateway.searching import PERSONAL, SearchAnswer, SearchQuery, SearchResult, SourceRank, SourceTime
from services.gateway.validation import MAX_K, check_search
from services.gateway.words import SourceAnswer, Words, no_source, without_seen


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Sizes and times of a Search; seconds."""

    # What each source is asked for, at least twice k: an item that two sources rank middling can win. Deeper, items
    # that all sources rank low push out what one knows: on 500 pseudo queries over MovieLens-1M's titles, MRR@10 of
    # the fused answer is .759 with 100, .792 with 50, .825 with 30, .850 with 20.
    depth: int = 30
    # How much of what the sources found the user's model orders, at least k.
    personal_pool: int = 200
    # For a caller without a deadline.
    budget_s: float = 2.0
    # Kept of the deadline for fusing, and for the reranker before it where a user is given: at most a third of it.
    fuse_reserve_s: float = 0.01
    rerank_reserve_s: float = 0.1
    state_timeout_s: float = 0.25
    encode_timeout_s: float = 0.4
    rerank_timeout_s: float = 0.4


class _Work:
    """One request on its way."""

    __slots__ = ("deadline", "degradations", "query", "seen", "started")

    def __init__(self, query: SearchQuery, started: float, deadline: float) -> None:
        self.query = query
        self.started = started
        self.deadline = deadline
        self.degradations: list[Degradation] = []
        self.seen: Sequence[str] = ()

    def mark(self, kind: Degradation) -> None:
        if kind not in self.degradations:
            self.degradations.append(kind)


class Search:
    """The handler; one per process, called concurrently. `titles`: by item id, as they are known by now."""

    def __init__(
        self,
        *,
        words: Words,
        states: UserStates,
        encoder: Encoder,
        reranker: Reranker,
        interactions: InteractionLog,
        stream: StreamStatus,
        metrics: GatewayMetrics,
        titles: Mapping[str, str],
        model_version: str,
        limits: SearchLimits,
        breaker_seconds: float = 0.5,
    ) -> None:
        self._words = words
        self._states = states
        self._encoder = encoder
        self._reranker = reranker
        self._interactions = interactions
        self._stream = stream
        self._metrics = metrics
        self._titles = titles
        self._model_version = model_version
        self._limits = limits
        self._attempt = Attempts(
            ("state_store", "encoder", "reranker"),
            reserve_s=self._limits.fuse_reserve_s,
            breaker_seconds=breaker_seconds,
        )

    async def __call__(self, query: SearchQuery) -> SearchAnswer:
        """Answer `query`.

        Raises: InvalidRequest naming the field; DependencyUnavailable with the reasons when no source answered (another
        error of the tree when all of them failed alike); DeadlineExceeded when the caller's time was spent on the way.
        """
        started = time.monotonic()
        check_search(query)
        remaining = request_context.remaining_seconds()
        work = _Work(query, started, started + (self._limits.budget_s if remaining is None else remaining))
        view = None
        if query.user_id and query.filter.exclude_seen:
            # What was seen acts inside the sources, so that it never starves the answer: it has to be known first.
            view = await self._read_user(work, with_seen=True)
        answers, state = await asyncio.gather(self._find(work), self._state(work, view))
        if all(answer.found is None for answer in answers):
            raise no_source(answers)
        if any(answer.failed for answer in answers):
            work.mark(Degradation.PARTIAL_SOURCES)
        times = [answer.time for answer in answers]
        rankings = {answer.source: answer.found.items for answer in answers if answer.found is not None}
        places = {source: [item.item_id for item in items] for source, items in rankings.items()}
        scores = {source: {item.item_id: item.score for item in items} for source, items in rankings.items()}
        fused = reciprocal_rank_fusion(places)
        model_version = ""
        if query.user_id:
            personal, spent = await self._order(work, state, fused)
            times.append(spent)
            if personal is None:
                work.mark(Degradation.NOT_PERSONALISED)
            else:
                model_version = self._model_version
                places[PERSONAL] = [item.item_id for item in personal.items]
                scores[PERSONAL] = {item.item_id: item.score for item in personal.items}
                fused = reciprocal_rank_fusion(places)
        if time.monotonic() > work.deadline:
            raise DeadlineExceeded("the deadline passed before the answer was ready")
        answer = SearchAnswer(
            results=self._results(fused[: query.k], scores, answers),
            text_version=next((a.found.text_version for a in answers if a.found and a.found.text_version), ""),
            model_version=model_version,
            degradations=work.degradations,
            sources=times,
            total_ms=(time.monotonic() - started) * 1000,
        )
        self._metrics.searched(answer)
        return answer

    async def _find(self, work: _Work) -> list[SourceAnswer]:
        query, limits = work.query, self._limits
        left = work.deadline - time.monotonic()
        kept = limits.fuse_reserve_s + (limits.rerank_reserve_s if query.user_id else 0.0)
        return await self._words.find(
            query.query,
            k=min(MAX_K, max(limits.depth, 2 * query.k)),
            filter=without_seen(query.filter, work.seen),
            left_s=left - min(kept, left / 3),
        )

    async def _state(self, work: _Work, view: UserView | None) -> PackedQueryState | None:
        """The user's query state as Recommend finds it; None where there is none, or it could not be had (marked)."""
        user_id = work.query.user_id
        if not user_id:
            return None
        if view is None and not work.query.filter.exclude_seen:
            view = await self._read_user(work, with_seen=False)
        if view is None or view.epoch is None:
            return None
        if view.state is not None:
            if not self._stream.encoder_serving:
                work.mark(Degradation.STALE_STATE)
            return view.state.query_state
        limits = self._limits
        history = await self._attempt(
            work.deadline, "state_store", limits.state_timeout_s, lambda _: self._states.read_history(user_id)
        )
        if not history:
            return None
        encoded = await self._attempt(
            work.deadline,
            "encoder",
            limits.encode_timeout_s,
            lambda timeout_s: self._encoder.encode(user_id, history, timeout_s),
        )
        return None if encoded is None else encoded.query_state

    async def _read_user(self, work: _Work, *, with_seen: bool) -> UserView | None:
        user_id = work.query.user_id
        partition = self._interactions.partition_of(user_id)
        view = await self._attempt(
            work.deadline,
            "state_store",
            self._limits.state_timeout_s,
            lambda _: self._states.read_user(user_id, with_seen=with_seen, partition=partition),
        )
        if view is None:
            work.mark(Degradation.STATE_STORE_DOWN)
        else:
            work.seen = view.seen
        return view

    async def _order(
        self, work: _Work, state: PackedQueryState | None, fused: Sequence[Fused]
    ) -> tuple[Ranking | None, SourceTime]:
        """The best of what was found in the order of the user's model; items that it does not know are left out."""
        if state is None:
            return None, SourceTime(source=PERSONAL, milliseconds=0.0, failure="there is no state of the user")
        query = work.query
        pool = fused[: min(MAX_K, max(self._limits.personal_pool, query.k))]
        if not pool:
            return Ranking(items=()), SourceTime(source=PERSONAL, milliseconds=0.0)
        began = time.monotonic()
        ranking = await self._attempt(
            work.deadline,
            "reranker",
            self._limits.rerank_timeout_s,
            lambda timeout_s: self._reranker.rerank(
                state,
                Pool(item_ids=[one.item_id for one in pool], scores=[one.score for one in pool]),
                k=len(pool),
                filter=query.filter,
                seen=work.seen,
                max_per_category=0,
                diversity=0.0,
                timeout_s=timeout_s,
            ),
        )
        return ranking, SourceTime(
            source=PERSONAL,
            milliseconds=(time.monotonic() - began) * 1000,
            failure="the reranker did not answer" if ranking is None else "",
        )

    def _results(
        self, fused: Sequence[Fused], scores: Mapping[str, Mapping[str, float]], answers: Sequence[SourceAnswer]
    ) -> list[SearchResult]:
        identifiers = {
            item.item_id: item.identifier
            for answer in answers
            if answer.found is not None
            for item in answer.found.items
            if item.identifier
        }
        return [
            SearchResult(
                item_id=one.item_id,
                title=self._titles.get(one.item_id, ""),
                score=one.score,
                found_by=[SourceRank(source, rank, scores[source][one.item_id]) for source, rank in one.ranks],
                identifier=identifiers.get(one.item_id, ""),
            )
            for one in fused
        ]
