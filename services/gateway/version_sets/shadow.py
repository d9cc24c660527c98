"""The shadow: a second version set, called after an answer to compare its answer with the first. The call does not
affect the caller's deadline, exposures, pages or metrics.
"""

import asyncio
import contextvars
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random

import structlog

from services.gateway.domain import Recommendation, RecommendQuery
from services.platform.errors import FreshetError

log = structlog.get_logger()

# A shadow uses spare capacity only.
MAX_UNDER_WAY = 2
# Most users whose next interaction is awaited, and most stored latencies.
MAX_WAITING, MAX_TIMES = 10_000, 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowReport:
    """Counts and means since the start. overlap: mean share of common items. score_shift: mean difference of the best
    scores, shadow minus answer. median_ms, p99_ms: latencies of the shadow's newest answers. taken: number of
    first items that users took after compared answers; taken_from_answer, taken_from_shadow: how many of these the
    answer and the shadow contained.
    """

    requests: int
    skipped: int
    failed: int
    overlap: float
    score_shift: float
    median_ms: float
    p99_ms: float
    taken: int
    taken_from_answer: int
    taken_from_shadow: int


class Shadow:
    """Calls `ask` for a share of one event loop's requests."""

    def __init__(
        self,
        name: str,
        ask: Callable[[RecommendQuery], Awaitable[Recommendation]],
        *,
        share: float,
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.share = name, share
        self._ask, self._rng, self._clock = ask, rng, clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: OrderedDict[str, tuple[frozenset[str], frozenset[str]]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        # Sums over compared answers, and milliseconds of the newest ones.
        self._overlap, self._shift = 0.0, 0.0
        self._times: deque[float] = deque(maxlen=MAX_TIMES)

    def beside(self, query: RecommendQuery, answer: Recommendation) -> None:
        """Call the shadow for a share of queries, never for a page of a stored list."""
        if query.page_token or self._rng.random() >= self.share:
            return
        if len(self._tasks) >= MAX_UNDER_WAY:
            self._counts["skipped"] += 1
            return
        # A new context has no deadline, queue position or trace of the caller.
        task = asyncio.get_running_loop().create_task(
            self._compare(query, answer), name="shadow", context=contextvars.Context()
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def took(self, user_id: str, item_id: str) -> None:
        """Count an item that a user took, if it is the first after the user's last compared answers."""
        if user_id not in self._waiting:
            return
        of_answer, of_shadow = self._waiting.pop(user_id)
        self._counts["taken"] += 1
        self._counts["taken_from_answer"] += item_id in of_answer
        self._counts["taken_from_shadow"] += item_id in of_shadow

    def report(self) -> ShadowReport:
        counts, times = self._counts, sorted(self._times)
        compared = max(1, counts["compared"])
        return ShadowReport(
            requests=counts["requests"],
            skipped=counts["skipped"],
            failed=counts["failed"],
            overlap=self._overlap / compared,
            score_shift=self._shift / compared,
            median_ms=times[len(times) // 2] if times else 0.0,
            p99_ms=times[len(times) * 99 // 100] if times else 0.0,
            taken=counts["taken"],
            taken_from_answer=counts["taken_from_answer"],
            taken_from_shadow=counts["taken_from_shadow"],
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _compare(self, query: RecommendQuery, answer: Recommendation) -> None:
        self._counts["requests"] += 1
        began = self._clock()
        try:
            shadowed = await self._ask(replace(query, page_depth=0, not_again=None, token=None))
        except FreshetError as exc:
            self._counts["failed"] += 1
            log.info("shadow_failed", set=self.name, error=type(exc).__name__, reason=exc.message)
            return
        self._times.append((self._clock() - began) * 1000)
        self._counts["compared"] += 1
        of_answer, of_shadow = _item_ids(answer), _item_ids(shadowed)
        self._overlap += len(of_answer & of_shadow) / max(1, len(answer.items), len(shadowed.items))
        if answer.items and shadowed.items:
            self._shift += shadowed.items[0].score - answer.items[0].score
        if query.user_id:
            self._waiting[query.user_id] = (of_answer, of_shadow)
            self._waiting.move_to_end(query.user_id)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)


def _item_ids(answer: Recommendation) -> frozenset[str]:
    return frozenset(item.item_id for item in answer.items)
