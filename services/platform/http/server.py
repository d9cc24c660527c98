"""Serve RPCs over HTTP by the Connect protocol: a POST of JSON or Protobuf to /<package>.<Service>/<Method>.

It shares handlers, guard and event loop with the gRPC server, so limits, keys, deadlines (`Connect-Timeout-Ms`),
request ids and errors are the same. Streams need gRPC, because HTTP/1.1 cannot answer while it reads.
"""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import grpc
import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from services.platform import threads
from services.platform.config import ProcessSettings
from services.platform.errors import InvalidRequest
from services.platform.http.connections import IDLE_S, MAX_CONNECTIONS, LimitedConnection
from services.platform.http.openapi import Described
from services.platform.http.origins import WithOrigins
from services.platform.machine import PortTaken, check_port_free, port_owner
from services.platform.rpc.guard import UNGUARDED, Body, CallGuards, reader

_STRANGERS_BYTES = 4096
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# gRPC spells CANCELLED with two l.
_CODES = {
    status.name: Code[status.name.replace("CANCELLED", "CANCELED")] for status in grpc.StatusCode if status.value[0]
}

Answer = Callable[[Any, Any], Awaitable[Any]]


class _Codec:
    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json

    def name(self) -> str:
        return "json" if self._is_json else "proto"

    def encode(self, message: Message | bytes) -> bytes:
        return message if isinstance(message, bytes) else _encoded(message, is_json=self._is_json)

    def decode(self, data: bytes | bytearray, message_class: type[Any]) -> Body:
        return Body(bytes(data), is_json=self._is_json)


def _encoded(message: Message, *, is_json: bool) -> bytes:
    if not is_json:
        return message.SerializeToString()
    return json_format.MessageToJson(message, indent=None).encode()


class _Call:
    """Gives a call over HTTP the part of gRPC's context that guard and handlers use."""

    def __init__(self, context: RequestContext[Any, Any]) -> None:
        self._context = context

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self._context.request_headers.allitems())

    def time_remaining(self) -> float | None:
        left = self._context.timeout_ms
        return None if left is None else left / 1000

    def peer(self) -> str:
        return f"http:{self._context.client_address or ''}"

    def set_trailing_metadata(self, metadata: Any) -> None:
        for name, value in metadata:
            self._context.response_headers[name] = value

    async def abort(self, status: grpc.StatusCode, message: str = "", metadata: Any = ()) -> NoReturn:
        self.set_trailing_metadata(metadata)
        raise ConnectError(_CODES[status.name], message)


class _Application(ConnectASGIApplication[None]):
    @property
    def path(self) -> str:
        return ""


class _Explained:
    """Adds the allowed values to the rejections that Connect sends without a text."""

    def __init__(self, application: Any, paths: Collection[str], most: int) -> None:
        """most: the largest body in bytes. A longer one gets 413 instead of Connect's 429, which clients may retry."""
        self._application, self._paths, self._most = application, ", ".join(sorted(paths)), most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = False

        async def told(message: Any) -> None:
            nonlocal refused
            headers = message.get("headers", ())
            if message.get("status") == 429 and int(dict(scope["headers"]).get(b"content-length", b"0")) > self._most:
                message = {**message, "status": 413}
            begins = message["type"] == "http.response.start" and all(name != b"content-type" for name, _ in headers)
            if begins and (text := self._words(message["status"], scope)):
                refused = True
                await send({**message, "headers": [*headers, (b"content-type", b"application/json")]})
                body = json.dumps({"code": "unimplemented", "message": text}).encode()
                await send({"type": "http.response.body", "body": body})
            if not refused:
                await send(message)

        await self._application(scope, receive, told)

    def _words(self, status: int, scope: Any) -> str:
        given = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
        return {
            404: f"path={scope['path'][:80]!r} allowed: {self._paths}",
            405: f"method={scope['method'][:80]!r} allowed: POST",
            415: f"content-type={given[:80]!r} allowed: application/json, application/proto",
        }.get(status, "")


