"""One user's visit, in memory: freshness token, page, shown items with their exposures.

The next answer reflects what a session recorded, or its `token_honoured` is False. Calls of one session run one after
the other, also from several threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from freshet_client.answers import Explanation, FreshnessToken, Receipt, Recommendation
from freshet_client.errors import PreconditionFailed
from freshet_client.requests import Filter, HistoryEvent, Impression, Interaction, NotAgain, RecommendOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from freshet_client.aio import AsyncClient
    from freshet_client.client import Client

# The gateway's limits.
_MAX_DENIED, _MAX_HISTORY, _MAX_ITEMS = 10_000, 1_000, 200
_MAX_ANSWERS = 50
_MAX_EXPOSED = 10_000


@dataclass
class _List:
    k: int
    depth: int
    options: RecommendOptions
    token: str
    shown: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        return bool(self.token) or 0 < len(self.shown) < self.depth


class _State:
    """A session's state; it sends nothing."""

    def __init__(self, user_id: str, not_again: NotAgain | None) -> None:
        self.is_visitor = not user_id
        # One id for all calls of this visitor; nothing is recorded under it.
        self.user_id = user_id or f"visitor-{uuid.uuid4().hex}"
        self.not_again = not_again
        self.token: FreshnessToken | None = None
        self.exposure_id = ""
        self.history: list[HistoryEvent] = []
        self.exposed: dict[str, tuple[str, int]] = {}
        self.pages: _List | None = None
        self._answers: deque[tuple[float, list[str]]] = deque(maxlen=_MAX_ANSWERS)

    def recommend_options(self, options: RecommendOptions, denied: Sequence[str] = ()) -> RecommendOptions:
        """The call's own options and those that the session adds."""
        filled: RecommendOptions = {"freshness_token": self.token, "not_again": self.not_again, **options}
        denied = [*denied, *self._recent_items(filled.get("not_again"))]
        if self.is_visitor:
            filled["history"] = options.get("history") or tuple(self.history)
            filled["not_again"], filled["page_depth"] = None, 0
        if denied:
            wanted = options.get("filter") or Filter()
            both = list(dict.fromkeys([*wanted.deny_item_ids, *denied]))[:_MAX_DENIED]
            filled["filter"] = replace(wanted, deny_item_ids=both)
        return filled

    def _recent_items(self, asked: NotAgain | None) -> list[str]:
        """Shown items to leave out, newest answer first. The gateway remembers answers only for users with a stored
        history."""
        if asked is None:
            return []
        since = time.monotonic() - 60 * asked.minutes
        return [
            item_id
            for number, (at, item_ids) in enumerate(reversed(self._answers))
            if number < asked.answers or (asked.minutes and at >= since)
            for item_id in item_ids
        ]

    def answered(self, answer: Recommendation, first_position: int = 1) -> None:
        self.exposure_id = answer.exposure_id
        self._answers.append((time.monotonic(), answer.item_ids[:_MAX_ITEMS]))
        for position, item_id in enumerate(answer.item_ids, first_position):
            self.exposed.pop(item_id, None)
            self.exposed[item_id] = (answer.exposure_id, position)
        while len(self.exposed) > _MAX_EXPOSED:
            del self.exposed[next(iter(self.exposed))]

    def began(self, k: int, options: RecommendOptions, answer: Recommendation) -> None:
        self.answered(answer)
        depth = options.get("page_depth", 0)
        self.pages = _List(k, depth, options, answer.next_page_token, answer.item_ids) if depth > k else None

    def page(self, k: int | None) -> tuple[int, RecommendOptions]:
        """The number of items and the options of the next page."""
        pages = self.pages
        assert pages is not None
        if pages.token:
            details = pages.options.get("with_details", False)
            return k or pages.k, {"page_token": pages.token, "not_again": self.not_again, "with_details": details}
        # No list is kept: ask for items that were not shown.
        left = pages.depth - len(pages.shown)
        options: RecommendOptions = {**pages.options, "page_depth": 0}
        return min(k or pages.k, left), self.recommend_options(options, pages.shown)

    def turned(self, answer: Recommendation) -> Recommendation | None:
        pages = self.pages
        assert pages is not None
        self.answered(answer, len(pages.shown) + 1 if pages.token else 1)
        pages.shown += answer.item_ids
        pages.token = answer.next_page_token
        if not answer.items or (answer.provenance.state_source == "page" and not pages.token):
            self.pages = None
        return answer if answer.items else None

    def interaction(self, item_id: str, **fields: Any) -> Interaction:
        """Make an interaction with the exposure that showed the item."""
        exposure_id, _ = self.exposed.get(item_id, ("", 0))
        given = {name: value for name, value in fields.items() if value is not None}
        return Interaction(self.user_id, item_id, exposure_id=exposure_id, **given)

    def keep(self, done: Interaction) -> None:
        """Add to a visitor's own history, oldest first."""
        at = done.event_time or datetime.now(timezone.utc)
        self.history.append(HistoryEvent(done.item_id, at, done.type, done.value))
        self.history.sort(key=lambda event: event.event_time.timestamp() if event.event_time else 0.0)
        del self.history[:-_MAX_HISTORY]

    def recorded(self, receipt: Receipt) -> Receipt:
        """Keep the receipt's token if it is newer, or of another epoch or partition."""
        new, old = receipt.token, self.token
        if old is None or (new.epoch, new.partition) != (old.epoch, old.partition) or new.offset > old.offset:
            self.token = new
        return receipt

    def impressions(self, item_ids: Sequence[str]) -> dict[str, list[Impression]]:
        """Group items by exposure. Raises: PreconditionFailed for an item that the session did not show."""
        found: dict[str, list[Impression]] = {}
        for item_id in dict.fromkeys(item_ids):
            if item_id not in self.exposed:
                raise PreconditionFailed(
                    f"item_ids: {item_id!r} was not shown in this session; allowed: what it answered"
                )
            exposure_id, position = self.exposed[item_id]
            found.setdefault(exposure_id, []).append(Impression(position, item_id))
        return {} if self.is_visitor else found


