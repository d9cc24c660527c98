"""Who may call what, through a real gRPC server: of each case the status that the caller sees and the audit line.

The table of roles is compared with the protocol and with docs/operate/security.md.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.gateway.config import GatewaySettings
from services.gateway.edge import door as door_module
from services.gateway.edge.api_keys import create_key, remove_key
from services.gateway.edge.door import MAX_REFUSALS, opened_door
from services.gateway.edge.roles import AUDITED, ROLES_OF, Role
from services.gateway.server import SERVICE
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import RpcServer
from services.stack.folders import REPOSITORY

METHODS = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].methods_by_name
WAIT_S = 10.0
# What a careless log would show.
CANARIES = ("canary-user", "canary-item", "Canary Title", "canary words")


class Servicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers everything with nothing, and counts; of an item "bad" it says that it is invalid."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in ROLES_OF:
            return super().__getattribute__(name)
        answer = getattr(gateway_pb2, METHODS[name].output_type.name)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await method(request, context)
            for _ in ():
                yield

        async def method(request: Any, context: Any) -> Any:
            self.calls.append(name)
            if name == "PutItems" and any(item.item_id == "bad" for item in request.items):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "items[0].item_id='canary-item'")
            return answer()

        return stream if METHODS[name].server_streaming else method


@dataclass
class Running:
    channel: grpc.aio.Channel
    servicer: Servicer
    keys: Path
    audit_file: Path

    def create(self, key_id: str, *roles: Role, **fields: Any) -> str:
        return create_key(self.keys, id=key_id, roles=frozenset(roles), **fields)

    async def call(self, method: str, secret: str | None, request: Any = None) -> tuple[str, dict[str, Any]]:
        """The status' name, and the trailing metadata."""
        row = METHODS[method]
        send = request or getattr(gateway_pb2, row.input_type.name)()
        # A stream says nothing: who writes while it is answered may call that its own error, INTERNAL.
        sent = () if method == "StreamInteractions" else (send,)
        metadata = None if secret is None else (("authorization", f"Bearer {secret}"),)
        call = getattr(gateway_pb2_grpc.GatewayServiceStub(self.channel), method)(*sent, timeout=10, metadata=metadata)
        return (await call.code()).name, dict(tuple(await call.trailing_metadata() or ()))

    async def status(self, method: str, secret: str | None, request: Any = None) -> str:
        return (await self.call(method, secret, request))[0]

    async def becomes(self, status: str, method: str, secret: str) -> None:
        """Ask until the answer is this one: the file is looked at every so often."""
        async with asyncio.timeout(WAIT_S):
            while await self.status(method, secret) != status:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]

    async def audits(self, *wanted: str) -> None:
        """Wait until the last line is this one: a call's end is written a moment after its client has it."""
        async with asyncio.timeout(WAIT_S):
            while not self.audited() or self.last() != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def last(self) -> tuple[str, str, str]:
        line = self.audited()[-1]
        assert re.fullmatch(r"ipv4:127\.0\.0\.1:\d+", line["peer"].replace("%3A", ":"))
        assert abs(datetime.now(UTC) - datetime.fromisoformat(line["time"])) < timedelta(minutes=1)
        return line["key"], line["method"], line["status"]


@pytest.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr(door_module, "_LOOK_EVERY_S", 0.01)
    async with running(tmp_path) as found:
        yield found


@asynccontextmanager
async def running(folder: Path, first: Iterable[Role] = Role) -> AsyncIterator[Running]:
    """A server behind the door; its keys file has one key, "first"."""
    keys, audit_file, servicer = folder / "keys.json", folder / "audit.log", Servicer()
    create_key(keys, id="first", roles=frozenset(first))
    settings = GatewaySettings(port=0, metrics_port=0, drain_seconds=0, api_keys=keys, audit_log=audit_file)

    def add(server: grpc.aio.Server) -> list[str]:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
        return [SERVICE]

    async with opened_door(settings.api_keys, settings.audit_log) as door:
        server = RpcServer(
            process="gateway_test", settings=settings, add_services=add, door=door, registry=CollectorRegistry()
        )
        await server.start()
        async with rpc_client.channel(f"127.0.0.1:{server.port}") as channel:
            yield Running(channel, servicer, keys, audit_file)
        await server.drain()


