"""Tracing with OpenTelemetry's SDK. Imported only if tracing is enabled.

Spans have no error texts, which may quote a caller's input. A batch is sampled if it links to a sampled context.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.grpc import aio_client_interceptors, aio_server_interceptor, filters
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.platform.request_context import TRACEPARENT, Headers, Tracing
from services.platform.stream.records import SourceRecord

# Links per batch; the SDK stores no more.
MAX_LINKS = 128
_W3C, _NO_CONTEXT = TraceContextTextMapPropagator(), Context()


def otlp_exporter(endpoint: str) -> SpanExporter:
    return OTLPSpanExporter(endpoint=endpoint, insecure=True)


class ExportedSpans(Tracing):
    """Tracing with a provider of its own, not the global one."""

    is_on = True

    def __init__(self, process: str, exporter: SpanExporter) -> None:
        self.provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: f"freshet-{process}"}),
            # The only span events are exceptions, whose texts must not be exported.
            span_limits=SpanLimits(max_events=0),
        )
        self.provider.sampler = _Linked(self.provider.sampler)
        self.provider.add_span_processor(BatchSpanProcessor(_WithoutTexts(exporter)))
        self._tracer = self.provider.get_tracer("freshet")
        no_health = filters.negate(filters.health_check())
        self.server_interceptors = (aio_server_interceptor(self.provider, no_health),)  # type: ignore[no-untyped-call]
        self.client_interceptors = tuple(aio_client_interceptors(self.provider, no_health))  # type: ignore[no-untyped-call]

    def headers(self) -> Headers:
        text = _text(trace.get_current_span())
        return ((TRACEPARENT, text.encode()),) if text else ()

    def sampled(self, records: Iterable[SourceRecord]) -> Mapping[tuple[int, int], str]:
        return {
            (record.partition, record.offset): text.decode()
            for record in records
            for name, text in record.headers
            if name == TRACEPARENT and text and text.isascii() and _context(text.decode()) is not None
        }

    def batch(self, name: str, links: Collection[str], **numbers: int) -> AbstractContextManager[str]:
        return self._batch(name, links, numbers) if links else nullcontext("")

    @contextmanager
    def _batch(self, name: str, links: Collection[str], numbers: Mapping[str, int]) -> Iterator[str]:
        # Interactions of one request share a traceparent, which is linked once.
        others = dict.fromkeys(links)
        found = [trace.Link(context) for text in islice(others, MAX_LINKS) if (context := _context(text))]
        attributes = {f"freshet.{key}": value for key, value in numbers.items()}
        if len(others) > MAX_LINKS:
            attributes["freshet.links_left_out"] = len(others) - MAX_LINKS
        with self._tracer.start_as_current_span(
            name,
            # Not a child of the thread's current span.
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=found,
        ) as span:
            yield _text(span)

    def stage(self, name: str) -> AbstractContextManager[object]:
        if trace.get_current_span().is_recording():
            return self._tracer.start_as_current_span(name)
        return nullcontext()

    def link(self, traceparent: str, name: str) -> None:
        context = _context(traceparent) if traceparent else None
        if context is not None:
            trace.get_current_span().add_link(context, {"freshet.used": name})


class _Linked(Sampler):
    def __init__(self, others: Sampler) -> None:
        self._others = others

    def should_sample(
        self,
        parent_context: Any,
        trace_id: int,
        name: str,
        kind: Any = None,
        attributes: Any = None,
        links: Any = None,
        trace_state: Any = None,
    ) -> SamplingResult:
        if links:  # all of them are sampled
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return self._others.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"Linked{{{self._others.get_description()}}}"


class _WithoutTexts(SpanExporter):
    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._exporter.export([_without_text(span) if span.status.description else span for span in spans])

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _without_text(span: ReadableSpan) -> ReadableSpan:
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        links=span.links,
        kind=span.kind,
        status=trace.Status(span.status.status_code),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _text(span: trace.Span) -> str:
    """Return a span's traceparent; "" if it is not sampled."""
    carrier: dict[str, str] = {}
    if span.get_span_context().trace_flags.sampled:
        _W3C.inject(carrier, trace.set_span_in_context(span, _NO_CONTEXT))
    return carrier.get(TRACEPARENT, "")


def _context(text: str) -> trace.SpanContext | None:
    """Return the traceparent's context; None if it is invalid or not sampled."""
    context = trace.get_current_span(_W3C.extract({TRACEPARENT: text}, _NO_CONTEXT)).get_span_context()
    return context if context.is_valid and context.trace_flags.sampled else None
