"""What the stack tells of its work: traces that lead from an answer to the events behind it, and nothing of anybody.

The processes run once more for these tests, with tracing, API keys, an audit log and the most talkative log.
"""

import contextlib
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.collector import Collector, Seen
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc
from outside import Outside, event, until

from services.contracts.processes import PROCESSES
from services.gateway.edge.api_keys import create_key
from services.gateway.edge.roles import Role
from services.stack import Stack

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

    def refused(self, method: str, request: Any, **others: str) -> grpc.StatusCode:
        """The status of a call that must fail."""
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, request, **others)
        return caught.value.code()

    def said(self) -> dict[str, bytes]:
        """All that is told to operators, by where: logs since the processes started, metrics, audit log, spans."""
        told = {"audit log": self.audit.read_bytes()}
        for part in self.stack.components:
            told[f"log of {part}"] = self.stack.log(part).read_bytes()[self.logs[part] :]
        for part in (*PROCESSES, "inference-server"):
            with urllib.request.urlopen(f"http://{self.stack.address(f'{part}-metrics')}/metrics", timeout=10) as page:
                told[f"metrics of {part}"] = page.read()
        for number, request in enumerate(list(self.collector.requests)):
            told[f"spans {number}"] = request.SerializeToString()
        return told

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
        patch.setenv("FRESHET_LOG_LEVEL", "debug")
        _session_stack.use_bundle(small_bundle)
        for name in PROCESSES:
            _session_stack.stop(name)
        # Another launcher of the same parts: it reads the settings above.
        stack = Stack(_session_stack.place.state.root, bundle=small_bundle, ports=_session_stack.ports)
        gateway, door = stack.components["gateway"], {"API_KEYS": "keys.json", "AUDIT_LOG": "audit.log"}
        settings = {f"FRESHET_{name}": str(folder / file) for name, file in door.items()}
        service = replace(gateway.service, environment={**gateway.service.environment, **settings})
        stack.components["gateway"] = replace(gateway, service=service)
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


def test_nobody_is_found_in_what_operators_read(watched: Watched) -> None:
    bird = f"canary{uuid.uuid4().hex[:8]}"
    user, title, words, secret = f"{bird}-user", f"The {bird} of Oz", f"a {bird} film", f"{bird}-secret"
    item = f"item-{uuid.uuid4().hex[:8]}"
    calls = [
        ("PutItems", gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id=item, title=title)])),
        ("GetFreshness", gateway_pb2.GetFreshnessRequest()),
    ]
    with Outside(watched.stack) as outside:
        known = outside.items[0]
        for method, request in calls:
            watched.call(method, request)
        click = event(user, known, type="search_click", query=words)
        token = watched.record(event(user, known), event(user, outside.items[1]), event(user, item), click)
        history = [gateway_pb2.HistoryEvent(item_id=known)]
        good = [
            ("Recommend", gateway_pb2.RecommendRequest(user_id=user, k=5, freshness_token=token, query=words)),
            ("Recommend", gateway_pb2.RecommendRequest(user_id=user, k=5, history=history)),
            ("Search", gateway_pb2.GatewayServiceSearchRequest(user_id=user, query=words, k=5)),
            ("Explain", gateway_pb2.ExplainRequest(user_id=user, item_id=known)),
            ("UndoInteraction", gateway_pb2.UndoInteractionRequest(user_id=user, event_id=user)),
        ]
        for method, request in good:
            watched.call(method, request)
            assert watched.refused(method, request, key=secret) is grpc.StatusCode.UNAUTHENTICATED
        broken = f"{user}\n"
        for method, request in (
            ("RecordInteractions", gateway_pb2.RecordInteractionsRequest(interactions=[event(user, "")])),
            ("RecordInteractions", gateway_pb2.RecordInteractionsRequest(interactions=[event(broken, known)])),
            ("Recommend", gateway_pb2.RecommendRequest(user_id=broken, k=5)),
            ("Recommend", gateway_pb2.RecommendRequest(user_id=user, k=5, query=f"{words}\0")),
            ("Search", gateway_pb2.GatewayServiceSearchRequest(user_id=user, query=f"{words}\0", k=5)),
            ("Search", gateway_pb2.GatewayServiceSearchRequest(user_id=user * 20, query=words, k=5)),
            ("Explain", gateway_pb2.ExplainRequest(user_id=broken, item_id=known)),
            ("PutItems", gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id=item, title=f"{title}\0" * 99)])),
            ("ForgetUser", gateway_pb2.ForgetUserRequest(user_id=broken)),
        ):
            assert watched.refused(method, request) is grpc.StatusCode.INVALID_ARGUMENT, (method, request)

        # What the gateway would refuse, written beside it.
        good_event, at = {"user_id": user, "item_id": known}, "2026-01-01T00:00:00Z"
        json_type = [("content-type", b"application/json")]
        places = [
            outside.put(key, value, headers)
            for key, value, headers in (
                (user, f'{{"user_id": "{user}", '.encode(), json_type),
                (user, b"\xff" + user.encode(), ()),
                (user, {**good_event, "event_time": user}, ()),
                (user, {**good_event, "value": user}, ()),
                (user, {**good_event, "context": user}, ()),
                (user, {**good_event, user: at}, ()),
                (user, {"user_id": broken, "item_id": known}, ()),
                (user, {**good_event, "query": words}, ()),
                (f"{user}-another", event(user, known), ()),
                (user, event(user, known), [("content-type", user.encode())]),
                (user, event(user, known), [("traceparent", user.encode())]),
            )
        ]
        outside.applied(*places)
        outside.producer.send("items", title.encode(), item.encode()).get(timeout=10)
        outside.producer.send("items", events_pb2.Item(item_id=item, title=title).SerializeToString(), user.encode())
        outside.producer.send("forgets", user.encode(), user.encode()).get(timeout=10)
        outside.producer.flush(10)
        watched.call("ForgetUser", gateway_pb2.ForgetUserRequest(user_id=user, preview=True))
        watched.call("ForgetUser", gateway_pb2.ForgetUserRequest(user_id=user))
        until("the user is forgotten", lambda: not outside.history(user))
    until("the item is unreadable to all", lambda: watched.said()["log of candidates"].count(b"item_unreadable") >= 2)

    def spans() -> bool:
        names = {span.name for span in watched.collector.spans.values()}
        return names >= {"ForgetUser", "Search", "Explain", "PutItems", "apply interactions", "UndoInteraction"}

    until("spans of all calls", spans)
    told = watched.said()
    assert b"rpc_refused" in told["log of gateway"], "the log is not as talkative as it can be"
    assert b"UNAUTHENTICATED" in told["audit log"]
    leaks = {
        where: [line for line in text.splitlines() if bird.encode() in line.lower()][:3]
        for where, text in told.items()
        if bird.encode() in text.lower()
    }
    assert leaks == {}
