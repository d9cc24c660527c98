"""`freshet doctor` on broken stacks, made of real servers without the components behind them."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer.main
from fakes import certificates
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, reranker_pb2, reranker_pb2_grpc
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.model_bundle import BundleError
from services.cli.doctor import Finding
from services.cli.doctor.examine import OF_COMMANDS, examine, settings_of, variables_of
from services.cli.main import app
from services.contracts.processes import EFFECTS, PROCESSES
from services.encoder.metrics import EncoderMetrics
from services.gateway.edge.api_keys import create_key
from services.gateway.edge.roles import Role
from services.offline.bundles.model import write_bundle
from services.platform.config import ProcessSettings
from services.platform.machine import PortTaken
from services.platform.metrics import serve_metrics
from services.platform.rpc.server import HealthState, RpcServer
from services.platform.stream.follower import TurnClock
from services.stack import Ports, Stack, StackError
from services.stack.folders import StateFolder
from services.stack.note import Note, port_advice
from services.stack.ports import CONSOLE, PARTS
from tests.unit.bundle.bundle_scene import content


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FRESHET_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path / "state", ports=Ports.free())


def troubles(findings: list[Finding]) -> dict[str, Finding]:
    """Those that are not ok, of which each says why it matters and what to type; there is no bundle here."""
    found = {finding.about: finding for finding in findings if finding.severity != "ok"}
    assert all(finding.why and finding.advice for finding in found.values())
    assert found.pop("bundle").found.startswith("none at ")
    found.pop("data", None)
    return found


def about_bundle(stack: Stack) -> Finding:
    return next(finding for finding in examine(stack) if finding.about == "bundle")


@asynccontextmanager
async def process(
    stack: Stack, name: str, health: HealthState, add: Callable[[grpc.aio.Server], Any] = lambda server: None
) -> AsyncIterator[None]:
    """Something that answers as the process `name` of the stack."""

    def add_services(server: grpc.aio.Server) -> list[str]:
        add(server)
        return [PROCESSES[name].health_service]

    settings = ProcessSettings(port=stack.ports[name], metrics_port=0, drain_seconds=0)
    server = RpcServer(
        process=name, settings=settings, add_services=add_services, health_state=health, registry=CollectorRegistry()
    )
    await server.start()
    yield
    await server.drain()


def test_a_setting_that_is_refused_is_named_with_whom_it_ends(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_ENCODER_CACHE_MIB", "much")
    found = troubles(examine(stack))["settings"]
    assert found.severity == "error"
    assert "FRESHET_ENCODER_CACHE_MIB='much' allowed:" in found.found
    assert found.why == "encoder would end at once"
    assert found.advice == "unset FRESHET_ENCODER_CACHE_MIB"


def test_a_misspelt_setting_is_told_from_those_of_commands(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_API_KEY", "of commands")
    monkeypatch.setenv("FRESHET_REDIS_URI", "redis://elsewhere:1/0")
    found = troubles(examine(stack))["settings"]
    assert found.severity == "warning"
    assert "FRESHET_REDIS_URI; did you mean FRESHET_REDIS_URL?" in found.found


def test_every_variable_of_a_command_is_known() -> None:
    def options(command: Any) -> Iterator[str]:
        for other in getattr(command, "commands", {}).values():
            yield from options(other)
        yield from (str(option.envvar) for option in command.params if getattr(option, "envvar", None))

    known = set().union(*(variables_of(settings_of(row)) for row in PROCESSES.values()))
    assert set(options(typer.main.get_command(app))) <= known | OF_COMMANDS
    assert not known & OF_COMMANDS


def test_a_bundle_without_its_encoder_is_told_apart_with_the_command_that_makes_it(
    stack: Stack, tmp_path: Path
) -> None:
    bundle = write_bundle(stack.bundle, content())
    found = about_bundle(stack)
    assert (found.severity, found.found) == ("error", f"{stack.bundle} holds no encoder.onnx")
    assert found.advice == f"freshet export --bundle {stack.bundle}"
    with pytest.raises(BundleError, match=f"encoder.onnx is not in the manifest.*{found.advice}` makes it"):
        bundle.file("encoder.onnx")
    with pytest.raises(StackError, match=f"holds no model folder `encoder`\n  try: {found.advice}"):
        stack.components["inference-server"].launch(stack.place)
    (stack.bundle / "manifest.json").write_text('{"files": {}}')
    assert (about_bundle(stack).severity, "manifest.json" in about_bundle(stack).found) == ("error", True)


def test_settings_that_cannot_be_shown_are_not(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_KAFKA_PASSWORD", "hush")
    monkeypatch.setenv("FRESHET_KAFKA_SECURITY", "SASL_SSL")
    found = examine(stack)
    assert "FRESHET_KAFKA_USER" in troubles(found)["settings"].found
    assert "hush" not in str(found)


def test_a_taken_port_names_its_owner(stack: Stack) -> None:
    with socket.create_server(("127.0.0.1", stack.ports["reranker-metrics"])):
        found = troubles(examine(stack))
    taken = found[f"port {stack.ports['reranker-metrics']}"]
    assert str(os.getpid()) in taken.found
    assert "--port-offset" in taken.advice


def test_a_port_of_another_stack_names_the_command_that_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ports = Ports.free()
    taken = PortTaken("127.0.0.1", ports["kafka"], "java (pid 1)")
    assert port_advice(taken, tmp_path, "demo") == "freshet doctor, or freshet demo --port-offset 1000"
    quickstart = StateFolder(Path(".freshet/quickstart"))
    quickstart.make()
    Note(ports=ports).write(quickstart)
    assert port_advice(taken, tmp_path, "up").startswith("freshet down --state .freshet/quickstart, or")
    assert port_advice(taken, quickstart.root, "up").startswith("freshet doctor")


async def test_parts_that_are_away_or_not_ready_say_what_that_costs(stack: Stack) -> None:
    health = HealthState()
    health.set_ready(False, why_not="the catalogue's topics were not read to their ends yet")
    async with process(stack, "candidates", health):
        found = troubles(await asyncio.to_thread(examine, stack))
    assert found["candidates"].found.endswith("topics were not read to their ends yet")
    assert found["candidates"].why == "everybody gets popular items"
    assert found["candidates"].advice == "docker compose logs --tail 20 candidates"
    assert set(PARTS) <= set(found) | {"candidates", CONSOLE}
    assert found["redis"].advice == f"freshet up --state {stack.place.state.root} --only redis"
    # It answers, so its port is not somebody else's.
    assert f"port {stack.ports['candidates']}" not in found


async def test_a_part_that_this_stack_never_started_is_no_error(stack: Stack) -> None:
    stack.place.state.make()
    for name in ("kafka", "candidates"):
        stack.log(name).write_text("")
    async with process(stack, "candidates", HealthState()):
        found = troubles(await asyncio.to_thread(examine, stack))
    assert set(PARTS) & set(found) == {"kafka", "candidates"}


def test_every_parts_absence_has_a_cost() -> None:
    assert set(EFFECTS) == set(PARTS)


class Candidates(candidates_pb2_grpc.CandidatesServiceServicer):
    async def GetIndexInfo(self, request: Any, context: Any) -> Any:
        return candidates_pb2.GetIndexInfoResponse(model_version="m1")


class Reranker(reranker_pb2_grpc.RerankerServiceServicer):
    version = "m1"

    async def GetRerankerInfo(self, request: Any, context: Any) -> Any:
        return reranker_pb2.GetRerankerInfoResponse(model_version=self.version)


async def test_two_models_side_by_side_are_named(stack: Stack) -> None:
    reranker = Reranker()
    async with AsyncExitStack() as running:
        for name, add in (
            (
                "candidates",
                lambda server: candidates_pb2_grpc.add_CandidatesServiceServicer_to_server(Candidates(), server),
            ),
            ("reranker", lambda server: reranker_pb2_grpc.add_RerankerServiceServicer_to_server(reranker, server)),
        ):
            await running.enter_async_context(process(stack, name, HealthState(ready=True), add))
        alike = await asyncio.to_thread(examine, stack)
        reranker.version = "m2"
        found = troubles(await asyncio.to_thread(examine, stack))["model"]
    assert [finding.found for finding in alike if finding.about == "model"] == ["m1 in candidates, reranker"]
    assert (found.severity, found.found) == ("error", "candidates: m1, reranker: m2")
    where = f"--state {stack.place.state.root}"
    assert found.advice == f"freshet down {where} && freshet up {where}"


async def test_a_stream_that_fails_or_is_behind_is_told(stack: Stack) -> None:
    registry, turns = CollectorRegistry(), TurnClock()
    metrics = EncoderMetrics(registry)
    metrics.watch_turns(turns)
    metrics.progress({0: 9, 1: 4}, {0: 2000, 1: 5})
    serve_metrics(stack.ports["encoder-metrics"], registry=registry)
    async with process(stack, "encoder", HealthState(ready=True)):
        behind = troubles(await asyncio.to_thread(examine, stack))["stream of encoder"]
        for _ in range(3):
            turns.ended(well=False)
        metrics.progress({0: 1999}, {0: 2000})
        failing = troubles(await asyncio.to_thread(examine, stack))["stream of encoder"]
    assert (behind.severity, behind.found, behind.advice) == ("warning", "1,990 records wait", "freshet watch")
    assert failing.severity == "error"
    assert failing.found.startswith("the loop failed 3 times in a row")


def use(tls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in certificates.settings_of(tls).items():
        monkeypatch.setenv(f"FRESHET_{name.upper()}", str(path))


def test_an_expired_certificate_says_how_to_renew_it(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = certificates.made(tmp_path / "certs")
    use(certificates.of(folder, "gateway"), monkeypatch)
    assert not any(about.startswith("certificate") for about in troubles(examine(stack)))
    use(certificates.expired(folder, "gateway"), monkeypatch)
    found = troubles(examine(stack))["certificate gateway.crt"]
    assert found.severity == "error"
    assert found.found.startswith("ended on ")
    assert f"freshet certs --out {folder / 'expired'} --renew" in found.advice


def test_a_certificate_of_another_key_ends_every_start(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = certificates.made(tmp_path / "certs")
    use(certificates.of(folder, "gateway"), monkeypatch)
    monkeypatch.setenv("FRESHET_TLS_KEY", str(folder / "encoder.key"))
    found = troubles(examine(stack))["settings"]
    assert "FRESHET_TLS_KEY" in found.found
    assert all(name in found.why for name in PROCESSES)


def test_keys_that_end_are_told_before_they_do(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    now = datetime.now(UTC).replace(microsecond=0)
    for days in (-1, 3, 300):
        create_key(path, id=f"in{days}", roles=frozenset({Role.RECOMMEND}), expires=now + timedelta(days=days))
    create_key(path, id="never", roles=frozenset({Role.RECOMMEND}))
    monkeypatch.setenv("FRESHET_API_KEYS", str(path))
    found = troubles(examine(stack))
    assert {about: one.severity for about, one in found.items()} == {
        "API key in-1": "error",
        "API key in3": "warning",
    }
    assert found["API key in3"].advice.startswith("freshet keys create in3-2 --role recommend --days 90")
    path.write_text("{}")
    assert troubles(examine(stack))["API keys"].severity == "error"
