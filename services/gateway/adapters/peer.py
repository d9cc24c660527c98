"""The processes, remote or local, that the port adapters call."""

import time
from typing import Any, Protocol

import grpc

from services.gateway.health.minutes import PartCalls
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, FreshetError, Overloaded
from services.platform.rpc import client as rpc_client

FAILURES = (DependencyUnavailable, DeadlineExceeded, Overloaded)
# The peer's own status: no user's answer depends on it, so `Timed` does not count it.
_STATUS = ("GetIndexInfo", "GetRerankerInfo")


class Peer(Protocol):
    """A process that answers RPCs, remote or local."""

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """Await an idempotent call within `timeout_s`. Raises: as `rpc_client.call`."""

    async def close(self) -> None:
        """Close the peer; no call follows."""


class Remote:
    """Implements `Peer` over a channel to SERVING replicas."""

    def __init__(self, channel: grpc.aio.Channel, of: str = "") -> None:
        """of: appended to the peer's name in errors, for example " of model m1"."""
        self._channel, self._of = channel, of
        self._stubs: dict[Any, Any] = {}

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """As `Peer.call`."""
        if stub not in self._stubs:
            self._stubs[stub] = stub(self._channel)
        called = getattr(self._stubs[stub], method)
        return await rpc_client.call(called, request, timeout_s=timeout_s, peer=peer + self._of)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class Timed:
    """Implements `Peer`: counts another peer's calls."""

    def __init__(self, peer: Peer, calls: PartCalls) -> None:
        self._peer, self._calls = peer, calls

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """As `Peer.call`."""
        if method in _STATUS:
            return await self._peer.call(stub, method, request, timeout_s=timeout_s, peer=peer)
        began = time.perf_counter()
        try:
            answer = await self._peer.call(stub, method, request, timeout_s=timeout_s, peer=peer)
        except FreshetError as exc:
            self._calls.add(time.perf_counter() - began, failed=isinstance(exc, FAILURES))
            raise
        self._calls.add(time.perf_counter() - began)
        return answer

    async def close(self) -> None:
        """Close the other peer."""
        await self._peer.close()
