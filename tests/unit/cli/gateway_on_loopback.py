"""A real gRPC server on loopback that answers like a gateway, for tests of the command line.

It is a gateway as its port (the proto) describes it, in memory: no stack is needed to test how a client talks.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from freshet.v1 import candidates_pb2, common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc, reranker_pb2

EPOCH = "ab12cd34"


class MemoryGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Counts offsets, keeps what it was sent, recommends the same three items to everybody."""

    def __init__(self) -> None:
        self.recorded: list[gateway_pb2.RecordInteractionsRequest] = []
        self.asked: list[gateway_pb2.RecommendRequest] = []
        self.searched: list[gateway_pb2.GatewayServiceSearchRequest] = []
        self.explained: list[gateway_pb2.ExplainRequest] = []
        self.similar: list[gateway_pb2.GatewayServiceSimilarRequest] = []
        self.forgotten: list[gateway_pb2.ForgetUserRequest] = []
        self.items: list[events_pb2.Item] = []
        self.put_requests = 0
        self.degradations: list[gateway_pb2.Degradation] = []

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
            absence_bucket=5 if request.HasField("as_of") else 0,
        )
        for rank, item_id in enumerate(["1193", "661", "914"][: request.k]):
            answer.items.add(item_id=item_id, score=0.9 - rank / 10, source="mol")
        answer.certificate.kind = common_pb2.Certificate.KIND_BOUNDED
        answer.certificate.gap = 0.0125
        answer.stage_times.total_ms = 4.5
        answer.index_freshness.deltas_offset, answer.index_freshness.lag_seconds = 7, 0.5
        answer.index_freshness.newest_recorded_time.FromJsonString("2026-11-21T09:30:00.25Z")
        if not request.history:
            answer.state_age_seconds = 12.0
            answer.state_position.partition = 3
            answer.state_position.offset = 41
        if not answer.token_honoured:
            answer.degradations.append(gateway_pb2.DEGRADATION_TOKEN_NOT_HONOURED)
        return answer

    def GetVersionSets(self, request, context):
        return self.version_sets

    def Search(self, request, context):
        self.searched.append(request)
        if not request.query:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "query='text of 0 bytes' allowed: 1-1024 bytes of UTF-8")
        if request.query == "no generator":
            context.set_trailing_metadata((("x-request-id", "r-2"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "no source of items by words answered: generator: refused")
        answer = gateway_pb2.GatewayServiceSearchResponse(text_version="text-1", total_ms=12.5, request_id="r-1")
        if request.query != "nothing":
            answer.results.add(item_id="2571", title="[Matrix], The (1999)", score=0.0325, identifier="Matrix")
            answer.results[0].found_by.add(source="phrases", rank=1, score=-2.5)
            answer.results[0].found_by.add(source="lexical", rank=4, score=7.5)
            if request.user_id:
                answer.results[0].found_by.add(source="mol", rank=1, score=0.5)
            answer.results.add(item_id="new", score=0.0164)
            answer.results[1].found_by.add(source="lexical", rank=1, score=9.5)
        answer.sources.add(source="phrases", milliseconds=8.25)
        answer.sources.add(source="lexical", milliseconds=1.5)
        answer.sources.add(source="text_mol", milliseconds=400, failure="text_mol: no answer within 400 ms")
        answer.degradations.append(gateway_pb2.DEGRADATION_PARTIAL_SOURCES)
        answer.model_version = "m1" if request.user_id else ""
        return answer

    def Similar(self, request, context):
        self.similar.append(request)
        if request.item_id == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, "item_id='unknown': no item of this index (i1+7)")
        answer = gateway_pb2.GatewayServiceSimilarResponse(model_version="m1", index_version="i1+7", total_ms=1.5)
        answer.items.add(item_id="2571", title="[Matrix], The (1999)", similarity=0.75)
        answer.items.add(item_id="new", similarity=0.5)
        answer.certificate.kind = common_pb2.Certificate.KIND_EXACT
        return answer

    def Explain(self, request, context):
        self.explained.append(request)
        if request.item_id == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, "item_id='unknown' is in no index")
        if request.user_id == "stranger":
            return gateway_pb2.ExplainResponse(state_source="none")
        pair = reranker_pb2.PairContribution(weight=0.75, cosine=0.5, contribution=0.375, from_model=0.25)
        similarity = reranker_pb2.ExplainScoreResponse(
            score=0.4, from_model=0.3, from_interactions=0.1, model_share=0.8, pairs=[pair],
            num_interactions=124,
            title="Casablanca", index_version="i1+7",
        )  # fmt: skip
        voters = candidates_pb2.VotingInteractions(
            type="rating", count=3, newest_age_seconds=120, oldest_age_seconds=86400, vote=0.2
        )
        votes = candidates_pb2.ExplainVotesResponse(
            vote=0.2, num_neighbours=64, model_share=0.75, voters=[voters], index_version="i1+7"
        )
        return gateway_pb2.ExplainResponse(
            score=0.35, similarity=similarity, votes=None if request.user_id == "no-votes" else votes,
            share_of_model=0.64, share_of_refreshed=0.22, share_of_votes=0.14,
            model_version="m1", state_source="stored",
            history=[gateway_pb2.PastInteraction(item_id="661", title="Vertigo", age_seconds=7200)],
            rules=[
                gateway_pb2.ExplainedRule(name=rule.name, adds=rule.boost - rule.bury, pin=rule.pin, cap=rule.cap)
                for rule in request.rules
            ],
            score_with_rules=0.35 + sum(rule.boost - rule.bury for rule in request.rules),
        )  # fmt: skip

    def ForgetUser(self, request, context):
        self.forgotten.append(request)
        found = {"history_events": 12, "summed_interactions": 30}
        left = found if request.preview else {"history_events": 0, "summed_interactions": 0}
        return gateway_pb2.ForgetUserResponse(
            forget_id="f-1", found=found, left=left, is_applied=request.user_id != "slow",
            remains=["the log keeps the interactions until its retention"],
        )  # fmt: skip

    def PutItems(self, request, context):
        self.put_requests += 1
        if any(item.item_id == "refused" for item in request.items):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "items[0].title='...' allowed: at most 512 bytes")
        self.items.extend(request.items)
        return gateway_pb2.PutItemsResponse(num_written=len(request.items))

    def GetFreshness(self, request, context):
        answer = gateway_pb2.GetFreshnessResponse(
            model_version="m1", index_version="i1+7", epoch=EPOCH, degradations=self.degradations
        )
        answer.interactions.add(partition=0, applied_offset=9, end_offset=12)
        answer.interactions.add(partition=1, applied_offset=-1, end_offset=-1)
        answer.attributions.add(partition=0, applied_offset=4, end_offset=5)
        answer.candidates.deltas_offset, answer.candidates.lag_seconds = 7, 0.25
        answer.candidates.newest_recorded_time.FromJsonString("2026-11-21T09:30:00.25Z")
        return answer


@contextmanager
def running_gateway() -> Iterator[tuple[str, MemoryGateway]]:
    """`(host:port, gateway)` of a server that lives as long as the block."""
    gateway = MemoryGateway()
    with serving(gateway) as target:
        yield target, gateway


@contextmanager
def serving(gateway: MemoryGateway) -> Iterator[str]:
    """host:port of a server of it that lives as long as the block."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()
