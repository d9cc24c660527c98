"""Replicas of two models behind one address, as in a rolling deploy: health says which of them serves which model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, encoder_pb2, encoder_pb2_grpc
from gateway_scene import query_state
from prometheus_client import CollectorRegistry

from services.algorithms.rules.filters import ItemFilter
from services.contracts.processes import PROCESSES
from services.contracts.shards import WHOLE, Shard
from services.gateway.adapters.peers import RemoteEncoder
from services.gateway.adapters.processes import Remote, RemoteCandidates
from services.gateway.domain import HistoryEvent, Pool, Seen
from services.platform.config import ProcessSettings
from services.platform.errors import DependencyUnavailable, FreshetError, PreconditionFailed
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import HealthState, RpcServer

ROW = PROCESSES["candidates"]


class Replica(candidates_pb2_grpc.CandidatesServiceServicer, encoder_pb2_grpc.EncoderServiceServicer):
    """A process of one model, and of one shard."""

    def __init__(self, model: str, shard: Shard = WHOLE) -> None:
        self.model, self.shard, self.calls, self.port = model, shard, 0, 0
        self.health = HealthState(ready=True)
        self.health.serve_as([ROW.health_of(model, str(shard))])

    async def Search(self, request: Any, context: Any) -> Any:
        self.calls += 1
        shard = candidates_pb2.Shard(index=self.shard.index, count=self.shard.count, num_items=1)
        return candidates_pb2.SearchResponse(item_ids=["a"], scores=[1.0], index_version=self.model, shard=shard)

    async def Encode(self, request: Any, context: Any) -> Any:
        return encoder_pb2.EncodeResponse(query_state={"model_version": self.model, "components": b"abc"})

    def add(self, server: grpc.aio.Server) -> list[str]:
        candidates_pb2_grpc.add_CandidatesServiceServicer_to_server(self, server)
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(self, server)
        return [ROW.health_service]


@asynccontextmanager
async def behind_one_address(*replicas: Replica) -> AsyncIterator[Callable[..., RemoteCandidates]]:
    """Opens the candidates of a model, as a gateway of that model does."""
    async with AsyncExitStack() as stack:
        for replica in replicas:
            server = RpcServer(
                process="candidates",
                settings=ProcessSettings(port=0, metrics_port=0, drain_seconds=0),
                add_services=replica.add,
                health_state=replica.health,
                registry=CollectorRegistry(),
            )
            await server.start()
            stack.push_async_callback(server.drain)
            replica.port = server.port
        target = ",".join(f"127.0.0.1:{replica.port}" for replica in replicas)

        def candidates_of(model: str, shard: Shard = WHOLE) -> RemoteCandidates:
            health = ROW.health_of(model, str(shard))
            channel = rpc_client.channel(target, shares=False, service=ROW.health_service, health=health)
            remote = Remote(channel, of=f" of model {model}")
            stack.push_async_callback(remote.close)
            return RemoteCandidates(remote, shard)

        yield candidates_of


async def search(candidates: RemoteCandidates) -> Pool:
    return await candidates.propose(query_state("q"), k=5, filter=ItemFilter(), seen=Seen(), timeout_s=5.0)


async def eventually(candidates: RemoteCandidates) -> Pool:
    async with asyncio.timeout(20):
        while True:
            try:
                return await search(candidates)
            except FreshetError:
                await asyncio.sleep(0.02)


async def test_while_no_replica_serves_the_model_it_is_unavailable_and_then_goes_on_by_itself() -> None:
    replica = Replica("m2")
    async with behind_one_address(replica) as candidates_of:
        candidates = candidates_of("m1")
        with pytest.raises(DependencyUnavailable, match=r"candidates of model m1: .* backend unhealthy"):
            await search(candidates)
        assert replica.calls == 0
        # A process that holds several models, as the encoder does, takes this one in beside.
        replica.health.serve_as([ROW.health_of(model, str(WHOLE)) for model in ("m1", "m2")])
        await eventually(candidates)


async def test_a_model_that_a_replica_holds_no_longer_is_asked_elsewhere() -> None:
    first, second = Replica("m1"), Replica("m1")
    async with behind_one_address(first, second) as candidates_of:
        candidates = candidates_of("m1")
        async with asyncio.timeout(20):
            while not (first.calls and second.calls):
                await search(candidates)
        first.health.serve_as([ROW.health_of("m2", str(WHOLE))])
        async with asyncio.timeout(20):
            while True:
                before = first.calls, second.calls
                for _ in range(4):
                    await search(candidates)
                if (first.calls, second.calls) == (before[0], before[1] + 4):
                    break


async def test_a_replica_of_another_shard_is_not_asked() -> None:
    first, second = Replica("m1", Shard(0, 2)), Replica("m1", Shard(1, 2))
    async with behind_one_address(first, second) as candidates_of:
        for _ in range(5):
            await search(candidates_of("m1", Shard(1, 2)))
        assert (first.calls, second.calls) == (0, 5)


async def test_a_state_of_another_model_is_refused() -> None:
    replica = Replica("m2")
    async with behind_one_address(replica), rpc_client.channel(f"127.0.0.1:{replica.port}") as channel:
        with pytest.raises(PreconditionFailed, match="encodes for model 'm2'; this gateway serves 'm3'"):
            await RemoteEncoder(Remote(channel), "m3").encode("ann", [HistoryEvent("a", 1)], 5.0)