def test_every_rpc_has_its_roles_and_every_role_an_rpc() -> None:
    assert set(ROLES_OF) == set(METHODS), (
        "an RPC without a role is open to nobody: give it one in gateway/edge/roles.py"
    )
    assert all(ROLES_OF.values())
    assert set().union(*ROLES_OF.values()) == set(Role)


def test_the_page_repeats_the_table() -> None:
    page = (REPOSITORY / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \| (yes)? *\|$", page, re.MULTILINE)
    assert {method: set(roles.split(", ")) for method, roles, _ in rows} == ROLES_OF
    assert {method for method, _, is_audited in rows if is_audited} == AUDITED


async def test_without_a_key_nothing_is_answered_and_every_try_is_audited(gateway: Running) -> None:
    for number, method in enumerate(METHODS):
        assert await gateway.status(method, None) == "UNAUTHENTICATED"
        if number < MAX_REFUSALS:  # further ones of a minute are counted
            await gateway.audits("", method, "UNAUTHENTICATED")
    assert gateway.servicer.calls == []


async def test_an_unknown_key_is_unauthenticated_and_audited(gateway: Running) -> None:
    assert await gateway.status("Recommend", "freshet_wrong") == "UNAUTHENTICATED"
    await gateway.audits("", "Recommend", "UNAUTHENTICATED")
    assert gateway.audited()[-1]["reason"] == "unknown API key"


@pytest.mark.parametrize("role", Role)
async def test_each_role_calls_its_rpcs_and_is_denied_the_others(gateway: Running, role: Role) -> None:
    secret = gateway.create("one", role)
    await gateway.becomes("OK", next(method for method, roles in ROLES_OF.items() if role in roles), secret)
    refused = 0
    for method, roles in ROLES_OF.items():
        item = gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id="a")]) if method == "PutItems" else None
        status = await gateway.status(method, secret, item)
        assert status == ("OK" if role in roles else "PERMISSION_DENIED"), method
        refused += status == "PERMISSION_DENIED"
        if method in AUDITED if status == "OK" else refused <= MAX_REFUSALS:
            await gateway.audits("one", method, status)


async def test_an_expired_key_is_unauthenticated_with_the_reason_and_audited(gateway: Running) -> None:
    fresh = gateway.create("fresh", Role.RECOMMEND, expires=datetime.now(UTC) + timedelta(hours=1))
    old = gateway.create("old", Role.RECOMMEND, expires=datetime.now(UTC) - timedelta(seconds=1))
    await gateway.becomes("OK", "Recommend", fresh)
    with pytest.raises(grpc.aio.AioRpcError, match="API key old has expired") as caught:
        await gateway_pb2_grpc.GatewayServiceStub(gateway.channel).Recommend(
            gateway_pb2.RecommendRequest(), timeout=10, metadata=(("authorization", f"Bearer {old}"),)
        )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await gateway.audits("old", "Recommend", "UNAUTHENTICATED")


async def test_over_its_rate_a_key_is_told_when_to_come_back_and_audited(gateway: Running) -> None:
    slow = gateway.create("slow", Role.RECOMMEND, requests_per_second=0.01, burst=2)
    await gateway.becomes("OK", "Recommend", slow)
    assert await gateway.status("Recommend", slow) == "OK"
    status, metadata = await gateway.call("Recommend", slow)
    assert status == "RESOURCE_EXHAUSTED"
    assert 90_000 < int(metadata["grpc-retry-pushback-ms"]) <= 100_000
    await gateway.audits("slow", "Recommend", "RESOURCE_EXHAUSTED")


