"""The processes, remote or local, that the ports' adapters call."""

import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import grpc

from services.contracts.processes import PROCESSES
from services.contracts.shards import Shard
from services.contracts.topics.version_sets import VersionSet
from services.gateway.config import GatewaySettings, shard_addresses
from services.gateway.metrics import PartCalls
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, FreshetError, Overloaded
from services.platform.request_context import Tracing
from services.platform.rpc import client as rpc_client

FAILURES = (DependencyUnavailable, DeadlineExceeded, Overloaded)
# `Timed` does not count calls for a peer's status: no user's answer depends on them.
_STATUS = ("GetIndexInfo", "GetRerankerInfo")


class Peer(Protocol):
    """A process that answers RPCs, remote or local."""

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """Make an idempotent call. Raises: as `rpc_client.call`."""

    async def close(self) -> None:
        """Close the peer; no call follows."""


class Remote:
    """Implements `Peer` over a gRPC channel. of: suffix of the peer's name in errors, such as " of model m1"."""

    def __init__(self, channel: grpc.aio.Channel, of: str = "") -> None:
        self._channel, self._of = channel, of
        self._stubs: dict[Any, Any] = {}

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        if stub not in self._stubs:
            self._stubs[stub] = stub(self._channel)
        called = getattr(self._stubs[stub], method)
        return await rpc_client.call(called, request, timeout_s=timeout_s, peer=peer + self._of)

    async def close(self) -> None:
        await self._channel.close()


class Timed:
    """Implements `Peer`: counts another peer's calls."""

    def __init__(self, peer: Peer, calls: PartCalls) -> None:
        self._peer, self._calls = peer, calls

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
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
        await self._peer.close()


class Peers:
    """A version set's processes. The gateway's settings give addresses that the set lacks. near: peers inside this
    process.
    """

    def __init__(
        self, one: VersionSet, settings: GatewaySettings, tracing: Tracing, model_version: str, near: Mapping[str, Peer]
    ) -> None:
        channel = partial(rpc_client.channel, interceptors=tracing.client_interceptors, tls=settings.tls)
        # For `ProbedParts`: these channels also reach replicas that are not ready.
        self.checked: dict[str, list[tuple[str, grpc.aio.Channel, str]]] = defaultdict(list)

        def replicas(process: str, address: str, shard: str = "") -> Remote:
            row = PROCESSES[process]
            health = row.health_of(model_version, shard)
            connected = channel(address, shares=False, service=row.health_service, health=health)
            self.checked[process].append((address, channel(address), health))
            return Remote(connected, of=f" of model {model_version}")

        addresses = shard_addresses(one.candidates or settings.candidates_address)
        shards = [str(Shard(number, len(addresses))) for number in range(len(addresses))]
        self.candidates = (
            [near["candidates"]]
            if "candidates" in near
            else [replicas("candidates", address, shard) for address, shard in zip(addresses, shards, strict=True)]
        )
        self.reranker = near.get("reranker") or replicas("reranker", one.reranker or settings.reranker_address)
        self.encoder = replicas("encoder", settings.encoder_address)
        generator = one.generator or settings.generator_address
        self.generator = Remote(asked := channel(generator))
        self.checked["generator"] = [(generator, asked, "")]
        self.refreshers = {address: channel(address) for address in one.refreshers or settings.refreshers}
        self.checked["refresher"] = [(address, asked, "") for address, asked in self.refreshers.items()]

    async def close(self) -> None:
        for one in (*self.candidates, self.reranker, self.encoder):
            await one.close()
        for of_part in self.checked.values():
            for _, asked, _ in of_part:
                await asked.close()
