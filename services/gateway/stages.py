"""Optional calls: each has a time limit within the deadline, and a circuit breaker. A failed call returns None, and the
handler chooses the fallback. A version set's handlers share the breakers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.packed_state import after_absence
from services.contracts.wire import PackedQueryState
from services.gateway.dependencies import Breaker, LoopStalls
from services.gateway.domain import (
    Degradation,
    Encoded,
    Event,
    Found,
    Pool,
    Ranking,
    RecommendQuery,
    RerankQuery,
    SearchQuery,
    Seen,
    ServedModel,
    SimilarQuery,
    StageTimes,
)
from services.gateway.ports import Ports
from services.platform import request_context
from services.platform.errors import DeadlineExceeded
from services.user_state.values import StoredState, UserView

COMPONENTS = ("state_store", "sessions", "encoder", "candidates", "reranker")

Q = TypeVar("Q", RecommendQuery, SearchQuery, SimilarQuery)
T = TypeVar("T")
F = TypeVar("F", bound=Found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes, and times in seconds."""

    # Time limit of a request without a deadline.
    budget_s: float = 2.0
    # Time limit of one call of the state store.
    state_timeout_s: float = 0.25
    # Time limit of one call of another process.
    stage_timeout_s: float = 0.4
    # Time limit for the stream to acknowledge one record.
    append_timeout_s: float = 1.5
    # Time limit from an edit of items until it was read back.
    edit_timeout_s: float = 5.0
    # How long a failed component is not called.
    breaker_s: float = 0.5
    # Part of the deadline reserved for a degraded answer.
    answer_reserve_s: float = 0.01
    # Part of it reserved for everything after the wait for a freshness token.
    token_reserve_s: float = 0.08
    token_poll_s: float = 0.008
    # Part of Search's deadline reserved for the reranker. This and `answer_reserve_s` take a third at most.
    rerank_reserve_s: float = 0.1
    # K': size of the first stage's pool, at least twice k.
    pool_size: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The operator's preferences, as in `GatewaySettings`."""

    impression_discount: float = 0.0
    impression_half_life_s: float = 24 * 3600.0
    cold_items: int = 0
    new_item_share: float = 0.0
    new_item_age_s: float = 24 * 3600.0


@dataclass(slots=True, kw_only=True)
class Work(Generic[Q]):
    """A request in progress. deadline: on the monotonic clock."""

    query: Q
    started: float
    deadline: float
    times: StageTimes = field(default_factory=StageTimes)
    degradations: list[Degradation] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    # How many of the user's items the state reflects.
    num_had: int = 0
    # The share of the catalogue in the shards that answered.
    searched_share: float = 1.0
    # Number of items read by all searches, in all their passes.
    items_touched: int = 0
    # Discounts of items' scores.
    discounts: Mapping[str, float] = field(default_factory=dict)
    absence_bucket: int = 0
    token_honoured: bool = True

    @classmethod
    def begin(cls, query: Q, *, budget_s: float) -> Self:
        """Start a request that ends at the caller's deadline, else after `budget_s`."""
        started = time.monotonic()
        remaining = request_context.remaining_seconds()
        return cls(query=query, started=started, deadline=started + (budget_s if remaining is None else remaining))

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def mark(self, kind: Degradation) -> None:
        if kind not in self.degradations:
            self.degradations.append(kind)

    def searched(self, found: Found, *, is_timed: bool = True) -> None:
        """Add a search's costs. is_timed: also add the search's time."""
        if is_timed:
            self.times.queue_ms += found.queue_ms
            self.times.first_stage_ms += found.stage_ms
        self.items_touched += found.items_touched
        if found.searched_share < 1:
            self.mark(Degradation.PARTIAL_CATALOGUE)
            self.searched_share = min(self.searched_share, found.searched_share)

    def end(self) -> float:
        """Return the total time in milliseconds. Raises: DeadlineExceeded if the deadline has passed."""
        now = time.monotonic()
        if now > self.deadline:
            raise DeadlineExceeded("the deadline passed before the answer was ready")
        times, times.total_ms = self.times, (now - self.started) * 1000
        known_ms = times.queue_ms + times.encode_ms + times.first_stage_ms + times.rerank_ms
        times.transport_ms = max(0.0, times.total_ms - known_ms)
        return times.total_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundState:
    """A user's state and its source. stored: the state, if it comes from the store. last_event_ms: Unix milliseconds.

    is_whole: the state reflects the whole stored history. answered: False if state store or encoder failed.
    """

    query_state: PackedQueryState | None = None
    last_event_ms: int = 0
    stored: StoredState | None = None
    source: str = "none"
    is_whole: bool = True
    answered: bool = True

    @classmethod
    def of_stored(cls, stored: StoredState, *, is_whole: bool = True) -> Self:
        return cls(
            query_state=stored.query_state,
            last_event_ms=stored.event_time_ms,
            stored=stored,
            source="stored",
            is_whole=is_whole,
        )


