"""Calls of dependencies that an answer can do without: within a limit and what the deadline leaves, behind breakers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from services.common.errors import DeadlineExceeded
from services.gateway.breaker import Breaker

T = TypeVar("T")


class Attempts:
    """A breaker for each dependency. reserve_s: kept of a deadline to answer without whatever used its time up."""

    def __init__(self, dependencies: Iterable[str], *, reserve_s: float, breaker_seconds: float) -> None:
        self._reserve_s = reserve_s
        self._breakers = {name: Breaker(name, open_seconds=breaker_seconds) for name in dependencies}

    async def __call__(
        self, deadline: float, dependency: str, limit_s: float, call: Callable[[float], Awaitable[T]]
    ) -> T | None:
        """Call a dependency within `limit_s` and what `deadline` (monotonic clock) leaves; None when that gave none.

        A time-out that the caller's own deadline caused says nothing about the dependency, and is not remembered.
        """
        left = deadline - time.monotonic() - self._reserve_s
        if left <= 0:
            return None
        timeout_s = min(limit_s, left)

        async def within() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await call(timeout_s)
            except TimeoutError as exc:
                raise DeadlineExceeded(f"{dependency}: no answer within {timeout_s * 1000:.0f} ms") from exc

        return await self._breakers[dependency].attempt(within, patient=timeout_s >= limit_s)
