"""Wait for freshness tokens: one read of the state store serves all waiters of a partition."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.gateway.domain import FreshnessToken
from services.platform.rpc.admission import waiting
from services.user_state.values import UserView


@dataclass(frozen=True, slots=True)
class _Waiter:
    user_id: str
    token: FreshnessToken
    until: float
    done: asyncio.Future[None]


class TokenWaits:
    """Waits in one event loop. read: returns a user's view with the partition's watermark; None if the store fails."""

    def __init__(self, read: Callable[[str, int], Awaitable[UserView | None]], *, poll_s: float) -> None:
        self._read, self._poll_s = read, poll_s
        self._waiters: dict[int, list[_Waiter]] = {}
        self._pollers: set[asyncio.Task[None]] = set()

    async def wait(self, user_id: str, token: FreshnessToken, until: float) -> bool:
        """Wait until the token is reached, its epoch ended, the store fails, or `until` (monotonic clock). Return False
        without a wait if no time is left.
        """
        if time.monotonic() + self._poll_s >= until:
            return False
        loop = asyncio.get_running_loop()
        waiter = _Waiter(user_id, token, until, loop.create_future())
        waiters = self._waiters.setdefault(token.partition, [])
        waiters.append(waiter)
        if len(waiters) == 1:
            poller = loop.create_task(self._poll(token.partition))
            self._pollers.add(poller)
            poller.add_done_callback(self._pollers.discard)
        with waiting():
            try:
                await waiter.done
            finally:
                waiter.done.cancel()
        return True

    async def _poll(self, partition: int) -> None:
        waiters = self._waiters[partition]
        try:
            while waiters:
                await asyncio.sleep(self._poll_s)
                waiters[:] = [one for one in waiters if not one.done.done()]
                view = await self._read(waiters[0].user_id, partition) if waiters else None
                last = time.monotonic() + self._poll_s
                for one in waiters:
                    waits = view is not None and view.epoch == one.token.epoch and not is_reached(view, one.token)
                    if (not waits or last >= one.until) and not one.done.done():
                        one.done.set_result(None)
        finally:
            for one in self._waiters.pop(partition):
                if not one.done.done():
                    one.done.set_result(None)


def is_reached(view: UserView, token: FreshnessToken) -> bool:
    """Whether the store has applied the token's event."""
    return view.epoch == token.epoch and view.watermark is not None and view.watermark >= token.offset
