"""One trace from an event to the answer that it changed, as a picture: docs/benchmarks/trace.svg.

Run `python docs/benchmarks/trace_picture.py --bundle BUNDLE` from the repository. It starts a stack of its own in a
temporary folder with a collector beside it, records an event, asks Recommend with the event's token again and again,
and draws the first answer from item states that the event changed: its spans, and those of all that it links to. The
processes have answered before, so that nothing starts cold.
"""

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import grpc
import matplotlib
import matplotlib.pyplot as plt
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from fakes.collector import Collector, Seen  # noqa: E402

from services.algorithms.bundles.model_bundle import load_bundle  # noqa: E402
from services.stack import Ports, Stack  # noqa: E402

PARTS = ["kafka", "redis", "encoder", "refresher", "candidates", "reranker", "gateway"]
COLOURS = {
    "gateway": "tab:blue",
    "encoder": "tab:orange",
    "refresher": "tab:green",
    "candidates": "tab:red",
    "reranker": "tab:purple",
}
WARM_UP = 5


class Client:
    """Calls whose traces are known by their ids."""

    def __init__(self, address: str, collector: Collector) -> None:
        self.collector = collector
        self._stub = gateway_pb2_grpc.GatewayServiceStub(grpc.insecure_channel(address))

    def record(self, user: str, item: str) -> tuple[str, object]:
        """The trace's id, and the token."""
        event = events_pb2.Interaction(user_id=user, item_id=item)
        request = gateway_pb2.RecordInteractionsRequest(interactions=[event])
        trace_id, metadata = _trace()
        return trace_id, self._stub.RecordInteractions(request, timeout=10, metadata=metadata).receipts[0].token

    def recommend(self, user: str, token: object = None) -> str:
        """The trace's id."""
        trace_id, metadata = _trace()
        request = gateway_pb2.RecommendRequest(user_id=user, k=10, freshness_token=token)
        self._stub.Recommend(request, timeout=10, metadata=metadata)
        return trace_id

    def chain(self, recorded: str, answered: str) -> list[Seen]:
        """All spans of the answer's trace and of what it links to, where its item states come from this event alone;
        else none."""
        spans = self.collector.spans.values()
        deltas = {to for span in spans if span.trace_id == answered and span.name == "Search" for to, _ in span.links}
        before = self._behind({span.trace_id for span in spans if span.span_id in deltas})
        if {span.trace_id for span in before if span.name == "RecordInteractions"} != {recorded}:
            return []
        return self._behind({answered})

    def _behind(self, traces: set[str]) -> list[Seen]:
        """The spans of these traces and of those that they link to, and so on."""
        spans = self.collector.spans
        while (
            more := {
                spans[to].trace_id
                for span in spans.values()
                if span.trace_id in traces
                for to, _ in span.links
                if to in spans
            }
            - traces
        ):
            traces |= more
        return [span for span in spans.values() if span.trace_id in traces]


def _trace() -> tuple[str, list[tuple[str, str]]]:
    trace_id = uuid.uuid4().hex
    return trace_id, [("traceparent", f"00-{trace_id}-{uuid.uuid4().hex[:16]}-01")]


def observe(bundle: Path) -> list[Seen]:
    """The spans between an event and the first answer from item states that it changed."""
    items = load_bundle(bundle).item_ids
    with Collector() as collector, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FRESHET_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        stack = Stack(folder, bundle=bundle, ports=Ports.free())
        try:
            stack.up(PARTS)
            client = Client(stack.address("gateway"), collector)
            for turn in range(60):
                user = f"picture-{turn}"
                # A first interaction has no state before it, and teaches no item.
                _, token = client.record(user, items[turn])
                client.recommend(user, token)
                time.sleep(1.0)
                recorded, token = client.record(user, items[turn + 1])
                answers = [client.recommend(user, token)]
                for _ in range(20):
                    time.sleep(0.05)
                    answers.append(client.recommend(user, token))
                time.sleep(1.0)
                found = [spans for answered in answers if (spans := client.chain(recorded, answered))]
                if turn >= WARM_UP and found:
                    return found[0]
        finally:
            stack.down()
    raise SystemExit("no answer's trace led to the event")


def draw(spans: Sequence[Seen], out: Path) -> None:
    """A row per span, in order of start; arrows are links."""
    matplotlib.use("svg")
    rows = sorted(spans, key=lambda span: span.start_s)
    at = {span.span_id: row for row, span in enumerate(rows)}
    zero = rows[0].start_s

    def ms(unix_s: float) -> float:
        return (unix_s - zero) * 1000

    figure, axes = plt.subplots(figsize=(10, 0.28 * len(rows) + 1.2))
    for row, span in enumerate(rows):
        axes.barh(row, ms(span.end_s) - ms(span.start_s), left=ms(span.start_s), color=COLOURS[span.process])
        axes.text(ms(span.end_s) + 2, row, f"{span.process}: {span.name}", va="center", fontsize=8)
        for linked, _ in span.links:
            axes.annotate(
                "",
                xy=(ms(span.start_s), row),
                # A record may be applied before its writer is told that it was written.
                xytext=(ms(min(rows[at[linked]].end_s, span.start_s)), at[linked]),
                arrowprops={"arrowstyle": "->", "color": "0.4", "linewidth": 0.8},
            )
    axes.set(yticks=[], xlabel="milliseconds since the event came", xlim=(-5, 1.3 * ms(max(s.end_s for s in rows))))
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    # Without a date the same spans are the same file.
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("trace.svg"))
    asked = parser.parse_args()
    seen = observe(asked.bundle)
    draw(seen, asked.out)
    for one in sorted(seen, key=lambda span: span.start_s):
        print(f"{one.process} {one.name}: {1000 * (one.end_s - one.start_s):.1f} ms")
