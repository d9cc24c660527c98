"""OpenTelemetry traces over gRPC and Kafka, if an OTLP endpoint is set. Otherwise the library is not imported.

An interceptor without effect still costs every RPC some tens of microseconds, so disabled tracing has none. A record
carries the context of its writer's span in the header `traceparent` (W3C Trace Context); outside producers may set it
too. A batch of records has one span with links to those contexts. Contexts are texts; only `exported_spans` imports
OpenTelemetry.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from services.platform.stream.record import SourceRecord

TRACEPARENT = "traceparent"
Headers = Sequence[tuple[str, bytes]]
_NOTHING: Mapping[tuple[int, int], str] = {}


class Tracing:
    """A process's tracing. This class is disabled tracing; `exported_spans.ExportedSpans` is enabled tracing.

    A traceparent is the text of a sampled span's context; "" is none. interceptors: for the server and for client
    channels.
    """

    server_interceptors: tuple[Any, ...] = ()
    client_interceptors: tuple[Any, ...] = ()
    is_on = False

    def headers(self) -> Headers:
        """Return the headers for a record written in the current span; none if it is not sampled."""
        return ()

    def sampled(self, records: Iterable[SourceRecord]) -> Mapping[tuple[int, int], str]:
        """Return the records' traceparents by (partition, offset)."""
        return _NOTHING

    def batch(self, name: str, links: Collection[str], **numbers: int) -> AbstractContextManager[str]:
        """Return a context manager of a new trace's span for a batch; it yields the span's traceparent.

        links: traceparents of the batch's records; without any there is no span. numbers: attributes of the span.
        """
        return nullcontext("")

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager of a child of the current span, if any."""
        return nullcontext()

    def link(self, traceparent: str, name: str) -> None:
        """Link the current span to the span whose result it uses. name: the name of that result."""


OFF = Tracing()
