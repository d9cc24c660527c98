"""What is applied together has one span, and states say so whose events were traced."""

from collections.abc import Sequence
from typing import Any

from fakes.encoder import MemoryOutbox, MemoryStream
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from streams import NOW_MS, append, drain, handler_on, interaction

from services.contracts.topics.interactions import Interaction, encode_interaction
from services.offline.backfill.memory_store import MemoryStore
from services.platform.exported_spans import ExportedSpans
from services.user_state.values import UserUpdate

TRACEPARENT = f"00-{5:032x}-{6:016x}-01"


class NotingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.updates: list[UserUpdate] = []

    def apply(self, updates: Sequence[UserUpdate], *others: Any) -> None:
        self.updates += updates
        super().apply(updates, *others)


def append_traced(stream: MemoryStream, event: Interaction) -> None:
    headers = [("traceparent", TRACEPARENT.encode())]
    stream.append(0, event.user_id.encode(), encode_interaction(event), NOW_MS, headers)


def test_only_the_states_of_traced_events_say_which_span_made_them() -> None:
    stream, store, exporter = MemoryStream(1), NotingStore(), InMemorySpanExporter()
    append(stream, interaction(0, 1))
    append_traced(stream, interaction(1, 2))
    handler = handler_on(store, MemoryOutbox())
    tracing = handler.encode_batch.tracing = ExportedSpans("encoder", exporter)
    drain(handler, stream)
    tracing.provider.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"apply interactions", "encode", "store states"}
    batch = spans["apply interactions"]
    assert [link.context.span_id for link in batch.links] == [6]
    assert {span.parent.span_id for name, span in spans.items() if span is not batch} == {batch.context.span_id}
    told = {update.user_id: update.state.traceparent for update in store.updates if update.state is not None}
    made = f"00-{batch.context.trace_id:032x}-{batch.context.span_id:016x}-{batch.context.trace_flags:02x}"
    assert told == {"user-0": "", "user-1": made}
