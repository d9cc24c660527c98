"""Channels between our processes: a peer that is slow to accept a connection is not a dead one."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import rpc_client

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
