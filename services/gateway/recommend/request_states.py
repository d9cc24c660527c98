"""Find a request's state, as fresh as its token if possible.

A history in the request is encoded. Without one, the result is a stored state of the user's whole history, else a
state encoded now from the stored history, else an older stored state.
"""

import asyncio
import time
from dataclasses import dataclass, replace

from services.algorithms.bundles.event_schema import EventSchema
from services.gateway.domain import (
    Degradation,
    FreshnessToken,
    HistoryEvent,
    RecommendQuery,
    Seen,
    last_event_ms,
    seen_in,
    turned_down_in,
)
from services.gateway.ports import StreamStatus
from services.gateway.recommend.repeats import MAX_ANSWERS, MAX_IMPRESSIONS, discounts_of, not_again
from services.gateway.recommend.token_waits import TokenWaits, is_reached
from services.gateway.stages import FoundState, Limits, Preferences, Stages, Work
from services.gateway.validation import with_times
from services.gateway.write.record import AcknowledgedLag
from services.platform.rpc import admission
from services.user_state.layout import ANSWERS, IMPRESSIONS
from services.user_state.values import StoredState, UserView


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStates:
    """Finds states, and adds seen items and recent exposures to the request's `Work`."""

    stages: Stages
    tokens: TokenWaits
    lag: AcknowledgedLag
    stream: StreamStatus
    schema: EventSchema
    limits: Limits
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
            # There may be events that popular items do not reflect.
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
        own = seen_in(reversed(history), self.schema)
        # Items seen in the stored history are excluded too, but only items of the request's history vote.
        silent = [*turned_down_in(history, self.schema), *(set(work.seen.item_ids) - set(own))]
        work.seen = Seen([*own, *work.seen.item_ids], silent)
        if encoded is not None:
            work.num_had = len(set(own))
            if encoded.query_state is None:
                return FoundState()
            last_ms = last_event_ms(history, self.schema)
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
        """Wait as `TokenWaits.wait`, then read again. While the log is unreachable, nothing new is applied: no wait."""
        began = time.monotonic()
        until = work.deadline - self.limits.token_reserve_s
        is_futile = view.epoch != token.epoch or not self.stream.log_reachable
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
    """Mark the token as not honoured if this state, which is older than the watermark, does not reach it."""
    token = work.query.token
    if token is None:
        return
    if state is None or state.partition != token.partition or state.offset < token.offset:
        token_failed(work)
