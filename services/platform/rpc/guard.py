"""The interceptor of every RPC. There is only one, since each interceptor slows every call.

It binds request id and deadline, maps FreshetErrors to status codes, and counts calls. It rejects unknown callers
before it reads their requests, and late calls and calls beyond the limit before it parses their requests. It logs any
other exception with its stack, and the caller gets a neutral text. Health and reflection are not guarded.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from prometheus_client import REGISTRY, CollectorRegistry, Histogram

from services.platform import request_context, threads
from services.platform.errors import DeadlineExceeded, FreshetError, InvalidRequest, Unauthenticated
from services.platform.http import json_requests
from services.platform.metrics import Figures
from services.platform.rpc import admission
from services.platform.rpc.admission import Admission
from services.platform.rpc.request_counts import LIMITS, UNCOUNTED_BYTES, RequestCounts

log = structlog.get_logger()

UNGUARDED = ("/grpc.health.", "/grpc.reflection.")
_INTERNAL_TEXT = "internal error; quote the request id when reporting it"
_NO_MESSAGE = "the request is not a message of this method"
_MAX_REQUEST_ID = 64
# "background" calls get half of the limit.
_PRIORITY_HEADER = "freshet-priority"


class Door(Protocol):
    """Authenticates and authorises callers."""

    def knows(self, metadata: Any) -> bool:
        """Return whether the metadata identify a caller."""
        ...

    def __call__(self, method: str, context: Any) -> Callable[[str], None] | None:
        """Authorise a call. Raises: a FreshetError.

        A returned function is called with the status at the call's end.
        """
        ...


class Body:
    """A request's bytes, which the parser removes.

    The exception and frames of a failed call refer to each other until garbage collection; without `take` they would
    retain megabytes.
    """

    __slots__ = ("_data", "is_json")

    def __init__(self, data: bytes, *, is_json: bool = False) -> None:
        self._data, self.is_json = data, is_json

    def __len__(self) -> int:
        return len(self._data)

    def take(self) -> bytes:
        data, self._data = self._data, b""
        return data


class RpcMetrics:
    """Seconds by method and status, calls in flight, rejected calls, and limits."""

    def __init__(
        self,
        process: str,
        registry: CollectorRegistry = REGISTRY,
        told: Callable[[str, str, float], None] | None = None,
    ) -> None:
        figures, self._told = Figures(registry), told
        self._seconds = figures.histogram(
            f"freshet_{process}_rpc_seconds", "Seconds per RPC, by method and gRPC status.", "method", "code"
        )
        self.in_flight = figures.gauge(f"freshet_{process}_rpc_in_flight", "RPCs being served.")
        # By reason: "overloaded" or "deadline".
        self.refused = figures.counter(f"freshet_{process}_rpc_refused", "RPCs rejected before any work.", "reason")
        self._limit = figures.gauge(
            f"freshet_{process}_rpc_limit", "RPCs of a class that may run at once, as last measured.", "calls"
        )
        self._children: dict[tuple[str, str], Histogram] = {}

    def observe(self, method: str, code: str, seconds: float) -> None:
        key = (method, code)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._seconds.labels(method, code)
        child.observe(seconds)
        if self._told is not None:
            self._told(method, code, seconds)

    def watch_limit(self, admission: Admission) -> None:
        self._limit.labels(admission.name).set_function(lambda: admission.limit)


class CallGuards(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps each handler once.

    max_in_flight: most calls in flight of all methods that have no entry in `admissions`. idle_s: how long a stream may
    be idle. limits: limits of repeated fields that replace those in `LIMITS`.
    """

    def __init__(
        self,
        metrics: RpcMetrics,
        *,
        max_in_flight: int,
        admissions: Mapping[str, Admission] | None = None,
        idle_s: float = 60.0,
        door: Door | None = None,
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.metrics = metrics
        self.limits = {**LIMITS, **limits}
        self.admissions = admissions or {}
        self.others = Admission("calls", smallest=max_in_flight, largest=max_in_flight)
        self.idle_s = idle_s
        self.door = door
        self.in_flight = 0
        for one in {*self.admissions.values(), self.others}:
            metrics.watch_limit(one)
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}
        self._strangers: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Return the guarded handler of a method; None if there is no such method."""
        path: str = handler_call_details.method
        wrapped = self._wrapped.get(path)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[path] = self.guarded(path, handler)
            self._strangers[path] = self._refusing(path) if wrapped is not handler else handler
        if self.door is not None and not self.door.knows(handler_call_details.invocation_metadata):
            return self._strangers[path]
        return wrapped

    def guarded(self, path: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        return handler if path.startswith(UNGUARDED) else self._wrap(handler, path)

    def _refusing(self, path: str) -> grpc.RpcMethodHandler:
        """Return a handler that rejects unknown callers. It takes a stream, which gRPC reads only on request."""

        async def refuse(_: Any, context: Any) -> Any:
            async with _Guard(self, path.rpartition("/")[2], context):
                raise Unauthenticated("the API key was not known when the call began")

        return grpc.stream_unary_rpc_method_handler(refuse)

    def _wrap(self, handler: grpc.RpcMethodHandler, path: str) -> grpc.RpcMethodHandler:
        # Requests of unknown or late callers are not parsed.
        method, streams = path.rpartition("/")[2], handler.request_streaming
        read = reader(path, self.limits)
        coders = {"request_deserializer": Body, "response_serializer": handler.response_serializer}

        async def parsed(body: Body) -> Any:
            threads.size_bytes.set(len(body))
            return await threads.in_turn(read, body)

        if not handler.response_streaming:
            inner = handler.stream_unary if streams else handler.unary_unary

            async def answer(request: Any, context: Any) -> Any:
                async with _Guard(self, method, context):
                    asked = self._while_not_silent(request, parsed) if streams else await parsed(request)
                    return await inner(asked, context)

            make = grpc.stream_unary_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
            return make(answer, **coders)
        stream = handler.stream_stream if streams else handler.unary_stream

        async def answer_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with _Guard(self, method, context):
                asked = self._while_not_silent(request, parsed) if streams else await parsed(request)
                async for message in stream(asked, context):
                    yield message

        make = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_stream_rpc_method_handler
        return make(answer_stream, **coders)

    async def _while_not_silent(
        self, requests: AsyncIterator[Body], parsed: Callable[[Body], Awaitable[Any]]
    ) -> AsyncIterator[Any]:
        while True:
            try:
                async with asyncio.timeout(self.idle_s):
                    body = await anext(requests)
            except StopAsyncIteration:
                return
            except TimeoutError as exc:
                raise DeadlineExceeded(f"no message for {self.idle_s:g} s") from exc
            yield await parsed(body)


class _Guard:
    """Rejects a call or binds the call's context on entry; maps the error and counts the call on exit."""

    __slots__ = ("_context", "_ended", "_guards", "_method", "_slot", "_started")

    def __init__(self, guards: CallGuards, method: str, context: Any) -> None:
        self._ended: Callable[[str], None] | None = None
        self._guards = guards
        self._method = method
        self._context = context
        self._started = time.perf_counter()

    async def __aenter__(self) -> None:
        guards = self._guards
        # Each call has its own task, so the context variables need no reset.
        request_id, is_background = _status_of(self._context)
        request_context.request_id.set(request_id)
        if guards.door is not None:
            try:
                self._ended = guards.door(self._method, self._context)
            except FreshetError as exc:
                await self._abort(exc)
        remaining = self._context.time_remaining()
        if remaining is None:
            request_context.deadline.set(None)
        else:
            request_context.deadline.set(time.monotonic() + remaining)
            if remaining <= 0:
                guards.metrics.refused.labels("deadline").inc()
                await self._abort(DeadlineExceeded("the deadline had passed before work began"))
        try:
            of_class = guards.admissions.get(self._method, guards.others)
            self._slot = await of_class.admit(_caller(self._context), is_background=is_background)
        except FreshetError as exc:
            guards.metrics.refused.labels("overloaded").inc()
            await self._abort(exc)
        admission.current.set(self._slot)
        guards.in_flight += 1
        guards.metrics.in_flight.set(guards.in_flight)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del traceback
        guards = self._guards
        guards.in_flight -= 1
        guards.metrics.in_flight.set(guards.in_flight)
        self._slot.leave(worked=exc is None)
        if exc is None:
            self._observe("OK")
        elif isinstance(exc, FreshetError):
            await self._abort(exc)
        elif isinstance(exc, asyncio.CancelledError | GeneratorExit):
            self._observe("CANCELLED")
        elif isinstance(exc, grpc.aio.AbortError):
            code = self._context.code()
            self._observe(code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN")
        else:
            log.error("rpc_failed", method=self._method, exc_info=exc)
            self._observe("INTERNAL")
            await self._context.abort(
                grpc.StatusCode.INTERNAL, f"{_INTERNAL_TEXT} ({request_context.request_id.get()})"
            )

    def _observe(self, code: str) -> None:
        self._guards.metrics.observe(self._method, code, time.perf_counter() - self._started)
        if self._ended is not None:
            self._ended(code)

    async def _abort(self, exc: FreshetError) -> None:
        # The traceback's frames refer to the request.
        exc.__traceback__ = exc.__context__ = exc.__cause__ = None
        self._observe(exc.status.name)
        log.debug("rpc_refused", method=self._method, status=exc.status.name, message=exc.message)
        metadata = [(request_context.REQUEST_ID_HEADER, request_context.request_id.get())]
        if exc.retry_after_ms is not None:
            # gRPC's retry policies read the second name.
            metadata += [(name, str(exc.retry_after_ms)) for name in ("retry-after-ms", "grpc-retry-pushback-ms")]
        await self._context.abort(exc.status, exc.message, tuple(metadata))


def reader(path: str, limits: Mapping[str, int]) -> Callable[[Body], Any]:
    """Return the parser of a method's requests. Raises: InvalidRequest."""
    method = descriptor_pool.Default().FindMethodByName(path[1:].replace("/", "."))
    kind, counts = message_factory.GetMessageClass(method.input_type), RequestCounts(method.input_type, limits)

    def read(body: Body) -> Any:
        data = body.take()
        if body.is_json:
            return json_requests.parse(data, kind, counts)
        try:
            if len(data) > UNCOUNTED_BYTES:
                counts.check(data)
            return kind.FromString(data)
        except DecodeError as exc:
            raise InvalidRequest(_NO_MESSAGE) from exc

    return read


def _caller(context: Any) -> str:
    caller = request_context.caller.get()
    if not caller:
        peer: str = context.peer()
        caller = peer.rpartition(":")[0]
    return caller


def _status_of(context: Any) -> tuple[str, bool]:
    request_id, is_background = "", False
    for key, value in context.invocation_metadata() or ():
        if key == request_context.REQUEST_ID_HEADER:
            text = value if isinstance(value, str) else ""
            if 0 < len(text) <= _MAX_REQUEST_ID and text.isprintable():
                request_id = text
        elif key == _PRIORITY_HEADER:
            is_background = value == "background"
    return request_id or request_context.new_request_id(), is_background
