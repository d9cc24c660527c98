"""Read the stream's popularity from the state store every few seconds. While the store is unavailable, the last values
stay in use: all counts fade equally.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from services.algorithms.items.popularity import count_at
from services.gateway.recommend.popular import PopularItems
from services.user_state.values import Popularity, now_ms

log = structlog.get_logger()

EVERY_S = 5.0


async def follow_popularity(
    read: Callable[[], Awaitable[Sequence[Popularity]]],
    popular: PopularItems,
    *,
    every_s: float = EVERY_S,
    clock_ms: Callable[[], int] = now_ms,
) -> None:
    """Apply popularity to `popular` until cancelled. read: returns each partition's popularity."""

    def take(partitions: Sequence[Popularity]) -> None:
        popular.take(faded_counts(partitions, clock_ms()))

    last_failure = ""
    while True:
        failure = ""
        try:
            # Sorting a catalogue would block the loop.
            await asyncio.to_thread(take, await read())
        except Exception as exc:  # an unexpected error must not end the loop
            failure = str(exc) or repr(exc)
        if failure and failure != last_failure:
            log.warning("popularity_not_read", reason=failure)
        last_failure = failure
        await asyncio.sleep(every_s)


def faded_counts(partitions: Sequence[Popularity], now_ms: int) -> dict[str, float]:
    """Return each item's count in all partitions at a time, Unix milliseconds."""
    counts: dict[str, float] = {}
    for one in partitions:
        for item_id, level in one.levels.items():
            counts[item_id] = counts.get(item_id, 0.0) + count_at(level, now_ms, one.half_life_s)
    return counts
