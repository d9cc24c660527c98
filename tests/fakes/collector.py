"""A collector of traces: an OTLP server in this process that keeps what it is sent."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One span. times: Unix seconds. links: (span id, what was used; "" where nothing is said)."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    links: tuple[tuple[str, str], ...]

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens from `with` to its end; `requests` are whole, as they came."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> dict[str, Seen]:
        """By span id."""
        with self._lock:
            requests = list(self.requests)
        return {span.span_id: span for request in requests for span in _spans(request)}


def _spans(request: Any) -> Iterator[Seen]:
    for of_process in request.resource_spans:
        process = next(a.value.string_value for a in of_process.resource.attributes if a.key == "service.name")
        for span in (span for scope in of_process.scope_spans for span in scope.spans):
            yield Seen(
                process=process.removeprefix("freshet-"),
                name=span.name.rpartition("/")[2],
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                start_s=span.start_time_unix_nano / 1e9,
                end_s=span.end_time_unix_nano / 1e9,
                links=tuple(
                    (link.span_id.hex(), next((a.value.string_value for a in link.attributes), ""))
                    for link in span.links
                ),
            )
