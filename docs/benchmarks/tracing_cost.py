"""What tracing costs per event: processor time of each thing that the processes do for it, off and on.

Run `python docs/benchmarks/tracing_cost.py` from the repository. Spans go to an exporter that throws them away, so what
encoding and sending them costs is not in it. The last line is JSON: median microseconds over the rounds.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.platform.exported_spans import ExportedSpans
from services.platform.request_context import OFF, Tracing
from services.platform.stream.records import SourceRecord

ROUNDS, RECORDS = 31, 512


class _Nowhere(SpanExporter):
    def export(self, spans: Sequence[object]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def record(offset: int, traceparent: str) -> SourceRecord:
    headers = [("traceparent", traceparent.encode())] if traceparent else []
    return SourceRecord("interactions", 0, offset, 0, b"key", b"value", headers)


def microseconds(do: Callable[[], object], times: int) -> float:
    """Processor time of one, median over the rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(times):
            do()
        found.append((time.process_time() - began) / times * 1e6)
    return round(statistics.median(found), 3)


def measure(tracing: Tracing) -> dict[str, float]:
    parents = [f"00-{n:032x}-{n:016x}-01" for n in range(1, RECORDS + 1)]
    traced = [record(n, parent) for n, parent in enumerate(parents)]
    plain = [record(n, "") for n in range(RECORDS)]

    def apply(records: Sequence[SourceRecord]) -> None:
        with tracing.batch("apply interactions", tracing.sampled(records).values(), records=len(records)):
            for stage in ("encode", "publish attributions", "store states"):
                with tracing.stage(stage):
                    pass

    def answer() -> None:
        with tracing.batch("an answer", parents[:1]):
            tracing.link(parents[1], "state")

    with tracing.batch("the writer", parents[:1]):
        written = microseconds(tracing.headers, 1_000)
    return {
        "headers of a record that is written": written,
        f"a batch of {RECORDS} traced records": microseconds(lambda: apply(traced), 20),
        f"a batch of {RECORDS} records without traces": microseconds(lambda: apply(plain), 20),
        "a batch of 1 traced record": microseconds(lambda: apply(traced[:1]), 100),
        "a span with a link to a state": microseconds(answer, 100),
    }


if __name__ == "__main__":
    on = ExportedSpans("cost", _Nowhere())
    found = {"off": measure(OFF), "on": measure(on)}
    on.provider.shutdown()
    print(json.dumps(found))
