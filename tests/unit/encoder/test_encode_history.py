"""Query states on demand, over a real gRPC server with the in-memory model."""

import math
from collections.abc import AsyncIterator

import grpc
import pytest
from fakes.encoder import HashEncoder
from freshet.v1 import encoder_pb2, encoder_pb2_grpc
from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client import CollectorRegistry
from serving_scene import served
from streams import VOCABULARY

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.stored_history import StoredEvent
from services.encoder.bootstrap import state_writer
from services.encoder.config import EncoderSettings
from services.encoder.domain import encode_job, pack_state
from services.encoder.handlers.encode import EncodeHistory
from services.encoder.metrics import EncoderMetrics
from services.encoder.server import DescribeUser, EncoderServicer
from services.offline.backfill.memory_store import MemoryStore
from services.platform.config import ConfigError, load_settings
from services.platform.errors import DependencyUnavailable


class Model(HashEncoder):
    """Can be away."""

    away = False

    def encode(self, jobs):  # type: ignore[no-untyped-def]
        if self.away:
            raise DependencyUnavailable("the inference server is away")
        return super().encode(jobs)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def stub(model: Model) -> AsyncIterator[encoder_pb2_grpc.EncoderServiceStub]:
    handler = EncodeHistory(encoder=model, vocabulary=VOCABULARY)
    registry = CollectorRegistry()
    describe = DescribeUser(
        reader=MemoryStore(), vocabulary=VOCABULARY, pseudonym_keys=(b"key",), applied_up_to=lambda user_id: {3: 9}
    )
    servicer = EncoderServicer({"model-1": handler}, describe, EncoderMetrics(registry), "model-1")

    settings = EncoderSettings(port=0, metrics_port=0, drain_seconds=0.1)
    add = encoder_pb2_grpc.add_EncoderServiceServicer_to_server
    async with served("encoder", settings, add, servicer, registry) as channel:
        yield encoder_pb2_grpc.EncoderServiceStub(channel)
    await handler.close()


def request(*items: str, user_id: str = "") -> encoder_pb2.EncodeRequest:
    return encoder_pb2.EncodeRequest(
        user_id=user_id,
        history=[
            encoder_pb2.EncodeEvent(item_id=item, event_time=Timestamp(seconds=number))
            for number, item in enumerate(items)
        ],
    )


async def code_of(call: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code()


async def test_a_history_in_a_request_gives_the_state_that_the_stream_would_give(
    stub: encoder_pb2_grpc.EncoderServiceStub,
) -> None:
    response = await stub.Encode(request("item-1", "new", "item-2", user_id="user-0"))
    events = [StoredEvent(1_000 * n, 0, n, n, item) for n, item in enumerate(("item-1", "new", "item-2"))]
    job, _ = encode_job(VOCABULARY, "user-0", events, [3])
    assert job is not None
    wanted = pack_state(HashEncoder().encode([job])[0], 0, "model-1")
    assert response.query_state.components == wanted.components
    assert response.query_state.model_version == "model-1"
    assert response.unknown_items == 1


async def test_an_empty_or_unknown_history_has_no_state(stub: encoder_pb2_grpc.EncoderServiceStub) -> None:
    for empty in (request(), request("new", "newer", user_id="nobody")):
        response = await stub.Encode(empty)
        assert not response.HasField("query_state")
        assert response.unknown_items == len(empty.history)


async def test_what_was_shown_or_turned_down_is_not_taken_for_liking(
    stub: encoder_pb2_grpc.EncoderServiceStub,
) -> None:
    wanted = await stub.Encode(request("item-1", "item-2"))
    for kind in ("dislike", "impression", "unheard of"):
        asked = request("item-1", "item-2", "item-3")
        asked.history[2].type = kind
        assert (await stub.Encode(asked)).query_state == wanted.query_state, kind
    # A window of impressions would have pushed the items out; dislikes take their places in it.
    shown = request("item-1", "item-2", *["item-3"] * 50)
    for event in shown.history[2:]:
        event.type = "impression"
    assert (await stub.Encode(shown)).query_state == wanted.query_state
    for kind in ("", "rating", "click", "purchase"):
        asked = request("item-1", "item-2", "item-3")
        asked.history[2].type = kind
        assert (await stub.Encode(asked)).query_state != wanted.query_state, kind


@pytest.mark.parametrize(
    "bad",
    [
        encoder_pb2.EncodeRequest(history=[encoder_pb2.EncodeEvent(item_id="item-1")]),
        encoder_pb2.EncodeRequest(history=[encoder_pb2.EncodeEvent(item_id="", event_time=Timestamp(seconds=1))]),
        encoder_pb2.EncodeRequest(
            history=[encoder_pb2.EncodeEvent(item_id="item-1", event_time=Timestamp(seconds=-1))]
        ),
        encoder_pb2.EncodeRequest(
            history=[encoder_pb2.EncodeEvent(item_id="item-1", event_time=Timestamp(), type="rating", value=math.nan)]
        ),
        encoder_pb2.EncodeRequest(user_id="x" * 129),
    ],
    ids=["no time", "no item", "before 1970", "no number", "long user id"],
)
async def test_bad_histories_are_refused(
    stub: encoder_pb2_grpc.EncoderServiceStub, bad: encoder_pb2.EncodeRequest
) -> None:
    assert await code_of(stub.Encode(bad)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_description_of_a_user_crosses_the_wire(stub: encoder_pb2_grpc.EncoderServiceStub) -> None:
    found = await stub.DescribeUser(encoder_pb2.DescribeUserRequest(user_id="user-0"))
    assert (found.history_events, found.seen_items, list(found.state_model_versions)) == (0, 0, [])
    assert found.in_model
    assert found.user_pseudonym == pseudonym_of("user-0", b"key")
    assert [(place.partition, place.offset) for place in found.forgotten_up_to] == [(3, 9)]
    assert await code_of(stub.DescribeUser(encoder_pb2.DescribeUserRequest())) is grpc.StatusCode.INVALID_ARGUMENT


def test_the_number_of_seen_items_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_ENCODER_MAX_SEEN_ITEMS", "7")
    assert state_writer(load_settings(EncoderSettings))._max_seen == 7
    monkeypatch.setenv("FRESHET_ENCODER_MAX_SEEN_ITEMS", "19001")
    with pytest.raises(ConfigError, match=r"FRESHET_ENCODER_MAX_SEEN_ITEMS='19001' allowed: .* 19000"):
        load_settings(EncoderSettings)
