"""The peers behind the ports of encoder, candidates and reranker: remote processes, or this one."""

from typing import Any, Protocol

import grpc

from services.platform.rpc import client as rpc_client


class Peer(Protocol):
    """A process that answers RPCs, remote or local."""

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """Await `method` of `stub`, an idempotent call, within `timeout_s`. Raises: as `rpc_client.call`."""

    async def close(self) -> None:
        """Close the peer; no call follows."""


class Remote:
    """Implements `Peer` over a channel to the replicas whose health is SERVING."""

    def __init__(self, channel: grpc.aio.Channel, of: str = "") -> None:
        """of: what they serve, after the name in an error: " of model m1"."""
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
