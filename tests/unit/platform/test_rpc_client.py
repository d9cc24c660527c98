"""Channels between our processes: a peer that is slow to accept a connection is not a dead one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from freshet.v1 import candidates_pb2, candidates_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.platform.rpc import client as rpc_client

SLOW_S = 0.4


@pytest.fixture
async def server_port() -> AsyncIterator[int]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(grace=None)


async def test_a_peer_that_is_slow_to_accept_a_connection_is_reached_at_the_first_attempt(server_port: int) -> None:
    """Its kernel completes the TCP handshake; the process, short of processor time, answers later."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(SLOW_S)
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server_port)
        await asyncio.gather(forward(reader, inner_writer), forward(inner_reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as slow:
        port = slow.sockets[0].getsockname()[1]
        async with rpc_client.channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


SERVICE = "freshet.v1.CandidatesService"
STATUS = health_pb2.HealthCheckResponse


class Replica(candidates_pb2_grpc.CandidatesServiceServicer):
    """Counts its calls; `fails` answers UNAVAILABLE, `hangs` nothing at all."""

    def __init__(self) -> None:
        self.health, self.calls = health.aio.HealthServicer(), 0
        self.fails, self.hangs, self.port = False, False, 0

    async def GetIndexInfo(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if self.hangs:
            await asyncio.sleep(60)
        if self.fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        return candidates_pb2.GetIndexInfoResponse()


@asynccontextmanager
async def replicas(count: int) -> AsyncIterator[tuple[list[Replica], Any]]:
    """So many servers that say they serve, and a call of whichever the channel chooses."""
    found = [Replica() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for one in found:
            await one.health.set(SERVICE, STATUS.SERVING)
            server = grpc.aio.server()
            candidates_pb2_grpc.add_CandidatesServiceServicer_to_server(one, server)
            health_pb2_grpc.add_HealthServicer_to_server(one.health, server)
            one.port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
        target = ",".join(f"127.0.0.1:{one.port}" for one in found)
        channel = await stack.enter_async_context(rpc_client.channel(target, shares=False, service=SERVICE))
        stub = candidates_pb2_grpc.CandidatesServiceStub(channel)

        async def call(timeout_s: float = 5.0) -> Any:
            return await stub.GetIndexInfo(candidates_pb2.GetIndexInfoRequest(), timeout=timeout_s)

        # Until all are connected.
        async with asyncio.timeout(20):
            while not all(one.calls for one in found):
                await call()
        for one in found:
            one.calls = 0
        yield found, call


async def test_calls_go_round_all_addresses() -> None:
    async with replicas(3) as (found, call):
        for _ in range(30):
            await call()
        assert [one.calls for one in found] == [10, 10, 10]


async def test_a_replica_that_says_it_does_not_serve_is_passed_over_until_it_does() -> None:
    async with replicas(2) as (found, call):
        await found[0].health.set(SERVICE, STATUS.NOT_SERVING)
        async with asyncio.timeout(10):
            await _until(call, lambda: found[0].calls == 0, found)
        await found[0].health.set(SERVICE, STATUS.SERVING)
        async with asyncio.timeout(10):
            await _until(call, lambda: found[0].calls > 0, found)


async def _until(call: Any, holds: Any, found: list[Replica]) -> None:
    """Ten calls after which it holds."""
    while True:
        for one in found:
            one.calls = 0
        for _ in range(10):
            await call()
        if holds():
            return


async def test_what_one_replica_cannot_answer_another_one_is_asked_for() -> None:
    async with replicas(2) as (found, call):
        found[0].fails = True
        for _ in range(10):
            await call()
        assert found[0].calls
        assert found[1].calls == 10


async def test_a_replica_that_stands_still_is_left_alone_while_others_answer() -> None:
    async with replicas(2) as (found, call):
        found[1].hangs = True
        outcomes: Counter[bool] = Counter()

        async def ask() -> None:
            try:
                await call(0.2)
            except grpc.aio.AioRpcError:
                outcomes[False] += 1
            else:
                outcomes[True] += 1

        async with asyncio.timeout(30):
            while True:
                outcomes.clear()
                await asyncio.gather(*(ask() for _ in range(20)))
                if not outcomes[False]:
                    break
                await asyncio.sleep(0.2)


async def test_a_single_process_that_fails_is_never_given_up() -> None:
    async with replicas(1) as (found, call):
        found[0].fails = True
        for _ in range(10):
            with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                await call()
        await asyncio.sleep(1.5)
        found[0].fails = False
        await call()