class _Session:
    def __init__(self, user_id: str, not_again: NotAgain | None) -> None:
        self._state = _State(user_id, not_again)

    @property
    def user_id(self) -> str:
        """The user's id, or a random one for this visit."""
        return self._state.user_id

    @property
    def is_visitor(self) -> bool:
        """Whether the user has no id. Then the history is the session's, and nothing is written."""
        return self._state.is_visitor

    @property
    def token(self) -> FreshnessToken | None:
        """The token of the newest write."""
        return self._state.token

    @property
    def exposure_id(self) -> str:
        """The latest answer's exposure."""
        return self._state.exposure_id

    @property
    def has_next_page(self) -> bool:
        """Whether `next_page` may return items."""
        return self._state.pages is not None and self._state.pages.goes_on


class Session(_Session):
    """A visit by the blocking client, made by `client.session(user_id)`."""

    def __init__(self, client: Client, user_id: str = "", *, not_again: NotAgain | None = None) -> None:
        super().__init__(user_id, not_again)
        self._client, self._lock = client, threading.Lock()

    def recommend(
        self, k: int = 10, *, timeout_s: float | None = None, **options: Unpack[RecommendOptions]
    ) -> Recommendation:
        """The top k items. `token_honoured` is False if they do not reflect this session's writes.

        With `page_depth` above k, `next_page` continues the list.
        """
        with self._lock:
            filled = self._state.recommend_options(options)
            answer = self._client.recommend(self.user_id, k, timeout_s=timeout_s, **filled)
            self._state.began(k, options, answer)
            return answer

    def next_page(self, k: int | None = None, *, timeout_s: float | None = None) -> Recommendation | None:
        """The next items of the list, None after its end. Pages of a kept list repeat nothing. Without a kept list (a
        visitor, a new user), a page has the best items that were not shown.

        Raises: PreconditionFailed for a list that has ended (after 15 minutes or four newer lists).
        """
        with self._lock:
            if not self.has_next_page:
                return None
            number, options = self._state.page(k)
            try:
                answer = self._client.recommend(self.user_id, number, timeout_s=timeout_s, **options)
            except PreconditionFailed:
                self._state.pages = None
                raise
            return self._state.turned(answer)

    def record(
        self,
        item_id: str,
        type: str = "",
        value: float = 0.0,
        *,
        event_time: datetime | None = None,
        event_id: str | None = None,
        query: str = "",
        context: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Receipt | None:
        """Write an Interaction of the user, with the exposure that showed the item. Pass `event_id` to repeat a failed
        write. A visitor's interaction enters the session's history, without a receipt."""
        with self._lock:
            fields = {"type": type, "value": value, "event_time": event_time, "event_id": event_id, "query": query}
            done = self._state.interaction(item_id, context=context, **fields)
            if self.is_visitor:
                self._state.keep(done)
                return None
            return self._state.recorded(self._client.record(done, timeout_s=timeout_s)[0])

    def undo(self, event_id: str, *, timeout_s: float | None = None) -> Receipt:
        """Undo one event; the next answer reflects that. Raises: PreconditionFailed for a visitor."""
        with self._lock:
            _refuse_visitor(self)
            return self._state.recorded(self._client.undo(self.user_id, event_id, timeout_s=timeout_s))

    def seen(self, *item_ids: str, timeout_s: float | None = None) -> list[Receipt]:
        """Record which shown items the user saw. For a visitor, record nothing.

        Raises: PreconditionFailed for an item that was not shown here.
        """
        with self._lock:
            receipts: list[Receipt] = []
            for exposure_id, seen in self._state.impressions(item_ids).items():
                receipts += self._client.record_impressions(self.user_id, exposure_id, seen, timeout_s=timeout_s)
            for receipt in receipts:
                self._state.recorded(receipt)
            return receipts

    def explain(self, item_id: str, *, max_pairs: int = 0, timeout_s: float | None = None) -> Explanation:
        """Why an item has its score for this user."""
        with self._lock:
            history = self._state.history
            return self._client.explain(
                self.user_id, item_id, history=history, max_pairs=max_pairs, timeout_s=timeout_s
            )


class AsyncSession(_Session):
    """`Session` for asyncio; the same methods are awaited."""

    def __init__(self, client: AsyncClient, user_id: str = "", *, not_again: NotAgain | None = None) -> None:
        super().__init__(user_id, not_again)
        self._client, self._lock = client, asyncio.Lock()

    async def recommend(
        self, k: int = 10, *, timeout_s: float | None = None, **options: Unpack[RecommendOptions]
    ) -> Recommendation:
        async with self._lock:
            filled = self._state.recommend_options(options)
            answer = await self._client.recommend(self.user_id, k, timeout_s=timeout_s, **filled)
            self._state.began(k, options, answer)
            return answer

    async def next_page(self, k: int | None = None, *, timeout_s: float | None = None) -> Recommendation | None:
        async with self._lock:
            if not self.has_next_page:
                return None
            number, options = self._state.page(k)
            try:
                answer = await self._client.recommend(self.user_id, number, timeout_s=timeout_s, **options)
            except PreconditionFailed:
                self._state.pages = None
                raise
            return self._state.turned(answer)

    async def record(
        self,
        item_id: str,
        type: str = "",
        value: float = 0.0,
        *,
        event_time: datetime | None = None,
        event_id: str | None = None,
        query: str = "",
        context: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Receipt | None:
        async with self._lock:
            fields = {"type": type, "value": value, "event_time": event_time, "event_id": event_id, "query": query}
            done = self._state.interaction(item_id, context=context, **fields)
            if self.is_visitor:
                self._state.keep(done)
                return None
            return self._state.recorded((await self._client.record(done, timeout_s=timeout_s))[0])

    async def undo(self, event_id: str, *, timeout_s: float | None = None) -> Receipt:
        async with self._lock:
            _refuse_visitor(self)
            return self._state.recorded(await self._client.undo(self.user_id, event_id, timeout_s=timeout_s))

    async def seen(self, *item_ids: str, timeout_s: float | None = None) -> list[Receipt]:
        async with self._lock:
            receipts: list[Receipt] = []
            for exposure_id, seen in self._state.impressions(item_ids).items():
                receipts += await self._client.record_impressions(self.user_id, exposure_id, seen, timeout_s=timeout_s)
            for receipt in receipts:
                self._state.recorded(receipt)
            return receipts

    async def explain(self, item_id: str, *, max_pairs: int = 0, timeout_s: float | None = None) -> Explanation:
        async with self._lock:
            history = self._state.history
            return await self._client.explain(
                self.user_id, item_id, history=history, max_pairs=max_pairs, timeout_s=timeout_s
            )


def _refuse_visitor(session: _Session) -> None:
    if session.is_visitor:
        raise PreconditionFailed("user_id: a visitor has no recorded events; allowed: a session of a user")
