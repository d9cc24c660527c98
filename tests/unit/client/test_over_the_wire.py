"""The client over real connections: what it sends, and what it makes of gateways that are old, new, away or broken."""

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import pytest
from freshet.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from freshet_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    FreshetError,
    Interaction,
    InvalidArgument,
    Overloaded,
    Tls,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unreachable,
    Unsupported,
)

NOBODY = "127.0.0.1:1"


class Scripted(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers each call by the script's next entry, the last one for all that follow, and remembers what came."""

    def __init__(self, *script: Callable[[grpc.ServicerContext], object] | object) -> None:
        self.script, self.requests, self.metadata = list(script), [], []

    def _next(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return answer(context) if callable(answer) else answer

    Recommend = _next

    def RecordInteractions(self, request, context):
        self.requests.append(request)
        token = common_pb2.FreshnessToken(epoch="e", partition=1, offset=len(self.requests))
        receipts = [gateway_pb2.InteractionReceipt(event_id=one.event_id, token=token) for one in request.interactions]
        return gateway_pb2.RecordInteractionsResponse(receipts=receipts)


@contextmanager
def serving(servicer: object, address: str = "127.0.0.1:0") -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"{address.rpartition(':')[0]}:{port}"
    finally:
        server.stop(None).wait()


def refusing(code: grpc.StatusCode, details: str, *told: tuple[str, str]) -> Callable[[grpc.ServicerContext], None]:
    def refuse(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("x-request-id", "r-1"), *told))
        context.abort(code, details)

    return refuse


ANSWER = gateway_pb2.RecommendResponse(
    items=[common_pb2.ScoredItem(item_id="7", score=0.5, source="mol")], token_honoured=True, request_id="r-2"
)


def test_a_newer_gateway_says_things_that_this_client_names_by_number() -> None:
    # Field 99, varint 1: unknown here. A degradation and a certificate of a later version.
    newer = gateway_pb2.RecommendResponse.FromString(ANSWER.SerializeToString() + b"\x98\x06\x01")
    newer.degradations.extend([gateway_pb2.DEGRADATION_BUSY, 77])
    newer.certificate.kind = 9
    with serving(Scripted(newer)) as target, Client(target) as client:
        answer = client.recommend("ann")
    assert answer.degradations == ("busy", "degradation_77")
    assert answer.certificate is not None
    assert (answer.certificate.kind, answer.certificate.gap) == ("kind_9", None)
    assert [(one.item_id, one.score, one.source) for one in answer.items] == [("7", 0.5, "mol")]


def test_an_older_gateway_has_not_the_method() -> None:
    with (
        serving(Scripted(ANSWER)) as target,
        Client(target) as client,
        pytest.raises(Unsupported, match=rf"^{target} does not have this method, it is older than this client"),
    ):
        client.freshness()


def test_a_key_and_the_priority_go_with_each_call() -> None:
    servicer = Scripted(ANSWER)
    with serving(servicer) as target, Client(target, api_key="abc", is_background=True) as client:
        client.recommend("ann")
    assert servicer.metadata[0]["authorization"] == "Bearer abc"
    assert servicer.metadata[0]["freshet-priority"] == "background"


def test_a_stream_that_the_gateway_ends_late_names_no_time_limit() -> None:
    class Late(gateway_pb2_grpc.GatewayServiceServicer):
        def TailInteractions(self, request, context):
            refusing(grpc.StatusCode.DEADLINE_EXCEEDED, "Kafka did not answer within 5000 ms")(context)

    with serving(Late()) as target, Client(target) as client, pytest.raises(DeadlineExceeded) as caught:
        next(client.tail())
    assert str(caught.value) == f"{target} did not answer: Kafka did not answer within 5000 ms"


def test_a_refusal_carries_the_request_id_and_when_to_come_again() -> None:
    busy = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", ("retry-after-ms", "250"))
    with serving(Scripted(busy)) as target, Client(target) as client, pytest.raises(Overloaded) as refused:
        client.recommend("ann")
    told = refused.value
    assert (told.message, told.retry_after_s, told.request_id) == ("too many calls", 0.25, "r-1")
    assert told.retriable
    unknown = refusing(grpc.StatusCode.UNAUTHENTICATED, "no API key")
    with (
        serving(Scripted(unknown)) as target,
        Client(target) as client,
        pytest.raises(Unauthenticated, match=r"^no API key$"),
    ):
        client.recommend("ann")


def test_a_read_that_found_no_gateway_for_a_moment_is_repeated_by_the_service_config() -> None:
    servicer = Scripted(refusing(grpc.StatusCode.UNAVAILABLE, "warming up"), ANSWER)
    with serving(servicer) as target, Client(target) as client:
        assert client.recommend("ann").item_ids == ["7"]
    assert len(servicer.requests) == 2


def test_nothing_that_listens_is_unavailable_and_names_the_address() -> None:
    with Client(NOBODY, timeout_s=2) as client, pytest.raises(Unavailable, match=f"^nothing answers at {NOBODY}: "):
        client.recommend("ann")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_gateway_that_restarted_is_found_by_the_next_call(is_async: bool) -> None:
    with serving(Scripted(ANSWER)) as target:
        pass

    async def visit() -> None:
        async with AsyncClient(target) as client:
            for _ in range(3):
                for _ in range(4):
                    with pytest.raises(Unreachable, match=f"^nothing answers at {target}: "):
                        await client.recommend("ann", timeout_s=0.3)
                with serving(Scripted(ANSWER), target):
                    assert (await client.recommend("ann")).item_ids == ["7"]

    def visit_blocking() -> None:
        with Client(target) as client:
            for _ in range(3):
                for _ in range(4):
                    with pytest.raises(Unreachable, match=f"^nothing answers at {target}: "):
                        client.recommend("ann", timeout_s=0.3)
                with serving(Scripted(ANSWER), target):
                    assert client.recommend("ann").item_ids == ["7"]

    asyncio.run(visit()) if is_async else visit_blocking()


def test_a_slow_answer_ends_with_the_deadline() -> None:
    free = threading.Event()

    def wait(context: grpc.ServicerContext) -> object:
        free.wait(10)
        return ANSWER

    with serving(Scripted(wait)) as target, Client(target) as client:
        try:
            with pytest.raises(DeadlineExceeded, match=rf"^{target} did not answer within 200 ms$"):
                client.recommend("ann", timeout_s=0.2)
        finally:
            free.set()


def test_batches_split_at_both_limits() -> None:
    servicer = Scripted(ANSWER)
    large = [Interaction("ann", str(row), context={"c" * 200: "x" * 250}, query="q" * 5000) for row in range(3_000)]
    with serving(servicer) as target, Client(target) as client:
        receipts = client.record(*large, timeout_s=20)
        with pytest.raises(TooLarge, match=r"^interactions\[1\]=\d+ bytes allowed: at most 4193280$"):
            client.record(large[0], Interaction("ann", "1", query="q" * 5_000_000))
    assert [one.event_id for one in receipts] == [one.event_id for one in large]
    sent = [one.event_id for request in servicer.requests for one in request.interactions]
    assert sent == [one.event_id for one in large]
    assert len(servicer.requests) == 4
    assert max(request.ByteSize() for request in servicer.requests) <= 4 * 1024 * 1024


def test_this_machine_is_reached_past_a_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{NOBODY}")
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(Scripted(ANSWER)) as target, Client(target) as client:
        assert client.recommend("ann").item_ids == ["7"]


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_a_gateway_with_an_ipv6_address_alone_is_found() -> None:
    with serving(Scripted(ANSWER), "[::1]:0") as target:
        with Client(target) as client:
            assert client.recommend("ann").item_ids == ["7"]

        async def ask() -> list[str]:
            async with AsyncClient(target) as client:
                return (await client.recommend("ann")).item_ids

        assert asyncio.run(ask()) == ["7"]


@pytest.mark.parametrize(
    "target", ["", "gateway", "127.0.0.1", "::1:50050", "http://127.0.0.1:50050", "127.0.0.1:0", "a b:1", ":50050"]
)
def test_what_is_no_target_is_refused_at_once(target: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^target={re.escape(repr(target))} allowed: host:port"):
        Client(target)


def test_keys_and_certificates_that_cannot_be_used_are_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match=r"^api_key=<hidden> allowed: printable ASCII"):
        Client(NOBODY, api_key="a\nb")
    with pytest.raises(InvalidArgument, match=r"^tls\.ca='/no/such\.pem' allowed: a PEM file"):
        Client(NOBODY, tls=Tls(ca="/no/such.pem"))
    with pytest.raises(InvalidArgument, match=r"^tls\.certificate and tls\.key"):
        Client(NOBODY, tls=Tls(certificate=b"x"))


@contextmanager
def cutting(target: str, after_bytes: int) -> Iterator[str]:
    """A relay that passes what the gateway says up to so many bytes of a connection, then closes it."""
    host, _, port = target.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def pass_on(source: socket.socket, sink: socket.socket, left: float) -> None:
        try:
            while left > 0 and (data := source.recv(65536)):
                sink.sendall(data[: int(min(left, len(data)))])
                left -= len(data)
        except OSError:
            pass
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while not stop.is_set():
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            threads = [
                threading.Thread(target=pass_on, args=(near, far, float("inf"))),
                threading.Thread(target=pass_on, args=(far, near, after_bytes)),
            ]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            near.close()
            far.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_an_answer_that_is_cut_in_the_middle_is_unavailable() -> None:
    long = gateway_pb2.RecommendResponse(
        items=[common_pb2.ScoredItem(item_id=f"{row}" * 30, source="mol") for row in range(1_000)]
    )
    with (
        serving(Scripted(long)) as target,
        cutting(target, 8_000) as relay,
        Client(relay, timeout_s=5) as client,
        pytest.raises(Unavailable, match=f"{relay}"),
    ):
        client.recommend("ann")


def test_http_is_not_grpc() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            one.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            one.close()

    thread = threading.Thread(target=answer)
    thread.start()
    port = listener.getsockname()[1]
    try:
        with Client(f"127.0.0.1:{port}", timeout_s=3) as client, pytest.raises(Unavailable) as failed:
            client.recommend("ann")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
    assert failed.value.message.startswith(f"127.0.0.1:{port} speaks HTTP/1.1, not gRPC")


def test_a_session_of_two_threads_ends_with_the_newest_token() -> None:
    servicer = Scripted(ANSWER)
    with serving(servicer) as target, Client(target) as client, ThreadPoolExecutor(2) as pool:
        session = client.session("ann")
        receipts = list(pool.map(lambda row: session.record(str(row)), range(40)))
        assert session.token is not None
        assert session.token.offset == max(one.token.offset for one in receipts if one) == 40
        session.recommend()
    assert servicer.requests[-1].freshness_token.offset == 40


def test_an_answer_that_cannot_be_read_is_an_error_of_the_tree() -> None:
    class Garbled:
        def recommend(self, request: bytes, context: grpc.ServicerContext) -> bytes:
            return b"\x0a\xff\xff"

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"Recommend": grpc.unary_unary_rpc_method_handler(Garbled().recommend)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("freshet.v1.GatewayService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(f"127.0.0.1:{port}") as client, pytest.raises(FreshetError) as failed:
            client.recommend("ann")
        assert failed.value.status == "INTERNAL"
    finally:
        server.stop(None).wait()
