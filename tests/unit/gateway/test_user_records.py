"""What is held of a user, asked of real gRPC servers: every field crosses, a silent refresher is said."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from freshet.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc, refresher_pb2, refresher_pb2_grpc
from prometheus_client import CollectorRegistry

from services.gateway.adapters.peers import RemoteEncoder, RemoteRefreshers
from services.gateway.adapters.processes import Remote
from services.gateway.ports import Contributions, StoredUser
from services.platform.config import ProcessSettings
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import RpcServer

NOWHERE = "127.0.0.1:9"


class Peers(encoder_pb2_grpc.EncoderServiceServicer, refresher_pb2_grpc.RefresherServiceServicer):
    asked: str = ""

    async def DescribeUser(self, request: encoder_pb2.DescribeUserRequest, context: Any) -> Any:
        self.asked = request.user_id
        return encoder_pb2.DescribeUserResponse(
            user_pseudonym="p",
            history_events=5,
            seen_items=4,
            state_model_versions=["m1", "m2"],
            in_model=True,
            forgotten_up_to=[common_pb2.StreamPosition(partition=3, offset=8)],
        )

    async def DescribeContributions(self, request: refresher_pb2.DescribeContributionsRequest, context: Any) -> Any:
        self.asked = request.user_pseudonym
        return refresher_pb2.DescribeContributionsResponse(
            interactions=7,
            items=6,
            remembered=2,
            forgotten_up_to=[common_pb2.StreamPosition(partition=3, offset=8)],
            partitions=[0, 4],
        )


@asynccontextmanager
async def peers() -> AsyncIterator[tuple[Peers, grpc.aio.Channel]]:
    servicer = Peers()

    def add(server: grpc.aio.Server) -> list[str]:
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, server)
        refresher_pb2_grpc.add_RefresherServiceServicer_to_server(servicer, server)
        return ["freshet.v1.EncoderService"]

    settings = ProcessSettings(port=0, metrics_port=0, drain_seconds=0)
    server = RpcServer(process="peers", settings=settings, add_services=add, registry=CollectorRegistry())
    await server.start()
    async with rpc_client.channel(f"127.0.0.1:{server.port}") as channel:
        yield servicer, channel
    await server.drain()


async def test_what_the_encoder_says_of_a_user_is_read_whole() -> None:
    async with peers() as (servicer, channel):
        found = await RemoteEncoder(Remote(channel), "m1").describe_user("ann", 2.0)
    assert servicer.asked == "ann"
    assert found == StoredUser(
        pseudonym="p", history_events=5, seen_items=4, query_states=2, in_model=True, forgotten_up_to={3: 8}
    )


async def test_every_refresher_is_asked_and_one_that_is_silent_is_said() -> None:
    held = Contributions(summed_interactions=7, remembered_interactions=2, forgotten_up_to={3: 8}, partitions=(0, 4))
    async with peers() as (servicer, channel), rpc_client.channel(NOWHERE) as silent:
        assert await RemoteRefreshers({"a": channel, "b": channel}).contributions("p", 2.0) == ([held, held], True)
        assert servicer.asked == "p"
        assert await RemoteRefreshers({"a": channel, "b": silent}).contributions("p", 1.0) == ([held], False)
    assert await RemoteRefreshers({}).contributions("p", 1.0) == ([], False)
