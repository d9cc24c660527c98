"""A call's request id, deadline, caller and trace.

Traces (OpenTelemetry, over gRPC and Kafka) are on if an OTLP endpoint is set. Otherwise the library is not imported,
and there are no interceptors, which cost each RPC some tens of microseconds. A record's header `traceparent` (W3C Trace
Context) identifies the span that wrote the record; a batch's span has links to the spans of its records.
"""

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

from services.platform.stream.records import SourceRecord

REQUEST_ID_HEADER = "x-request-id"

request_id: ContextVar[str] = ContextVar("request_id", default="")
# On the clock of `time.monotonic()`, in seconds.
deadline: ContextVar[float | None] = ContextVar("deadline", default=None)

# The API key's id; "" if keys are not required.
caller: ContextVar[str] = ContextVar("caller", default="")
# That key's roles; None if keys are not required.
roles: ContextVar[frozenset[str] | None] = ContextVar("roles", default=None)


def new_request_id() -> str:
    return secrets.token_hex(8)


def remaining_seconds() -> float | None:
    """Return the seconds until the deadline, negative after it; None if there is no deadline."""
    at = deadline.get()
    return None if at is None else at - time.monotonic()


def bounded_timeout(timeout_s: float) -> float:
    remaining = remaining_seconds()
    return timeout_s if remaining is None else min(timeout_s, remaining)


TRACEPARENT = "traceparent"
Headers = Sequence[tuple[str, bytes]]
_NOTHING: Mapping[tuple[int, int], str] = {}


class Tracing:
    """Disabled tracing. A traceparent is a sampled span's context as text; "" is none."""

    server_interceptors: tuple[Any, ...] = ()
    client_interceptors: tuple[Any, ...] = ()
    is_on = False

    def headers(self) -> Headers:
        """Return a record's tracing headers; none if the current span is not sampled."""
        return ()

    def sampled(self, records: Iterable[SourceRecord]) -> Mapping[tuple[int, int], str]:
        """Return the records' traceparents by (partition, offset)."""
        return _NOTHING

    def batch(self, name: str, links: Collection[str], **numbers: int) -> AbstractContextManager[str]:
        """Yield the traceparent of a batch's new span. links: its records' traceparents; if empty, no span begins."""
        return nullcontext("")

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a child of the current span, if any."""
        return nullcontext()

    def link(self, traceparent: str, name: str) -> None:
        """Link the current span to `traceparent`, the span that produced the used result `name`."""


OFF = Tracing()
