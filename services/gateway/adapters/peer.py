"""What stands behind the gateway's ports for encoder, candidates and reranker: processes elsewhere, or this one."""

from typing import Any, Protocol

import grpc

from services.platform.rpc import client as rpc_client


class Peer(Protocol):
    """A process that answers RPCs, wherever it runs."""

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """Await `method` of `stub`, a call that may be repeated, within `timeout_s`. Raises: as `rpc_client.call`."""

    async def close(self) -> None:
        """No call comes any more."""


class Remote:
    """Implements `Peer` over a channel, which leads to the replicas whose health says that they serve."""

    def __init__(self, channel: grpc.aio.Channel, of: str = "") -> None:
        """of: what they serve, behind the name in an error: " of model m1"."""
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
