"""OpenTelemetry traces over gRPC and Kafka: on when an OTLP endpoint is set, otherwise nothing is even imported.

An interceptor that does nothing still costs every RPC some tens of microseconds, so "off" means none at all. A record
carries the context of the span that wrote it in the header `traceparent` (W3C Trace Context), so outside producers may
set it, too. Whoever applies records together has one span with links to those contexts; what it writes is found from
there on. Contexts are passed on as text; only `exported_spans` knows OpenTelemetry.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from services.platform.stream.record import SourceRecord

TRACEPARENT = "traceparent"
Headers = Sequence[tuple[str, bytes]]
_NOTHING: Mapping[tuple[int, int], str] = {}


class Tracing:
    """What a process says of its spans. This one is off; `exported_spans.ExportedSpans` is on.

    A traceparent is the text of a sampled span's context; "" is none. interceptors: for the server and for client
    channels.
    """

    server_interceptors: tuple[Any, ...] = ()
    client_interceptors: tuple[Any, ...] = ()
    is_on = False

    def headers(self) -> Headers:
        """What a record that is written now says of the current span; nothing where that is not sampled."""
        return ()

    def sampled(self, records: Iterable[SourceRecord]) -> Mapping[tuple[int, int], str]:
        """The traceparents that records carry, by (partition, offset)."""
        return _NOTHING

    def batch(self, name: str, links: Collection[str], **numbers: int) -> AbstractContextManager[str]:
        """A span of a trace of its own around what is done with many records at once; it gives its traceparent.

        links: traceparents of what the records come from. Without any, there is no span. numbers: its attributes.
        """
        return nullcontext("")

    def stage(self, name: str) -> AbstractContextManager[object]:
        """A span within the current one, where there is one."""
        return nullcontext()

    def link(self, traceparent: str, name: str) -> None:
        """Say of the current span that it used what another one made. name: of what was used."""


OFF = Tracing()
