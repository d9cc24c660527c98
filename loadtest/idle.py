"""`python -m loadtest.idle HOST:PORT STREAMS UNREAD`: open streams, request answers, then stop (SIGSTOP) until killed.

Used by the scenario `slow_clients` next to ordinary visitors.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import grpc
from freshet.v1 import gateway_pb2, gateway_pb2_grpc

_CONNECTIONS = 20
_RECOMMEND = "/freshet.v1.GatewayService/Recommend"
_WRITTEN_S = 1.0  # time for gRPC to write to its sockets


async def _nothing() -> AsyncIterator[gateway_pb2.StreamInteractionsRequest]:
    await asyncio.Event().wait()
    yield gateway_pb2.StreamInteractionsRequest()


async def _stand_still(target: str, streams: int, unread: int) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target, options=options) for _ in range(_CONNECTIONS)]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    key = os.environ.get("FRESHET_API_KEY")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    calls = [stubs[row % _CONNECTIONS].StreamInteractions(_nothing(), metadata=metadata) for row in range(streams)]
    # Called as a stream of one answer, because gRPC reads a stream only on request.
    encode = gateway_pb2.RecommendRequest.SerializeToString
    answers = [channel.unary_stream(_RECOMMEND, request_serializer=encode) for channel in channels]
    big = gateway_pb2.RecommendRequest(user_id="loadtest-0", k=1_000)
    unread_calls = [answers[row % _CONNECTIONS](big, metadata=metadata, timeout=60) for row in range(unread)]
    # The gateway may reject some. Metadata arrive before the message; they show that the gateway has answered.
    reached = [call.wait_for_connection() for call in calls] + [call.initial_metadata() for call in unread_calls]
    await asyncio.gather(*reached, return_exceptions=True)
    await asyncio.sleep(_WRITTEN_S)
    os.kill(os.getpid(), signal.SIGSTOP)
    for call in (*calls, *unread_calls):
        call.cancel()


if __name__ == "__main__":
    asyncio.run(_stand_still(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
