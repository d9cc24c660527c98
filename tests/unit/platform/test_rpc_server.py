"""A real grpc.aio server on a real port: health, reflection, the error mapping, refusals, drain, a taken port."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from freshet.v1 import encoder_pb2, encoder_pb2_grpc
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.platform import errors, request_context
from services.platform.config import ProcessSettings
from services.platform.machine import PortTaken
from services.platform.rpc import client as rpc_client
from services.platform.rpc import health_check
from services.platform.rpc.admission import Admission
from services.platform.rpc.guard import Door
from services.platform.rpc.health_check import WHY_NOT_READY
from services.platform.rpc.server import HealthState, RpcServer, serve
from services.platform.stream.follower import TurnClock
from services.stack import Ports

NAME = "freshet.v1.EncoderService"
Answer = Callable[[Any, Any], Awaitable[Any]]


class Servicer(encoder_pb2_grpc.EncoderServiceServicer):
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls = 0

    async def Encode(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return await self.answer(request, context)


class Doorman:
    """A door that knows everybody, or nobody."""

    def __init__(self, asked: Callable[[str, Any], Any], *, knows: bool = True) -> None:
        self.asked, self.known = asked, knows

    def knows(self, metadata: Any) -> bool:
        return self.known

    def __call__(self, method: str, context: Any) -> Any:
        return self.asked(method, context)


async def _ok(_: Any, __: Any) -> Any:
    return encoder_pb2.EncodeResponse(unknown_items=7)


def _settings(**changes: Any) -> ProcessSettings:
    return ProcessSettings(**{"port": 0, "metrics_port": 0, "drain_seconds": 2.0, **changes})


@asynccontextmanager
async def running(
    answer: Answer, health: HealthState | None = None, door: Door | None = None, **changes: Any
) -> AsyncIterator[tuple[grpc.aio.Channel, Servicer, CollectorRegistry]]:
    servicer = Servicer(answer)

    def add(server: grpc.aio.Server) -> list[str]:
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, server)
        return [NAME]

    registry = CollectorRegistry()
    server = RpcServer(
        process="test",
        settings=_settings(**changes),
        add_services=add,
        health_state=health,
        door=door,
        registry=registry,
    )
    await server.start()
    async with rpc_client.channel(f"127.0.0.1:{server.port}") as channel:
        yield channel, servicer, registry
    await server.drain()


async def _encode(channel: grpc.aio.Channel, timeout_s: float = 5.0) -> Any:
    stub = encoder_pb2_grpc.EncoderServiceStub(channel)
    return await rpc_client.call(stub.Encode, encoder_pb2.EncodeRequest(), timeout_s=timeout_s, peer="encoder")


async def _health(channel: grpc.aio.Channel, service: str = NAME) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


async def test_health_follows_readiness_also_when_set_from_another_thread() -> None:
    state = HealthState()
    async with running(_ok, state) as (channel, _, _):
        assert await _health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        await asyncio.to_thread(state.set_ready, True)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=5)
        async for update in watch:
            if update.status == health_pb2.HealthCheckResponse.SERVING:
                break
        assert await _health(channel, "") == health_pb2.HealthCheckResponse.SERVING


async def test_a_connection_is_replaced_after_its_time_and_no_call_is_lost() -> None:
    peers: set[str] = set()

    async def answer(_: Any, context: Any) -> Any:
        peers.add(context.peer())
        return encoder_pb2.EncodeResponse()

    async with running(answer, connection_seconds=0.1) as (channel, _, _):
        deadline = time.monotonic() + 10
        while len(peers) < 3:
            assert time.monotonic() < deadline, peers
            await _encode(channel)


async def test_one_that_is_not_ready_is_alive_and_one_that_does_not_answer_is_not() -> None:
    port = Ports.free()["encoder"]
    address = f"127.0.0.1:{port}"
    async with running(_ok, HealthState(), port=port):
        assert await asyncio.to_thread(health_check.main, [address]) == 1
        assert await asyncio.to_thread(health_check.main, [address, "--alive"]) == 0
    assert await asyncio.to_thread(health_check.main, [address, "--alive"]) == 1


async def test_a_process_that_is_not_ready_says_why_in_its_health_and_once_in_the_log() -> None:
    state = HealthState()
    state.set_ready(False, "topic items is awaited")
    with capture_logs() as logs:
        async with running(_ok, state) as (channel, _, _):
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert (await call).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (WHY_NOT_READY, "topic items is awaited") in tuple(await call.trailing_metadata())
            await state.publish()
            state.set_ready(True)
            await _until(channel, health_pb2.HealthCheckResponse.SERVING)
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            await call
            assert WHY_NOT_READY not in dict(tuple(await call.trailing_metadata()))
    said = [entry for entry in logs if entry["event"] in ("not_ready", "ready")]
    assert [(entry["event"], entry.get("reason")) for entry in said] == [
        ("not_ready", "topic items is awaited"),
        ("ready", None),
    ]


async def _until(channel: grpc.aio.Channel, wanted: int) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=5)
    async for update in watch:
        if update.status == wanted:
            return


async def test_a_process_is_not_serving_while_one_of_its_loops_hangs_and_calls_are_answered_meanwhile() -> None:
    kinds = health_pb2.HealthCheckResponse
    now_s = [0.0]
    first, second = (TurnClock(stuck_s=60.0, clock=lambda: now_s[0]) for _ in range(2))
    state = HealthState(ready=True, look_every_s=0.001)
    state.watch("first", first)
    state.watch("second", second)
    async with running(_ok, state) as (channel, _, _):
        assert await _health(channel) == kinds.SERVING
        with capture_logs() as logs:
            now_s[0] += 59
            first.ended(well=False)
            now_s[0] += 2
            await _until(channel, kinds.NOT_SERVING)
            assert not state.ready
            # What the loop says when it gets on is no reason to believe it before it does.
            state.set_ready(True)
            await state.publish()
            assert await _health(channel) == kinds.NOT_SERVING
            assert (await _encode(channel)).unknown_items == 7
            second.ended(well=True)
            await _until(channel, kinds.SERVING)
        assert [(entry["event"], entry["loop"]) for entry in logs if "loop" in entry] == [
            ("loop_hangs", "second"),
            ("loop_goes_on", "second"),
        ]


async def test_a_loop_that_goes_on_makes_nobody_ready_who_was_not() -> None:
    now_s = [0.0]
    turns = TurnClock(stuck_s=60.0, clock=lambda: now_s[0])
    now_s[0] += 61
    state = HealthState(look_every_s=0.001)
    state.watch("one", turns)
    async with running(_ok, state) as (channel, _, _):
        turns.ended(well=True)
        assert await _health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        state.set_ready(True)
        await _until(channel, health_pb2.HealthCheckResponse.SERVING)


async def test_a_process_is_not_serving_while_its_check_says_why() -> None:
    said = [""]
    state = HealthState(ready=True, look_every_s=0.001, check=lambda: said[0])
    async with running(_ok, state) as (channel, _, _):
        assert await _health(channel) == health_pb2.HealthCheckResponse.SERVING
        said[0] = "a file was written to"
        await _until(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert state.why_not == "a file was written to"


@pytest.mark.parametrize(
    "symbol", [NAME, f"{NAME}.Encode", "freshet.v1.EncodeRequest", "freshet.v1.EncodeRequest.user_id"]
)
async def test_reflection_finds_the_file_of_a_service_a_method_a_message_and_a_field(symbol: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    async with running(_ok) as (channel, _, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = await anext(aiter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
    assert answer.WhichOneof("message_response") == "file_descriptor_response", answer.error_response
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in answer.file_descriptor_response.file_descriptor_proto
    ]
    assert files[0].name == encoder_pb2.DESCRIPTOR.name


@pytest.mark.parametrize("symbol", [f"{NAME}.NoMethod", "freshet.v1.NoService.Encode", "", "."])
async def test_reflection_answers_not_found_for_a_symbol_that_is_not_there(symbol: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    async with running(_ok) as (channel, _, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = await anext(aiter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


# What a door says to strangers; no process of ours is one (test_errors.py has what it would be told).
STRANGERS = (errors.Unauthenticated, errors.PermissionDenied)


@pytest.mark.parametrize("kind", [kind for kind in errors.FreshetError.__subclasses__() if kind not in STRANGERS])
async def test_each_error_crosses_the_wire_as_itself(kind: type[errors.FreshetError]) -> None:
    async def fail(_: Any, __: Any) -> Any:
        raise kind("said so")

    async with running(fail) as (channel, _, registry):
        with pytest.raises(kind, match="encoder: said so"):
            await _encode(channel)
        labels = {"method": "Encode", "code": kind.status.name}
        assert registry.get_sample_value("freshet_test_rpc_seconds_count", labels) == 1


async def test_a_retry_hint_goes_out_as_trailing_metadata() -> None:
    async def fail(_: Any, __: Any) -> Any:
        raise errors.DependencyUnavailable("kafka is away", retry_after_ms=500)

    async with running(fail) as (channel, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await encoder_pb2_grpc.EncoderServiceStub(channel).Encode(encoder_pb2.EncodeRequest(), timeout=5)
        assert caught.value.trailing_metadata()["retry-after-ms"] == "500"
        assert caught.value.trailing_metadata()["grpc-retry-pushback-ms"] == "500"


async def test_calls_that_nobody_waits_for_are_told_by_their_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr(
        Admission,
        "enter",
        lambda self, caller, is_background, enter=Admission.enter: entered.append(is_background) or enter(self, caller),
    )
    async with running(_ok) as (channel, _, _):
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        for metadata in ((), (("freshet-priority", "background"),), (("freshet-priority", "high"),)):
            await stub.Encode(encoder_pb2.EncodeRequest(), timeout=5, metadata=metadata)
    assert entered == [False, True, False]


async def test_bytes_that_are_no_message_are_the_callers_fault_and_reach_no_handler() -> None:
    async with running(_ok) as (channel, servicer, _):
        method = channel.unary_unary(f"/{NAME}/Encode")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"\xff", timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert servicer.calls == 0


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", STRANGERS)
async def test_who_may_not_come_in_is_told_so_before_the_request_is_parsed(
    kind: type[errors.FreshetError], known: bool
) -> None:
    def door(method: str, context: Any) -> None:
        assert (method, bool(context.peer())) == ("Encode", True)
        raise kind("not you", retry_after_ms=7)

    async with running(_ok, door=Doorman(door, knows=known)) as (channel, servicer, registry):
        method = channel.unary_unary(f"/{NAME}/Encode")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"\xff", timeout=5)
        assert (caught.value.code(), caught.value.details()) == (kind.status, "not you")
        assert caught.value.trailing_metadata()["grpc-retry-pushback-ms"] == "7"
        assert servicer.calls == 0
        # Nobody's permit was taken, and who only asks whether we are well needs no key.
        assert registry.get_sample_value("freshet_test_rpc_in_flight") == 0
        assert await _health(channel) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("error", "code"), [(None, "OK"), (errors.Conflict("no"), "ABORTED"), (KeyError(), "INTERNAL")]
)
async def test_the_door_hears_how_a_call_ended(error: Exception | None, code: str) -> None:
    heard: list[str] = []

    async def answer(_: Any, __: Any) -> Any:
        if error is not None:
            raise error
        return encoder_pb2.EncodeResponse()

    async with running(answer, door=Doorman(lambda method, context: heard.append)) as (channel, _, _):
        with contextlib.suppress(errors.FreshetError):
            await _encode(channel)
    assert heard == [code]


async def test_a_bug_is_internal_with_neutral_text() -> None:
    async def bug(_: Any, __: Any) -> Any:
        raise KeyError("secret detail")

    async with running(bug) as (channel, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await encoder_pb2_grpc.EncoderServiceStub(channel).Encode(encoder_pb2.EncodeRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in caught.value.details()


async def test_a_call_whose_deadline_passed_while_it_waited_is_not_started() -> None:
    async with running(_ok) as (channel, servicer, _):
        await _encode(channel)
        late = asyncio.create_task(_encode(channel, timeout_s=0.05))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The event loop of the server stands still past the deadline, as under heavy load.
        time.sleep(0.2)  # noqa: ASYNC251
        with pytest.raises(errors.DeadlineExceeded):
            await late
        # Whoever comes next is served.
        await _encode(channel)
        assert servicer.calls == 2


async def test_request_id_and_deadline_reach_the_next_hop() -> None:
    seen: list[tuple[str, float | None]] = []

    async def look(_: Any, __: Any) -> Any:
        seen.append((request_context.request_id.get(), request_context.remaining_seconds()))
        return encoder_pb2.EncodeResponse()

    async with running(look) as (channel, _, _):

        async def first_hop() -> None:
            request_context.request_id.set("abc-1")
            request_context.deadline.set(time.monotonic() + 30.0)
            await _encode(channel, timeout_s=60)

        await asyncio.create_task(first_hop())
    ((request_id, remaining),) = seen
    assert request_id == "abc-1"
    assert remaining is not None
    # gRPC rounds a timeout up on the wire.
    assert 0 < remaining < 31


async def test_no_call_is_made_without_time_left() -> None:
    async with running(_ok) as (channel, servicer, _):

        async def too_late() -> None:
            request_context.deadline.set(time.monotonic() - 0.001)
            await _encode(channel)

        with pytest.raises(errors.DeadlineExceeded, match="no time left"):
            await asyncio.create_task(too_late())
        assert servicer.calls == 0


async def test_surplus_calls_are_refused_early() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def wait(_: Any, __: Any) -> Any:
        begun.set()
        await release.wait()
        return encoder_pb2.EncodeResponse()

    async with running(wait, max_in_flight=1) as (channel, _, registry):
        first = asyncio.create_task(_encode(channel))
        await begun.wait()
        with pytest.raises(errors.Overloaded):
            await _encode(channel)
        assert registry.get_sample_value("freshet_test_rpc_refused_total", {"reason": "overloaded"}) == 1
        assert registry.get_sample_value("freshet_test_rpc_in_flight") == 1
        release.set()
        await first
        # The permit came back.
        await _encode(channel)
        assert registry.get_sample_value("freshet_test_rpc_in_flight") == 0


async def test_a_call_whose_deadline_passed_before_its_work_is_refused_and_counted() -> None:
    late = Doorman(lambda _, context: time.sleep(context.time_remaining() + 0.001))
    async with running(_ok, door=late) as (channel, servicer, registry), asyncio.timeout(10):
        # Of a call that is late before it arrives, the server knows nothing.
        while not registry.get_sample_value("freshet_test_rpc_refused_total", {"reason": "deadline"}):
            with pytest.raises(errors.DeadlineExceeded):
                await _encode(channel, 0.05)
        assert servicer.calls == 0


async def test_sigterm_finishes_running_calls_then_drains() -> None:
    begun, release, drained = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(_: Any, __: Any) -> Any:
        begun.set()
        await release.wait()
        return encoder_pb2.EncodeResponse(unknown_items=1)

    async def on_drain() -> None:
        drained.set()

    def add(server: grpc.aio.Server) -> list[str]:
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Servicer(slow), server)
        return [NAME]

    port = Ports.free()["encoder"]
    task = asyncio.create_task(
        serve(RpcServer(process="drain_test", settings=_settings(port=port), add_services=add), on_drain=on_drain)
    )
    async with rpc_client.channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)
        running_call = asyncio.create_task(_encode(channel))
        await begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert not drained.is_set()
        release.set()
        assert (await running_call).unknown_items == 1
        await asyncio.wait_for(task, 20)
    assert drained.is_set()


async def test_no_other_server_can_listen_on_a_port_that_is_not_shared() -> None:
    port = Ports.free()["encoder"]
    async with running(_ok, port=port):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))


async def test_a_taken_port_is_named_with_its_owner() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port} on 127.0.0.1.*pid {os.getpid()}"):
            async with running(_ok, port=port):
                pass
