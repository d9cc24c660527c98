"""OpenTelemetry traces over gRPC and Kafka, if an OTLP endpoint is set.

Otherwise the library is not imported, and there are no interceptors, which cost each RPC some tens of microseconds. A
record has its writer's context in the header `traceparent` (W3C Trace Context); a batch's span has links to its
records.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from services.platform.stream.records import SourceRecord

TRACEPARENT = "traceparent"
Headers = Sequence[tuple[str, bytes]]
_NOTHING: Mapping[tuple[int, int], str] = {}


class Tracing:
    """Disabled tracing. A traceparent is a sampled span's context as text; "" is none."""

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
        """Yield the traceparent of a batch's new span. links: the records' traceparents; without any, none begins."""
        return nullcontext("")

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a child of the current span, if any."""
        return nullcontext()

    def link(self, traceparent: str, name: str) -> None:
        """Link to the span whose result `name` is used."""


OFF = Tracing()
