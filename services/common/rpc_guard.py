"""What happens around every RPC of ours, in one interceptor because each further one costs every call.

It binds the request id and the deadline, refuses late and surplus calls before any work, maps the error tree to
status codes, and counts. Anything outside the tree is a bug: neutral text to the caller, the stack in the log.
Health and reflection are left alone.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
import structlog

from services.common import request_context
from services.common.errors import DeadlineExceeded, FreshetError, Overloaded
from services.common.metrics import RpcMetrics

log = structlog.get_logger()

_UNGUARDED = ("/grpc.health.", "/grpc.reflection.")
_INTERNAL_TEXT = "internal error; quote the request id when reporting it"
_MAX_REQUEST_ID = 64


class CallGuards(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps each handler once and remembers it; a call then costs one dictionary lookup and one guard."""

    def __init__(self, metrics: RpcMetrics, *, max_in_flight: int) -> None:
        self.metrics = metrics
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self._wrapped: dict[str, grpc.RpcMethodHandler | None] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The guarded handler of a method; None when we don't have it."""
        path: str = handler_call_details.method
        found = self._wrapped.get(path)
        if found is not None:
            return found
        handler = await continuation(handler_call_details)
        if handler is None or path.startswith(_UNGUARDED):
            return handler
        wrapped = self._wrapped[path] = self._wrap(handler, path.rpartition("/")[2])
        return wrapped

    def _wrap(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if not handler.response_streaming:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

            async def answer(request: Any, context: Any) -> Any:
                async with _Guard(self, method, context):
                    return await inner(request, context)

            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            return make(answer, **coders)
        stream = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def answer_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with _Guard(self, method, context):
                async for message in stream(request, context):
                    yield message

        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(answer_stream, **coders)


class _Guard:
    """One call. Entering refuses it or binds its context; leaving maps its error and counts it."""

    __slots__ = ("_context", "_guards", "_method", "_started")

    def __init__(self, guards: CallGuards, method: str, context: Any) -> None:
        self._guards = guards
        self._method = method
        self._context = context
        self._started = time.perf_counter()

    async def __aenter__(self) -> None:
        guards = self._guards
        # Each call runs in a task of its own, so nothing needs to be reset.
        request_context.request_id.set(_request_id(self._context))
        remaining = self._context.time_remaining()
        if remaining is None:
            request_context.deadline.set(None)
        else:
            request_context.deadline.set(time.monotonic() + remaining)
            if remaining <= 0:
                guards.metrics.refused("deadline")
                await self._abort(DeadlineExceeded("the deadline had passed before work began"))
        if guards.in_flight >= guards.max_in_flight:
            guards.metrics.refused("overloaded")
            await self._abort(
                Overloaded(f"{guards.in_flight} calls in flight, the limit of this process", retry_after_ms=100)
            )
        guards.in_flight += 1
        guards.metrics.in_flight(guards.in_flight)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        guards = self._guards
        guards.in_flight -= 1
        guards.metrics.in_flight(guards.in_flight)
        if exc is None:
            guards.metrics.observe(self._method, "OK", time.perf_counter() - self._started)
        elif isinstance(exc, FreshetError):
            await self._abort(exc)
        elif isinstance(exc, asyncio.CancelledError | GeneratorExit):
            guards.metrics.observe(self._method, "CANCELLED", time.perf_counter() - self._started)
        elif isinstance(exc, grpc.aio.AbortError):
            code = self._context.code()
            name = code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
            guards.metrics.observe(self._method, name, time.perf_counter() - self._started)
        else:
            log.error("rpc_failed", method=self._method, exc_info=exc)
            guards.metrics.observe(self._method, "INTERNAL", time.perf_counter() - self._started)
            await self._context.abort(
                grpc.StatusCode.INTERNAL, f"{_INTERNAL_TEXT} ({request_context.request_id.get()})"
            )

    async def _abort(self, exc: FreshetError) -> None:
        self._guards.metrics.observe(self._method, exc.status.name, time.perf_counter() - self._started)
        log.debug("rpc_refused", method=self._method, status=exc.status.name, message=exc.message)
        metadata = [(request_context.REQUEST_ID_HEADER, request_context.request_id.get())]
        if exc.retry_after_ms is not None:
            metadata.append(("retry-after-ms", str(exc.retry_after_ms)))
        await self._context.abort(exc.status, exc.message, tuple(metadata))


def _request_id(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == request_context.REQUEST_ID_HEADER:
            text = value if isinstance(value, str) else ""
            if 0 < len(text) <= _MAX_REQUEST_ID and text.isprintable():
                return text
            break
    return request_context.new_request_id()