async def test_keys_change_while_it_runs_and_several_are_valid_at_once(gateway: Running) -> None:
    """How a key is rotated: the new one is made, clients take it, the old one is revoked."""
    old = gateway.create("old", Role.RECOMMEND)
    await gateway.becomes("OK", "Recommend", old)
    new = gateway.create("new", Role.RECOMMEND)
    await gateway.becomes("OK", "Recommend", new)
    assert await gateway.status("Recommend", old) == "OK"
    assert remove_key(gateway.keys, "old")
    await gateway.becomes("UNAUTHENTICATED", "Recommend", old)
    await gateway.audits("", "Recommend", "UNAUTHENTICATED")
    assert await gateway.status("Recommend", new) == "OK"


@pytest.mark.parametrize("text", ["{", '{"keys": [{"id": "a"}]}', None])
async def test_a_broken_file_leaves_the_earlier_keys_valid_and_is_logged_once(
    gateway: Running, text: str | None
) -> None:
    secret = gateway.create("one", Role.RECOMMEND)
    await gateway.becomes("OK", "Recommend", secret)
    whole = gateway.keys.read_text()
    with capture_logs() as logs:
        if text is None:
            gateway.keys.unlink()
        else:
            # At once: between a truncation and the text, the file would be broken in another way.
            broken = gateway.keys.with_suffix(".broken")
            broken.write_text(text)
            broken.replace(gateway.keys)
        async with asyncio.timeout(WAIT_S):
            while not any(entry["event"] == "api_keys_refused" for entry in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for _ in range(50):
            assert await gateway.status("Recommend", secret) == "OK"
        (entry,) = [entry for entry in logs if entry["event"] == "api_keys_refused"]
        assert (str(gateway.keys) in entry["reason"], entry["log_level"]) == (True, "error")
        gateway.keys.write_text(whole)
        two = gateway.create("two", Role.RECOMMEND)
        await gateway.becomes("OK", "Recommend", two)


async def test_an_audited_call_is_written_with_the_status_that_it_ended_with(gateway: Running) -> None:
    secret = gateway.create("boss", Role.OPERATOR)
    await gateway.becomes("OK", "GetFreshness", secret)
    bad = gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id="bad")])
    assert await gateway.status("PutItems", secret, bad) == "INVALID_ARGUMENT"
    await gateway.audits("boss", "PutItems", "INVALID_ARGUMENT")


async def test_neither_secrets_nor_what_callers_wrote_is_in_the_audit_log(gateway: Running) -> None:
    secret = gateway.create("all", *Role)
    ingest = gateway.create("ingest", Role.INGEST)
    await gateway.becomes("OK", "Recommend", secret)
    user, item, title, words = CANARIES
    requests = {
        "Recommend": gateway_pb2.RecommendRequest(user_id=user, k=1, query=words),
        "Search": gateway_pb2.GatewayServiceSearchRequest(query=words, user_id=user, k=1),
        "PutItems": gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id=item, title=title)]),
        "ForgetUser": gateway_pb2.ForgetUserRequest(user_id=user),
    }
    for shown in (secret, ingest, "freshet_canary-words", None):
        for method, request in requests.items():
            await gateway.status(method, shown, request)
    text = gateway.audit_file.read_text()
    assert len(gateway.audited()) >= 2 + 4 + 8
    for never in (*CANARIES, secret, ingest, "freshet_canary-words", secret.removeprefix("freshet_")):
        assert never not in text


async def test_health_and_reflection_ask_for_no_key(gateway: Running) -> None:
    health = health_pb2_grpc.HealthStub(gateway.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(gateway.channel)
    answer = await anext(aiter(stub.ServerReflectionInfo(iter([request]), timeout=10)))
    assert SERVICE in {service.name for service in answer.list_services_response.service}
    assert gateway.audited() == []


async def test_without_a_keys_file_everything_is_allowed_and_one_line_says_so() -> None:
    with capture_logs() as logs:
        async with opened_door(None, None) as door:
            assert door is None
    assert [entry["event"] for entry in logs] == ["no_api_keys"]
