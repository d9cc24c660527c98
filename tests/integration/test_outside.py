"""The gateway and the processes as any gRPC client meets them: reflection, health, answers, marks and refusals."""

import asyncio
import math
import time
from collections.abc import Iterator

import grpc
import pytest
from freshet.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from outside import Outside, event, until

from services.contracts.processes import PROCESSES
from services.stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(params=["stack", "compact_stack"], ids=["split", "compact"])
def outside(request: pytest.FixtureRequest) -> Iterator[Outside]:
    with Outside(request.getfixturevalue(request.param)) as it:
        yield it


def marks(answer: gateway_pb2.RecommendResponse) -> set[str]:
    names = {gateway_pb2.Degradation.Name(kind) for kind in answer.degradations}
    return {name.removeprefix("DEGRADATION_") for name in names}


def item_ids(answer: gateway_pb2.RecommendResponse) -> list[str]:
    return [item.item_id for item in answer.items]


@pytest.mark.parametrize("process", PROCESSES)
def test_reflection_and_health_name_each_processs_service(stack: Stack, process: str) -> None:
    service = PROCESSES[process].health_service
    with grpc.insecure_channel(stack.address(process)) as channel:
        found = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert {service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= found
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", service):
            answer = check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(health_pb2.HealthCheckRequest(service="freshet.v1.NoService"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_call_made_from_reflection_alone_is_answered(stack: Stack) -> None:
    """What grpcurl does: descriptors from the server, JSON in, JSON out; none of our stubs."""
    with grpc.insecure_channel(stack.address("gateway")) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("freshet.v1.GatewayService").FindMethodByName("Recommend")
        request = message_factory.GetMessageClass(method.input_type)()
        json_format.Parse('{"userId": "a-stranger", "k": 3}', request, descriptor_pool=pool)
        call = channel.unary_unary(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        answer = json_format.MessageToDict(call(request, timeout=10), descriptor_pool=pool)
    assert len(answer["items"]) == 3
    assert answer["stateSource"] == "none"


def test_an_unknown_user_is_served_popular_items_and_told_so(outside: Outside) -> None:
    until("what is stored as popular is answered", lambda: outside.ids(outside.new_user(), k=20) == outside.popular(20))
    answer = outside.recommend(outside.new_user(), k=20)
    assert {item.source for item in answer.items} == {"popular"}
    assert marks(answer) == {"POPULAR_FALLBACK"}
    assert answer.state_source == "none"
    assert answer.certificate.kind == common_pb2.Certificate.KIND_ESTIMATE
    assert not answer.HasField("state_position")
    assert answer.model_version == outside.bundle.model_version


def test_a_token_is_honoured_and_the_answer_names_where_it_stands(outside: Outside) -> None:
    user, item = outside.new_user(), outside.items[12]
    (receipt,) = outside.record(event(user, item))
    answer = outside.recommend(user, freshness_token=receipt.token)
    assert answer.token_honoured
    assert marks(answer) == set()
    assert answer.state_source == "stored"
    assert answer.state_position.partition == receipt.token.partition == outside.partition_of(user)
    assert answer.state_position.offset == receipt.token.offset
    assert answer.certificate.kind == common_pb2.Certificate.KIND_EXACT
    assert answer.index_version.startswith(answer.model_version)
    assert item not in item_ids(answer)


def test_a_bad_request_is_refused_with_field_value_and_range(outside: Outside) -> None:
    history = [gateway_pb2.HistoryEvent(item_id="1"), gateway_pb2.HistoryEvent(item_id="1", value=math.nan)]
    for fields, told in (
        ({"k": 0}, "k=0 allowed: 1-1000"),
        ({"history": history}, "history[1].value=nan allowed: a finite number"),
        ({"filter": {"deny_item_ids": ["x"] * 10_001}}, "filter.deny_item_ids='10001 entries or more' allowed"),
    ):
        request = gateway_pb2.RecommendRequest(**({"user_id": "ann", "k": 10} | fields))
        with pytest.raises(grpc.RpcError) as caught:
            outside.gateway.Recommend(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert told in caught.value.details()


def test_one_bad_interaction_refuses_all_and_nothing_is_written(outside: Outside) -> None:
    before, good = outside.written(), {"user_id": "ann", "item_id": "1"}
    for interactions, told in (
        ([good] * 1001, "interactions='1001 entries or more' allowed: at most 1000"),
        ([good, good | {"value": math.nan}], "interactions[1].value=nan allowed: a finite number"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            outside.gateway.RecordInteractions(
                gateway_pb2.RecordInteractionsRequest(interactions=interactions), timeout=10
            )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert told in caught.value.details()
    assert outside.written() == before


def test_a_client_stream_is_written_whole(outside: Outside) -> None:
    user, items = outside.new_user(), outside.items[200:230]
    start = time.time() - 60
    messages = (
        gateway_pb2.StreamInteractionsRequest(interaction=event(user, item, at=start + place))
        for place, item in enumerate(items)
    )
    receipts = outside.gateway.StreamInteractions(messages, timeout=20).receipts
    assert len({receipt.event_id for receipt in receipts}) == 30
    answer = outside.recommend(user, freshness_token=receipts[-1].token)
    assert answer.token_honoured
    assert outside.history(user) == items


async def test_calls_given_up_half_way_never_mix_users_up(outside: Outside) -> None:
    """Abandoned reads leave answers on their way; the next call must not get them."""
    users = [outside.new_user() for _ in range(4)]
    tokens = {user: outside.live(user, outside.items[place]) for place, user in enumerate(users)}
    positions = {user: (token.partition, token.offset) for user, token in tokens.items()}
    statuses = set()
    async with grpc.aio.insecure_channel(outside.address) as channel:
        gateway = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def ask(user: str, timeout: float) -> None:
            try:
                answer = await gateway.Recommend(gateway_pb2.RecommendRequest(user_id=user, k=5), timeout=timeout)
            except grpc.aio.AioRpcError as exc:
                statuses.add(exc.code())
                return
            if answer.state_source == "stored":
                assert (answer.state_position.partition, answer.state_position.offset) == positions[user]

        for step in range(1, 41):
            await asyncio.gather(*(ask(user, step * 0.0005) for user in users))
        # CANCELLED is the same where the server's clock was first.
        assert grpc.StatusCode.DEADLINE_EXCEEDED in statuses
        assert statuses <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
        statuses.clear()
        await asyncio.gather(*(ask(user, 10) for user in users * 5))
        assert not statuses


def test_an_answer_proves_the_gap_that_it_was_asked_for(outside: Outside) -> None:
    user = outside.new_user()
    outside.live(user, *outside.items[:3])
    for max_gap in (0.0, 0.01, 0.05):
        every, answer = outside.unmoved(
            lambda: outside.recommend(user, 1000),
            lambda _, max_gap=max_gap: outside.recommend(user, 10, max_gap=max_gap),
        )
        assert every.certificate.kind == common_pb2.Certificate.KIND_EXACT
        assert marks(answer) == set()
        assert answer.certificate.HasField("gap")
        assert answer.certificate.gap <= max_gap == answer.certificate.asked_gap
        assert answer.certificate.items_touched >= 10
        left_out = max(item.score for item in every.items if item.item_id not in item_ids(answer))
        assert left_out <= answer.items[-1].score + answer.certificate.gap
    with pytest.raises(grpc.RpcError) as caught:
        outside.recommend(user, 10, max_gap=-0.1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_gap=-0.1 allowed: a finite number, at least 0" in caught.value.details()
