"""A small real gRPC gateway on loopback, with a stall on request, for load tests to measure."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from freshet.v1 import gateway_pb2, gateway_pb2_grpc


@dataclass
class SmallGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers at once, except while stalled: then every call waits until the stall is over."""

    port: int = 0
    server: grpc.Server | None = None
    recommended: list[gateway_pb2.RecommendRequest] = field(default_factory=list)
    searched: list[gateway_pb2.GatewayServiceSearchRequest] = field(default_factory=list)
    # What text_mol says; a click on an item brings it to the front of the words it was made for, unless it is deaf.
    text_mol_failure: str = ""
    is_deaf: bool = False
    search_s: float = 0.0
    recorded: list[gateway_pb2.RecordInteractionsRequest] = field(default_factory=list)
    stall_after_calls: int = 0
    stall_s: float = 0.0
    fail_every: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Recommend(
        self, request: gateway_pb2.RecommendRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.RecommendResponse:
        with self._lock:
            self.recommended.append(request)
            if self.stall_after_calls and len(self.recommended) == self.stall_after_calls:
                time.sleep(self.stall_s)
            is_refused = bool(self.fail_every) and len(self.recommended) % self.fail_every == 0
        if is_refused:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        answer = gateway_pb2.RecommendResponse(state_source="stored", token_honoured=True)
        answer.stage_times.queue_ms = 0.5
        answer.stage_times.rerank_ms = 2.0
        answer.degradations.append(gateway_pb2.DEGRADATION_NOT_FRESH)
        for row in range(request.k):
            answer.items.add(item_id=str(row), score=0.5)
        return answer

    def Search(
        self, request: gateway_pb2.GatewayServiceSearchRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.GatewayServiceSearchResponse:
        time.sleep(self.search_s)
        with self._lock:
            self.searched.append(request)
            interactions = [one for sent in self.recorded for one in sent.interactions]
        chosen = [] if self.is_deaf else [one.item_id for one in interactions if one.query == request.query]
        item_ids = list(dict.fromkeys([*chosen, *(str(row) for row in range(50))]))
        answer = gateway_pb2.GatewayServiceSearchResponse(model_version="m" if request.user_id else "")
        for rank, item_id in enumerate(item_ids[: request.k], start=1):
            answer.results.add(item_id=item_id).found_by.add(source="text_mol", rank=rank)
        answer.sources.add(source="text_mol", milliseconds=3.0, failure=self.text_mol_failure)
        answer.sources.add(source="lexical", milliseconds=1.0)
        return answer

    def RecordInteractions(
        self, request: gateway_pb2.RecordInteractionsRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.RecordInteractionsResponse:
        with self._lock:
            self.recorded.append(request)
            offset = len(self.recorded)
        answer = gateway_pb2.RecordInteractionsResponse()
        for interaction in request.interactions:
            receipt = answer.receipts.add(event_id=interaction.event_id)
            receipt.token.epoch, receipt.token.partition, receipt.token.offset = "e", 0, offset
        return answer


@pytest.fixture
def small_gateway() -> Iterator[SmallGateway]:
    server = grpc.server(ThreadPoolExecutor(max_workers=32))
    gateway = SmallGateway(server=server)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(gateway, server)
    gateway.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield gateway
    server.stop(grace=None).wait()


@pytest.fixture
def items(tmp_path: Path) -> Path:
    path = tmp_path / "items.txt"
    path.write_text("".join(f"item-{row}\n" for row in range(50)))
    return path
