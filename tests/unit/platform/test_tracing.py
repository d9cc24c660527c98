"""Contexts of spans over records and states: bounded links, no texts, and nothing at all when tracing is off."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.platform.errors import InvalidRequest
from services.platform.exported_spans import MAX_LINKS, ExportedSpans
from services.platform.process import configure_tracing
from services.platform.request_context import OFF
from services.platform.stream.records import SourceRecord
from services.user_state.layout import trace_text, traceparent_of


def carrier(headers: Sequence[tuple[str, bytes | None]], offset: int = 0) -> SourceRecord:
    return SourceRecord("interactions", 0, offset, 0, b"key", b"value", headers)


class Scene:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = ExportedSpans("demo", self.exporter)

    def finished(self) -> dict[str, trace.Span]:
        self.tracing.provider.force_flush()
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def scene():
    scene = Scene()
    yield scene
    scene.tracing.provider.shutdown()


def number(traceparent: str) -> int:
    return int(traceparent.split("-")[2], 16)


def parent(n: int, flags: str = "01") -> str:
    return f"00-{n:032x}-{n:016x}-{flags}"


def test_a_record_carries_the_span_that_wrote_it_and_a_batch_links_to_it(scene: Scene) -> None:
    with scene.tracing.batch("first", [parent(7)]) as first:
        headers = scene.tracing.headers()
    assert headers == (("traceparent", first.encode()),)
    sampled = scene.tracing.sampled([carrier(headers, offset=3), carrier((), offset=4)])
    assert sampled == {(0, 3): first}
    with scene.tracing.batch("second", sampled.values(), records=2), scene.tracing.stage("part"):
        scene.tracing.link(parent(9), "state")
    spans = scene.finished()
    assert [link.context.span_id for link in spans["second"].links] == [number(first)]
    assert spans["second"].attributes == {"freshet.records": 2}
    assert spans["second"].parent is None
    assert spans["part"].parent.span_id == spans["second"].context.span_id
    assert [(link.context.span_id, dict(link.attributes)) for link in spans["part"].links] == [
        (9, {"freshet.used": "state"})
    ]


def test_links_are_bounded_and_one_request_is_one_link(scene: Scene) -> None:
    links = [parent(1)] * 1_000 + [parent(n) for n in range(2, 2 * MAX_LINKS)]
    with scene.tracing.batch("batch", links):
        pass
    span = scene.finished()["batch"]
    assert len(span.links) == MAX_LINKS
    assert span.attributes == {"freshet.links_left_out": 2 * MAX_LINKS - 1 - MAX_LINKS}


def test_without_a_sampled_link_there_is_neither_a_span_nor_a_header(scene: Scene) -> None:
    with scene.tracing.batch("batch", []) as span, scene.tracing.stage("part"):
        assert (span, scene.tracing.headers()) == ("", ())
    scene.tracing.link("", "state")
    assert scene.finished() == {}


def test_what_links_to_a_sampled_span_is_sampled_whatever_the_rate_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    scene = Scene()
    with scene.tracing.provider.get_tracer("any").start_as_current_span("alone"):
        assert scene.tracing.headers() == ()
    with scene.tracing.batch("batch", [parent(1)]) as span:
        assert span
    assert list(scene.finished()) == ["batch"]
    scene.tracing.provider.shutdown()


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"\xff\xfe",
        "00-é".encode(),
        parent(5, flags="00").encode(),
        parent(0).encode(),
        parent(5).encode() + b"-more",
        parent(5).upper().replace("5", "F").encode(),
    ],
)
def test_a_header_of_strangers_that_says_nothing_is_passed_over(scene: Scene, header: bytes | None) -> None:
    assert scene.tracing.sampled([carrier([("traceparent", header)])]) == {}


def test_an_errors_text_is_in_no_span(scene: Scene) -> None:
    async def call() -> None:
        with pytest.raises(InvalidRequest), scene.tracing.batch("batch", [parent(1)]), scene.tracing.stage("part"):
            raise InvalidRequest("the canary sings")

    asyncio.run(call())
    spans = scene.finished()
    assert set(spans) == {"batch", "part"}
    for span in spans.values():
        assert not span.status.is_ok
        assert "canary" not in span.to_json()


def test_off_does_nothing_and_loads_nothing() -> None:
    assert configure_tracing("demo", "") is OFF
    assert OFF.headers() == ()
    assert not OFF.sampled([carrier([("traceparent", parent(5).encode())])])
    with OFF.batch("batch", [parent(5)]) as span, OFF.stage("part"):
        assert span == ""
    loaded = "import sys, services.encoder.bootstrap; print('services.platform.exported_spans' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_a_states_trace_is_of_its_own_position_alone() -> None:
    written = trace_text(3, 17, parent(5)).encode()
    assert traceparent_of(written, 3, 17) == parent(5)
    assert traceparent_of(written, 3, 18) == ""
    assert traceparent_of(b"\xff", 3, 18) == ""
