"""OpenTelemetry traces over gRPC and Kafka, if an OTLP endpoint is set; otherwise the library is not imported.

An interceptor costs every RPC some tens of microseconds, so disabled tracing has none. Records carry their writer's
context in the header `traceparent` (W3C Trace Context). A batch has one span with links to them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from services.platform.stream.records import SourceRecord

TRACEPARENT = "traceparent"
Headers = Sequence[tuple[str, bytes]]
_NOTHING: Mapping[tuple[int, int], str] = {}


class Tracing:
    """This class is disabled tracing.

    A traceparent is a sampled span's context as text; "" is none. interceptors: for server and client channels.
    """

    server_interceptors: tuple[Any, ...] = ()
    client_interceptors: tuple[Any, ...] = ()
    is_on = False

    def headers(self) -> Headers:
        """Return a record's headers; none if not sampled."""
        return ()

    def sampled(self, records: Iterable[SourceRecord]) -> Mapping[tuple[int, int], str]:
        """Return the records' traceparents by (partition, offset)."""
        return _NOTHING

    def batch(self, name: str, links: Collection[str], **numbers: int) -> AbstractContextManager[str]:
        """Yield the traceparent of a new trace's span for a batch.

        links: the records' traceparents; without any there is no span. numbers: attributes.
        """
        return nullcontext("")

    def stage(self, name: str) -> AbstractContextManager[object]:
        """A child of the current span, if any."""
        return nullcontext()

    def link(self, traceparent: str, name: str) -> None:
        """Link to the span whose result is used. name: of that result."""


OFF = Tracing()