class _OnLoopback:
    """Accepts only loopback host names, against DNS rebinding."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if _hostname(host) in _LOOPBACK:
            await self._application(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        text = f"host={host[:80]!r} allowed without API keys: {', '.join(_LOOPBACK)}\n"
        await send({"type": "http.response.body", "body": text.encode()})


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class _KnownFirst:
    def __init__(self, application: Any, guards: CallGuards) -> None:
        self._application, self._guards = application, guards

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        metadata = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        if self._guards.door is None or self._guards.door.knows(metadata):
            await self._application(scope, receive, send)
            return
        left = _STRANGERS_BYTES if scope["path"].startswith(UNGUARDED) else 0

        async def beginning() -> Any:
            nonlocal left
            message = await receive() if left > 0 else {"type": "http.request", "body": b""}
            if message["type"] != "http.request":
                return message
            body, left = message["body"][:left], left - len(message["body"])
            return {**message, "body": body, "more_body": left > 0 and message.get("more_body", False)}

        async def last(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await self._application(scope, beginning, last)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: the process handles signals."""
        yield


class HttpServer:
    """Serves unary methods over HTTP."""

    def __init__(
        self,
        *,
        settings: ProcessSettings,
        port: int,
        services: Mapping[ServiceDescriptor, Any],
        guards: CallGuards,
        max_request_bytes: int,
        knows_callers: bool,
        origins: Collection[str] = (),
    ) -> None:
        """services: the implementations. port: 0 takes any free port. knows_callers: whether API keys are required;
        without keys only calls to a loopback name are answered. origins: web origins that may call.
        """
        self._settings, self.port = settings, port
        endpoints = {
            f"/{service.full_name}/{method.name}": _endpoint(service, method, getattr(servicer, method.name), guards)
            for service, servicer in services.items()
            for method in service.methods
            if not method.client_streaming and not method.server_streaming
        }
        application = _Application(
            service=None,
            endpoints=lambda _: endpoints,
            read_max_bytes=max_request_bytes,
            codecs=cast(Any, [_Codec(is_json=True), _Codec(is_json=False)]),
        )
        explained = Described(_Explained(application, endpoints, max_request_bytes), services)
        admitted = _KnownFirst(explained, guards) if knows_callers else _OnLoopback(explained)
        self._application = WithOrigins(admitted, origins) if origins else admitted
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        host = self._settings.host
        if not self._settings.shares_port:
            check_port_free(host, self.port)
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._settings.shares_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listening.bind((host, self.port))
            listening.listen(MAX_CONNECTIONS)
        except OSError as exc:
            listening.close()
            raise PortTaken(host, self.port, port_owner(self.port)) from exc
        self.port = listening.getsockname()[1]
        config = self._config()
        config.load()
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def drain(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    def _config(self) -> uvicorn.Config:
        tls = self._settings.tls
        certificates: dict[str, Any] = {}
        if tls is not None:
            certificates = {"ssl_keyfile": tls.key, "ssl_certfile": tls.certificate}
            if self._settings.asks_client_certificates:
                certificates |= {"ssl_ca_certs": str(tls.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return uvicorn.Config(
            cast(Any, self._application),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            http=LimitedConnection,
            ws="none",
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=max(1, round(self._settings.drain_seconds)),
            **certificates,
        )


def _endpoint(service: ServiceDescriptor, method: MethodDescriptor, answer: Answer, guards: CallGuards) -> Any:
    request_type = message_factory.GetMessageClass(method.input_type)
    path = f"/{service.full_name}/{method.name}"
    handler = grpc.unary_unary_rpc_method_handler(answer)
    guarded, read = guards.guarded(path, handler), reader(path, guards.limits)

    async def function(body: Body, context: RequestContext[Any, Any]) -> Any:
        call = _Call(context)
        if guarded is handler:
            try:
                return await answer(read(body), call)
            except InvalidRequest as exc:
                raise ConnectError(Code.INVALID_ARGUMENT, exc.message) from exc
        response = await guarded.unary_unary(body, call)
        if not body.is_json:
            return response
        # Encoding JSON takes some 30 us per thousand bytes, so a response counts as four times its size.
        threads.size_bytes.set(4 * response.ByteSize())
        return await threads.in_turn(partial(_encoded, is_json=True), response)

    info = MethodInfo(
        name=method.name,
        service_name=service.full_name,
        input=request_type,
        output=message_factory.GetMessageClass(method.output_type),
        idempotency_level=IdempotencyLevel.UNKNOWN,
        stream_type=StreamType.UNARY,
    )
    return Endpoint.unary(info, function)
