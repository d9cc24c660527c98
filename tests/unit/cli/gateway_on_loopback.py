"""A real gRPC server on loopback that answers like a gateway, for tests of the command line.

It is a gateway as its port (the proto) describes it, in memory: no stack is needed to test how a client talks.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from freshet.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

EPOCH = "ab12cd34"


class MemoryGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Counts offsets, keeps what it was sent, recommends the same three items to everybody."""

    def __init__(self) -> None:
        self.recorded: list[gateway_pb2.RecordInteractionsRequest] = []
        self.asked: list[gateway_pb2.RecommendRequest] = []

    def RecordInteractions(self, request, context):
        self.recorded.append(request)
        if request.interactions[0].user_id == "overloaded":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "1000 records are waiting")
        if request.interactions[0].user_id == "no-kafka":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Kafka has not acknowledged the interaction")
        receipts = []
        for interaction in request.interactions:
            token = common_pb2.FreshnessToken(epoch=EPOCH, partition=3, offset=len(self.recorded) - 1)
            receipts.append(gateway_pb2.InteractionReceipt(event_id=interaction.event_id or "assigned-1", token=token))
        return gateway_pb2.RecordInteractionsResponse(receipts=receipts)

    def UndoInteraction(self, request, context):
        token = common_pb2.FreshnessToken(epoch=EPOCH, partition=3, offset=99)
        receipt = gateway_pb2.InteractionReceipt(event_id="undo-of-" + request.event_id, token=token)
        return gateway_pb2.UndoInteractionResponse(receipt=receipt)

    def Recommend(self, request, context):
        self.asked.append(request)
        if not 1 <= request.k <= 1000:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"k={request.k} allowed: 1 to 1000")
        answer = gateway_pb2.RecommendResponse(
            model_version="0123456789abcdef",
            index_version="7",
            state_source="request" if request.history else "stored",
            token_honoured=request.freshness_token.offset < 1000,
            request_id="r-1",
        )
        for rank, item_id in enumerate(["1193", "661", "914"][: request.k]):
            answer.items.add(item_id=item_id, score=0.9 - rank / 10, source="mol")
        answer.certificate.kind = common_pb2.Certificate.KIND_BOUNDED
        answer.certificate.gap = 0.0125
        answer.stage_times.total_ms = 4.5
        if not request.history:
            answer.state_age_seconds = 12.0
            answer.state_position.partition = 3
            answer.state_position.offset = 41
        if not answer.token_honoured:
            answer.degradations.append(gateway_pb2.DEGRADATION_TOKEN_NOT_HONOURED)
        return answer


@contextmanager
def running_gateway() -> Iterator[tuple[str, MemoryGateway]]:
    """`(host:port, gateway)` of a server that lives as long as the block."""
    gateway = MemoryGateway()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", gateway
    finally:
        server.stop(grace=None).wait()
