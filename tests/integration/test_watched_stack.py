"""What the stack tells of its work: traces that lead from an answer to the events behind it, and nothing of anybody.

The processes run once more for these tests, with tracing, API keys, an audit log and the most talkative log.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.collector import Collector, Seen
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc
from outside import Outside, event, until

from services.cli.stack import Stack
from services.common.processes import PROCESSES
from services.gateway.api_keys import create_key
from services.gateway.roles import Role

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The stack, its collector, its audit log, a key of all roles, and how long each log was before."""

    stack: Stack
    collector: Collector
    audit: Path
    key: str
    logs: dict[str, int] = field(default_factory=dict)

    def call(self, method: str, request: Any, *, key: str = "", **metadata: str) -> Any:
        """Ask the gateway. Raises: grpc.RpcError."""
        shown = [("authorization", f"Bearer {key or self.key}"), *metadata.items()]
        address = self.stack.address("gateway")
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            return getattr(gateway_pb2_grpc.GatewayServiceStub(channel), method)(request, timeout=10, metadata=shown)

    def record(self, *interactions: events_pb2.Interaction) -> Any:
        """The last receipt's token."""
        request = gateway_pb2.RecordInteractionsRequest(interactions=interactions)
        return self.call("RecordInteractions", request).receipts[-1].token

    def following(self, span: Seen, name: str) -> Seen | None:
        """The first span of this name that `span` links to."""
        spans = self.collector.spans
        return next((spans[to] for to, _ in span.links if to in spans and spans[to].name == name), None)


@pytest.fixture(scope="module")
def watched(_session_stack: Stack, small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    key = create_key(folder / "keys.json", id="all", roles=frozenset(Role))
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRESHET_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("FRESHET_API_KEYS", str(folder / "keys.json"))
        patch.setenv("FRESHET_AUDIT_LOG", str(folder / "audit.log"))
        patch.setenv("FRESHET_LOG_LEVEL", "debug")
        _session_stack.use_bundle(small_bundle)
        for name in PROCESSES:
            _session_stack.stop(name)
        # Another launcher of the same parts: it reads the settings above.
        stack = Stack(_session_stack.place.state.root, bundle=small_bundle, ports=_session_stack.ports)
        logs = {name: stack.log(name).stat().st_size if stack.log(name).exists() else 0 for name in stack.components}
        stack.up()
        yield Watched(stack=stack, collector=collector, audit=folder / "audit.log", key=key, logs=logs)
        for name in PROCESSES:
            stack.stop(name)


def traceparent() -> tuple[str, str]:
    """A new trace of the caller's: its id, and the header."""
    trace_id = uuid.uuid4().hex
    return trace_id, f"00-{trace_id}-{uuid.uuid4().hex[:16]}-01"


def test_an_answers_trace_leads_to_the_event_that_changed_it(watched: Watched) -> None:
    with Outside(watched.stack) as outside:
        items, user = outside.items, outside.new_user()
    token = watched.record(*(event(user, item, at=time.time() - 60 + at) for at, item in enumerate(items[:3])))

    def chain() -> list[str] | None:
        trace_id, header = traceparent()
        request = gateway_pb2.RecommendRequest(user_id=user, k=5, freshness_token=token)
        answer = watched.call("Recommend", request, traceparent=header)
        assert answer.token_honoured
        assert answer.state_source == "stored"

        def exported() -> tuple[Seen, Seen] | None:
            mine = {s.name: s for s in watched.collector.spans.values() if s.trace_id == trace_id and s.links}
            return (mine["Recommend"], mine["Search"]) if mine.keys() >= {"Recommend", "Search"} else None

        with contextlib.suppress(AssertionError):
            recommend, search = until("both spans", exported, within_s=2)
            assert recommend.process == "gateway"
            state = watched.following(recommend, "apply interactions")
            recorded = state and watched.following(state, "RecordInteractions")
            deltas = watched.following(search, "apply deltas")
            published = deltas and watched.following(deltas, "publish deltas")
            attributed = published and watched.following(published, "publish attributions")
            if state and recorded and deltas and published and attributed:
                return [span.process for span in (recommend, state, recorded, deltas, published, attributed)]
        return None

    assert until("a whole chain", chain, within_s=40) == [
        "gateway",
        "encoder",
        "gateway",
        "candidates",
        "refresher",
        "encoder",
    ]
