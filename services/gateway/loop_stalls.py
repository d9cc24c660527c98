"""When the process's own event loop stood still: what other parts are then not blamed for."""

import asyncio
import time
from collections import deque

_EVERY_S = 0.02
_KEPT = 64


class LoopStalls:
    """Looks every 20 ms while somebody wants to know; later is a stall. For one event loop."""

    def __init__(self) -> None:
        self._stalls: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._looking: asyncio.Task[None] | None = None
        self._until = 0.0

    def watch(self, seconds: float) -> None:
        """Look for so long: a call begins that may be blamed on somebody."""
        self._until = max(self._until, time.monotonic() + seconds)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    def stop(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()

    def since(self, began: float) -> float:
        """Seconds that the loop stood still after `began` (monotonic clock)."""
        return sum(min(late_s, at - began) for at, late_s in self._stalls if at > began)

    async def _look(self) -> None:
        while time.monotonic() < self._until:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            now = time.monotonic()
            if now - due > _EVERY_S:
                self._stalls.append((now, now - due))
