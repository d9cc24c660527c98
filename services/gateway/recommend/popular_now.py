"""Read the stream's popularity from the state store every few seconds. While the store is unavailable, the last values
stay in use: all counts fade equally.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import structlog

from services.algorithms.items.popularity import count_at
from services.gateway.recommend.popular import PopularItems
from services.user_state.values import Popularity, now_ms

log = structlog.get_logger()

EVERY_S = 5.0


class FollowedPopularity:
    """Reads popularity between `start` and `close`. read: returns that of each partition."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[Popularity]]],
        popular: PopularItems,
        *,
        every_s: float = EVERY_S,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        self._read, self._popular, self._every_s, self._clock_ms = read, popular, every_s, clock_ms
        self._task: asyncio.Task[None] | None = None
        self._failure = ""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def look(self) -> None:
        """Read once. Raises: DependencyUnavailable."""
        partitions = await self._read()
        # Sorting a catalogue would block the loop.
        await asyncio.to_thread(self._take, partitions, self._clock_ms())

    def _take(self, partitions: Sequence[Popularity], now_ms: int) -> None:
        counts: dict[str, float] = {}
        for one in partitions:
            for item_id, level in one.levels.items():
                counts[item_id] = counts.get(item_id, 0.0) + count_at(level, now_ms, one.half_life_s)
        self._popular.take(counts)

    async def _run(self) -> None:
        while True:
            failure = ""
            try:
                await self.look()
            except Exception as exc:  # an unexpected error must not end the loop
                failure = str(exc) or repr(exc)
            if failure and failure != self._failure:
                log.warning("popularity_not_read", reason=failure)
            self._failure = failure
            await asyncio.sleep(self._every_s)
