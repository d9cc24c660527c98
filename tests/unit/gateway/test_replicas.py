"""Replicas of two models behind one address, as in a rolling deploy: real servers behind a balancer of connections."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, encoder_pb2, encoder_pb2_grpc
from gateway_scene import query_state

from services.algorithms.filters import ItemFilter
from services.common import rpc_client
from services.common.errors import DependencyUnavailable, PreconditionFailed
from services.gateway.adapters.processes import RemoteCandidates, RemoteEncoder
from services.gateway.adapters.replicas import Replicas
from services.gateway.domain import HistoryEvent, Pool, Seen


class Replica(candidates_pb2_grpc.CandidatesServiceServicer, encoder_pb2_grpc.EncoderServiceServicer):
    """A process of one model. It may be replaced by the next one in place."""

    def __init__(self, model: str) -> None:
        self.model, self.calls, self.is_away = model, 0, False

    async def Search(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        if request.query_state.model_version != self.model:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this index holds model {self.model!r}")
        return candidates_pb2.SearchResponse(item_ids=["a"], scores=[1.0], index_version=self.model)

    async def Encode(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return encoder_pb2.EncodeResponse(query_state={"model_version": self.model, "components": b"abc"})


@asynccontextmanager
async def balanced(*replicas: Replica, order: Sequence[int]) -> AsyncIterator[Callable[[], grpc.aio.Channel]]:
    """One address in front of them: connection number n goes to replica order[n], the last one for good."""
    async with AsyncExitStack() as stack:
        ports = []
        for replica in replicas:
            server = grpc.aio.server()
            candidates_pb2_grpc.add_CandidatesServiceServicer_to_server(replica, server)
            encoder_pb2_grpc.add_EncoderServiceServicer_to_server(replica, server)
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            stack.push_async_callback(server.stop, None)
        taken = 0

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal taken
            port = ports[order[min(taken, len(order) - 1)]]
            taken += 1
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_forward(reader, inner_writer), _forward(inner_reader, writer))

        balancer = await stack.enter_async_context(await asyncio.start_server(accept, "127.0.0.1", 0))
        address = f"127.0.0.1:{balancer.sockets[0].getsockname()[1]}"
        yield partial(rpc_client.channel, address, shares=False)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def search(candidates: RemoteCandidates) -> Pool:
    return await candidates.propose(query_state("q"), pool_size=5, filter=ItemFilter(), seen=Seen(), timeout_s=5.0)


async def test_a_refusal_is_tried_once_more_and_then_the_replica_of_this_model_is_asked_first() -> None:
    new, old = Replica("m2"), Replica("m1")
    async with balanced(new, old, order=[0, 1]) as connect:
        replicas = Replicas(connect)
        candidates = RemoteCandidates(replicas)
        for _ in range(5):
            assert (await search(candidates)).index_version == "m1"
        await replicas.close()
    assert (new.calls, old.calls) == (1, 5)


async def test_where_both_connections_refuse_another_one_is_made() -> None:
    new, old = Replica("m2"), Replica("m1")
    async with balanced(new, old, order=[0, 0, 1]) as connect:
        replicas = Replicas(connect, renew_every_s=0.0)
        candidates = RemoteCandidates(replicas)
        with pytest.raises(PreconditionFailed, match="holds model 'm2'"):
            await search(candidates)
        assert new.calls == 4
        assert (await search(candidates)).index_version == "m1"
        await replicas.close()


async def test_connections_are_made_anew_at_most_so_often() -> None:
    now, made = 100.0, 0
    new = Replica("m2")

    async with balanced(new, order=[0]) as connect:

        def counted() -> grpc.aio.Channel:
            nonlocal made
            made += 1
            return connect()

        replicas = Replicas(counted, renew_every_s=0.5, clock=lambda: now)
        for after_s, wanted in [(0.0, 3), (0.4, 3), (0.2, 4)]:
            now += after_s
            with pytest.raises(PreconditionFailed):
                await search(RemoteCandidates(replicas))
            assert made == wanted
        await replicas.close()


async def test_an_outage_is_not_tried_again() -> None:
    away, other = Replica("m1"), Replica("m1")
    away.is_away = True
    async with balanced(away, other, order=[0, 1]) as connect:
        replicas = Replicas(connect)
        with pytest.raises(DependencyUnavailable, match="draining"):
            await search(RemoteCandidates(replicas))
        await replicas.close()
    assert (away.calls, other.calls) == (1, 0)


async def test_a_state_of_another_model_is_a_refusal_too() -> None:
    new, old = Replica("m2"), Replica("m1")
    history = [HistoryEvent("a", 1)]
    async with balanced(new, old, order=[0, 1]) as connect:
        replicas = Replicas(connect)
        encoded = await RemoteEncoder(replicas, "m1").encode("ann", history, 5.0)
        assert encoded.query_state is not None
        assert encoded.query_state.model_version == "m1"
        with pytest.raises(PreconditionFailed, match="encodes for model 'm2'; this gateway serves 'm3'"):
            await RemoteEncoder(replicas, "m3").encode("ann", history, 5.0)
        await replicas.close()
