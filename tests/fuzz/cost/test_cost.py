"""The part of `make cost` that counts work instead of time: the calls that a request far beyond a limit makes."""

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import candidates_pb2, encoder_pb2, gateway_pb2, generator_pb2, refresher_pb2, reranker_pb2
from google.protobuf.descriptor import MethodDescriptor

from services.platform.errors import InvalidRequest
from services.platform.rpc.guard import Body, reader
from services.platform.rpc.request_counts import LIMITS, OF_CLIENTS

sys.path.insert(0, str(Path(__file__).parent))
from inputs import LIMITS as DOCUMENTED

from inputs import TOTALS, Path as FieldPath, flood, json_flood, name_of, repeated_fields  # isort: skip

FILES = (gateway_pb2, encoder_pb2, candidates_pb2, reranker_pb2, refresher_pb2, generator_pb2)
METHODS: list[MethodDescriptor] = [
    method for file in FILES for service in file.DESCRIPTOR.services_by_name.values() for method in service.methods
]
GATEWAY = [method for method in METHODS if method.containing_service.name == "GatewayService"]
SIZE = 1 << 20
_FIELDS = [(method, path) for method in METHODS for path in repeated_fields(method.input_type)]


def _name(one: Any) -> str:
    return name_of(one) if isinstance(one, tuple) else f"{one.containing_service.name}.{one.name}"


def calls_of(function: Callable[[], Any]) -> tuple[int, str]:
    """How many functions it calls, of Python and C, and what it was refused with."""
    calls, refused = 0, ""

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    except InvalidRequest as exc:
        refused = exc.message
    finally:
        sys.setprofile(None)
    return calls, refused


def read_of(method: MethodDescriptor) -> Callable[[Body], Any]:
    limits = {**LIMITS, **OF_CLIENTS} if method in GATEWAY else LIMITS
    return reader(f"/{method.containing_service.full_name}/{method.name}", limits)


@pytest.mark.parametrize(("method", "path"), _FIELDS, ids=_name)
def test_entries_beyond_a_limit_are_refused_by_name_before_they_are_read(
    method: MethodDescriptor, path: FieldPath
) -> None:
    read, body = read_of(method), Body(flood(path, SIZE))
    calls, refused = calls_of(lambda: read(body))
    assert path[-1].name in refused
    assert "allowed: at most" in refused
    # Up to half a million entries are in the body, and the largest limit of what is called for is 1,000.
    assert calls < 10_000


@pytest.mark.parametrize(("method", "path"), [one for one in _FIELDS if one[0] in GATEWAY], ids=_name)
def test_by_json_they_are_refused_before_a_message_is_built(method: MethodDescriptor, path: FieldPath) -> None:
    read, body = read_of(method), Body(json_flood(path, 4 << 20), is_json=True)
    calls, refused = calls_of(lambda: read(body))
    assert "commas and opening brackets; allowed: at most" in refused
    assert calls < 500
    # With few enough for JSON to be read at all, the field is named.
    few = Body(json_flood(path, 120_000), is_json=True)
    calls, refused = calls_of(lambda: read(few))
    assert path[-1].json_name in refused
    assert "entries" in refused
    assert "allowed: at most" in refused
    # Each of up to 40,000 objects is called for once by JSON's reader, and nothing is for each of them afterwards.
    assert calls < 200_000


@pytest.mark.parametrize("method", GATEWAY, ids=_name)
def test_fields_that_are_there_once_are_not_read_a_million_times(method: MethodDescriptor) -> None:
    read, body = read_of(method), Body(b"\x80\x7d\x01" * (SIZE // 3))
    _, refused = calls_of(lambda: read(body))
    assert refused == "request='too many fields' allowed: at most 200000 in all"


def test_a_field_at_its_limit_is_read_whole() -> None:
    read = read_of(METHODS[0])
    request = gateway_pb2.RecommendRequest(history=[{"item_id": f"item-{n}"} for n in range(1000)])
    request.filter.deny_item_ids.extend(f"item-{n}" * 20 for n in range(10_000))
    request.rules.add(name="x" * 300, item_ids=["a"])
    assert read(Body(request.SerializeToString())) == request
    request.history.add()
    with pytest.raises(InvalidRequest, match=r"^history='1001 entries or more' allowed: at most 1000 entries$"):
        read(Body(request.SerializeToString()))


def test_what_comes_in_two_parts_is_counted_together() -> None:
    read = read_of(METHODS[0])
    part = gateway_pb2.RecommendRequest(filter={"deny_item_ids": ["a"] * 6000}).SerializeToString()
    with pytest.raises(InvalidRequest, match=r"^filter='2 entries or more' allowed: once$"):
        read(Body(part + part))
    rerank = next(method for method in METHODS if method.name == "Rerank")
    votes = reranker_pb2.RerankRequest(votes=[0.5] * 30_000).SerializeToString()
    assert len(read_of(rerank)(Body(votes)).votes) == 30_000
    with pytest.raises(InvalidRequest, match=r"^votes='60000 entries or more' allowed: at most 50000 entries$"):
        read_of(rerank)(Body(votes + votes))


def test_values_of_all_conditions_together_have_a_limit() -> None:
    read = read_of(METHODS[0])
    conditions = [{"name": "price", "comparison": 5, "values": [{"number": 1}] * 1000} for _ in range(10)]
    request = gateway_pb2.RecommendRequest(filter={"where": conditions})
    assert read(Body(request.SerializeToString())) == request
    request.rules.add(name="x").where.add(name="price", comparison=5, values=[{"number": 1}])
    with pytest.raises(InvalidRequest, match="at most 10000 in a request"):
        read(Body(request.SerializeToString()))


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x05ab", b"\x80", b"\x0b", b"\xff" * 12, b"\x09\x00", b"\x1a\x03\x1a\x05a"]
)
def test_what_ends_within_a_field_is_no_message(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a message of this method"):
        read_of(METHODS[0])(Body(data))


def test_the_limits_are_the_documented_ones() -> None:
    of_clients = {**LIMITS, **OF_CLIENTS}
    keys = {
        f"{path[-1].containing_type.name}.{path[-1].name}"
        for method in GATEWAY
        for path in repeated_fields(method.input_type)
    }
    assert keys <= DOCUMENTED.keys()
    assert {key: of_clients[key] for key in keys} == {key: DOCUMENTED[key] for key in keys}
    assert {f"*{key}": most for key, most in TOTALS.items()}.items() <= OF_CLIENTS.items()


@contextlib.asynccontextmanager
async def _gateway(folder: Path) -> AsyncIterator[Any]:
    from rpcs import gateway

    async with gateway(folder) as process:
        yield process


async def test_a_refused_call_leaves_no_request_behind(tmp_path: Path) -> None:
    import gc

    from rpcs import SECRET

    (path,) = [one for one in repeated_fields(METHODS[0].input_type) if name_of(one) == "rules.item_ids"]
    async with _gateway(tmp_path) as process:
        call = process.channel.unary_unary("/freshet.v1.GatewayService/Recommend")
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(grpc.aio.AioRpcError, match="item_ids"):
                await call(flood(path, SIZE - 64), timeout=20, metadata=(("authorization", f"Bearer {SECRET}"),))
            held = [one for one in gc.get_objects() for of in gc.get_referents(one) if _is_large(of)]
        finally:
            gc.enable()
    assert held == []


def _is_large(one: object) -> bool:
    return type(one) is bytes and len(one) > SIZE // 2
