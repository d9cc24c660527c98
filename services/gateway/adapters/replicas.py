"""Calls to a process of which several replicas may stand behind one address, not all of one model during a deploy.

A replica of another model refuses a query state of this one (PreconditionFailed). That says nothing of the others, so
the call is made again over another connection, which a balancer may have given to another replica, and over both once
more, since each goes round where its address stands for several; the connection that answered is asked first from then
on. Where all refuse, one of them is made anew. How an address leads to a replica is gRPC's and the network's.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from services.common import rpc_client
from services.common.errors import PreconditionFailed

log = structlog.get_logger()

# What is under way on a connection that is given up has so long to end: more than any call of the gateway takes.
_CLOSE_GRACE_S = 5.0
_ROUNDS = 2


class _Connection:
    """A channel and its stubs, each made once."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._stubs: dict[Any, Any] = {}

    def method(self, stub: Any, name: str) -> Any:
        found = self._stubs.get(stub)
        if found is None:
            found = self._stubs[stub] = stub(self.channel)
        return getattr(found, name)


class Replicas:
    """Two connections to one address. `connect` makes one, not shared with another. For one event loop.

    renew_every_s: how often a connection may be made anew while both refuse.
    """

    def __init__(
        self,
        connect: Callable[[], grpc.aio.Channel],
        *,
        renew_every_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect, self._renew_every_s, self._clock = connect, renew_every_s, clock
        self._connections = [_Connection(connect()), _Connection(connect())]
        self._renew_at = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    async def call(
        self,
        stub: Any,
        method: str,
        request: Any,
        *,
        timeout_s: float,
        peer: str,
        check: Callable[[Any], None] = lambda response: None,
    ) -> Any:
        """Await `method` of `stub`, a call that may be repeated, within `timeout_s` in all.

        check: raises PreconditionFailed for an answer that is of no use here. Raises: as `rpc_client.call`;
        PreconditionFailed when every replica that was asked refused.
        """
        until = self._clock() + timeout_s
        first, second = self._connections
        *tries, last = (first, second) * _ROUNDS
        for connection in tries:
            try:
                response = await self._once(connection, stub, method, request, until - self._clock(), peer, check)
            except PreconditionFailed as exc:
                log.debug("replica_refused", peer=peer, reason=exc.message)
                continue
            if connection is second and self._connections == [first, second]:
                self._connections = [second, first]
            return response
        try:
            return await self._once(last, stub, method, request, until - self._clock(), peer, check)
        except PreconditionFailed:
            self._renew(last)
            raise

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(connection.channel.close() for connection in self._connections), *self._closing)

    @staticmethod
    async def _once(
        connection: _Connection,
        stub: Any,
        method: str,
        request: Any,
        timeout_s: float,
        peer: str,
        check: Callable[[Any], None],
    ) -> Any:
        response = await rpc_client.call(connection.method(stub, method), request, timeout_s=timeout_s, peer=peer)
        check(response)
        return response

    def _renew(self, refused: _Connection) -> None:
        now = self._clock()
        if now < self._renew_at or refused not in self._connections:
            return
        self._renew_at = now + self._renew_every_s
        # Asked second: the next call that the first one refuses goes over it.
        self._connections = [
            *(one for one in self._connections if one is not refused),
            _Connection(self._connect()),
        ]
        closing = asyncio.get_running_loop().create_task(refused.channel.close(_CLOSE_GRACE_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
