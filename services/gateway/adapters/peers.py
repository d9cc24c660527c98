"""A version set's processes: channels for calls, and one per address for health checks."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import grpc

from services.contracts.processes import PROCESSES
from services.contracts.shards import Shard
from services.contracts.version_sets import VersionSet
from services.gateway.adapters.peer import Peer, Remote
from services.gateway.config import GatewaySettings, shard_addresses
from services.platform.rpc import client as rpc_client
from services.platform.tracing import Tracing


class Peers:
    """Addresses that the set lacks come from the gateway's settings."""

    def __init__(
        self, one: VersionSet, settings: GatewaySettings, tracing: Tracing, model_version: str, near: Mapping[str, Peer]
    ) -> None:
        """near: peers inside this process."""
        channel = partial(rpc_client.channel, interceptors=tracing.client_interceptors, tls=settings.tls)
        # By part, for `ProbedParts`; these channels also reach replicas that are not ready.
        self.checked: dict[str, list[tuple[str, grpc.aio.Channel, str]]] = defaultdict(list)

        def replicas(process: str, address: str, shard: str = "") -> Remote:
            """Return the address' replicas that serve this model."""
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
        """Close all channels."""
        for one in (*self.candidates, self.reranker, self.encoder):
            await one.close()
        for of_part in self.checked.values():
            for _, asked, _ in of_part:
                await asked.close()