class Stages:
    """Makes the optional calls. stalls: measures this event loop. on_nothing: called with a failed call's component."""

    def __init__(
        self,
        ports: Ports,
        limits: Limits,
        model: ServedModel,
        *,
        stalls: LoopStalls | None = None,
        on_nothing: Callable[[str], None] = lambda component: None,
    ) -> None:
        self.ports, self.limits, self.model, self._on_nothing = ports, limits, model, on_nothing
        self._stalls = stalls or LoopStalls()
        self._breakers = {
            name: Breaker(name, open_seconds=limits.breaker_s, stalled_s=self._stalls.since) for name in COMPONENTS
        }

    async def read_user(self, work: Work[Any], *, with_seen: bool, partition: int | None = None) -> UserView | None:
        """Return the user's view. partition: the one whose watermark is read; None: the user's partition."""
        user_id, read = work.query.user_id, self.ports.states.read_user
        return await self._attempt(
            work,
            "state_store",
            lambda _: read(user_id, self.model.version, with_seen=with_seen, partition=partition),
        )

    async def read_seen(self, work: Work[Any]) -> UserView | None:
        """Return the user's view and add its seen items to `work`. Mark the answer if the store fails or lost data."""
        view = await self.read_user(work, with_seen=True)
        if view is None:
            work.mark(Degradation.STATE_STORE_DOWN)
            return None
        if view.is_lost:
            work.mark(Degradation.HISTORY_INCOMPLETE)
        work.seen = Seen(view.seen)
        return view

    async def read_watermark(self, user_id: str, partition: int) -> UserView | None:
        """Return a view with the partition's watermark, without seen items; independent of caller deadlines."""
        until = time.monotonic() + 2 * self.limits.state_timeout_s
        work = Work(query=SearchQuery(query="", user_id=user_id, k=1), started=0.0, deadline=until)
        return await self.read_user(work, with_seen=False, partition=partition)

    async def encode(self, work: Work[Any], history: Sequence[Event]) -> Encoded | None:
        """Encode a history. Every event needs a time."""
        encode, user_id = self.ports.encoder.encode, work.query.user_id
        encoded = await self._attempt(work, "encoder", lambda timeout_s: encode(user_id, history, timeout_s))
        if encoded is not None:
            work.times.queue_ms += encoded.queue_ms
            work.times.encode_ms += encoded.encode_ms
        return encoded

    async def find_state(self, work: Work[Any], view: UserView) -> FoundState:
        """Return a stored state of the whole history, else a state encoded now, else the stale one with a mark."""
        stored = view.state
        if stored is not None and view.reaches_history:
            found = FoundState.of_stored(stored)
        else:
            found = await self._state_of_history(work, view)
        if found.query_state is not None and not self.ports.stream.encoder_serving:
            work.mark(Degradation.STALE_STATE)
        return found

    def asked_with(self, work: Work[Any], found: FoundState, at_ms: int) -> PackedQueryState | None:
        """Return the state with the effect of the time from the user's last event until `at_ms`."""
        if found.query_state is None:
            return None
        state, work.absence_bucket = after_absence(found.query_state, self.model.absence, found.last_event_ms, at_ms)
        return state

    async def _state_of_history(self, work: Work[Any], view: UserView) -> FoundState:
        stored, answered = view.state, True
        if view.epoch is not None and (view.has_history or stored is None):
            query_state, last_event_ms, answered = await self._encode_stored(work)
            if query_state is not None:
                return FoundState(query_state=query_state, last_event_ms=last_event_ms, source="stored_history")
            if answered:
                # All events were undone, or this model knows none of the items.
                return FoundState()
        if stored is None:
            return FoundState(answered=answered)
        work.mark(Degradation.STALE_STATE)
        return FoundState.of_stored(stored, is_whole=False)

    async def _encode_stored(self, work: Work[Any]) -> tuple[PackedQueryState | None, int, bool]:
        """Return a query state of the stored history, the last event's time, and whether both components answered."""
        read, user_id = self.ports.states.read_events, work.query.user_id
        history = await self._attempt(work, "state_store", lambda _: read(user_id))
        if not history:
            return None, 0, history is not None
        encoded = await self.encode(work, history)
        return (None, 0, False) if encoded is None else (encoded.query_state, history[-1].event_time_ms or 0, True)

    async def read_sessions(self, work: Work[Any], wanted: Mapping[str, int]) -> Mapping[str, list[bytes]] | None:
        read, user_id = self.ports.sessions.read, work.query.user_id
        return await self._attempt(work, "sessions", lambda _: read(user_id, wanted))

    async def keep(self, work: Work[Any], kind: str, entry: bytes, *, most: int, ttl_seconds: int) -> bool:
        """Store an entry; return whether it is stored. Mark the answer if the store is unavailable."""
        push, user_id = self.ports.sessions.push, work.query.user_id
        written = await self._attempt(
            work, "sessions", lambda _: push(kind, user_id, entry, most=most, ttl_seconds=ttl_seconds)
        )
        if written is None:
            work.mark(Degradation.STATE_STORE_DOWN)
        return bool(written)

    async def search(
        self, work: Work[RecommendQuery], state: PackedQueryState, k: int, among: Sequence[str] = ()
    ) -> Ranking | None:
        """Return the k best items of the catalogue, or of `among`. Stage times do not include a search with `among`."""
        wanted = replace(work.query.filter, allow_item_ids=tuple(among)) if among else work.query.filter
        search = self._asked(work, self.ports.candidates.search, state, k, wanted)
        limit_s = None if work.query.max_gap is None else work.left_s
        ranking = await self._attempt(work, "candidates", search, limit_s)
        if ranking is not None:
            work.searched(ranking, is_timed=not among)
        return ranking

    async def propose(
        self, work: Work[RecommendQuery], state: PackedQueryState, pool_size: int, wanted: ItemFilter | None = None
    ) -> Pool | None:
        propose = self._asked(work, self.ports.candidates.propose, state, pool_size, wanted or work.query.filter)
        pool = await self._attempt(work, "candidates", propose)
        if pool is not None:
            work.searched(pool)
        return pool

    def _asked(
        self,
        work: Work[RecommendQuery],
        search: Callable[..., Awaitable[F]],
        state: PackedQueryState,
        k: int,
        wanted: ItemFilter,
    ) -> Callable[[float], Awaitable[F]]:
        seen, max_gap = work.seen, work.query.max_gap
        return lambda timeout_s: search(state, k=k, filter=wanted, seen=seen, timeout_s=timeout_s, max_gap=max_gap)

    async def rerank(self, work: Work[Any], state: PackedQueryState, pool: Pool, wanted: RerankQuery) -> Ranking | None:
        rerank = self.ports.reranker.rerank
        ranking = await self._attempt(work, "reranker", lambda timeout_s: rerank(state, pool, wanted, timeout_s))
        if ranking is not None:
            work.times.queue_ms += ranking.queue_ms
            work.times.rerank_ms += ranking.stage_ms
        return ranking

    async def _attempt(
        self, work: Work[Any], dependency: str, call: Callable[[float], Awaitable[T]], limit_s: float | None = None
    ) -> T | None:
        """Call through the breaker; return None if the call fails. The breaker ignores time-outs due to the caller's
        deadline. limit_s: None means the component's limit.
        """
        if limit_s is None:
            is_store = dependency in ("state_store", "sessions")
            limit_s = self.limits.state_timeout_s if is_store else self.limits.stage_timeout_s
        left = work.left_s - self.limits.answer_reserve_s
        if left <= 0:
            return None
        timeout_s = min(limit_s, left)
        self._stalls.watch(timeout_s)

        async def within() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await call(timeout_s)
            except TimeoutError as exc:
                raise DeadlineExceeded(f"{dependency}: no answer within {timeout_s * 1000:.0f} ms") from exc

        result = await self._breakers[dependency].attempt(within, patient=timeout_s >= limit_s)
        if result is None:
            self._on_nothing(dependency)
        return result
