"""A service on a real server, and a channel to it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from services.platform.rpc.server import RpcServer


@contextlib.asynccontextmanager
async def served(
    process: str, settings: Any, add: Callable[..., None], servicer: Any, registry: CollectorRegistry | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    def add_services(server: grpc.aio.Server) -> list[str]:
        add(servicer, server)
        return []

    server = RpcServer(
        process=process, settings=settings, add_services=add_services, registry=registry or CollectorRegistry()
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.drain()
