"""`make compose-test`: docker-compose.yml in real containers, as a stranger meets it through its published ports.

It builds the role images and the stand-ins of overlay.yml, trains the small bundle by the documented command, starts
everything, and asserts: confinement, contents (histories, seen items and states against what was sent), answers, dead
letters, recovery from a kill of each container, volumes that outlive `down`. Outside CI: where no engine answers and
engine.sh cannot start one, it skips and says why. What the processes do with bad input is not asked here.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import paths
import pytest
from freshet.v1 import gateway_pb2, gateway_pb2_grpc
from outside import Outside, event, until
from playwright.sync_api import expect, sync_playwright

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.contracts.processes import PROCESSES
from services.encoder.adapters.in_process import InProcessEncoder
from services.encoder.domain import EncodeJob
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.stack.folders import cache_root
from services.stack.held_ports import held_for_servers
from services.stack.ports import LOOPBACK, Ports

ROOT, HERE = paths.TESTS.parent, paths.TESTS / "compose"
STATE = ROOT / ".freshet" / "compose-test"
BUNDLE = STATE / "bundle"
# The command of docs/operate/operations.md.
TRAINING = ("train", "--data", "simulator", "--epochs", "1", "--head", "mol", "--out", str(BUNDLE))
COMPOSE = ("docker", "compose", "-f", "docker-compose.yml", "-f", "tests/compose/overlay.yml")
OWN = (*PROCESSES, "console")
SERVICES = ("kafka", "redis", "inference-server", *OWN)
ROLES = ("serve", "score", "encode", "generate", "console")
CHROMIUM = "/usr/bin/chromium"
STREAM_USERS, STREAM_EVENTS = 150, 20
# Freshet's user, and whether a container can write to its root file system or gain rights.
CONFINED = """
import os
from pathlib import Path
status = dict(line.split(":\\t") for line in Path("/proc/1/status").read_text().splitlines() if ":\\t" in line)
try:
    Path("/opt/freshet/made").touch()
except OSError as error:
    problem = error.strerror
print(os.getuid(), os.getgid(), status["CapEff"].strip("0"), status["NoNewPrivs"], problem, sep=",")
"""


class Skipped(Exception):
    """No engine; the message says why."""


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def run(*command: str, timeout_s: float = 1800) -> str:
    """The standard output of a command in the checkout. Raises: RuntimeError with the end of what it said."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n" + "\n".join(said[-25:]))
    return done.stdout


def compose(*arguments: str) -> str:
    return run(*COMPOSE, *arguments)


def answers(*command: str) -> bool:
    """Whether the command exists and succeeds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def engine() -> Iterator[None]:
    """The engine that answers here, else one of our own for as long as the block runs. Raises: Skipped."""
    if answers("docker", "info") and answers("docker", "compose", "version"):
        yield
        return
    if os.geteuid() != 0 or not answers("apt-get", "--version"):
        raise Skipped("no Docker engine with compose answers, and only root on Debian can start one here")
    folder, script = cache_root() / "compose-engine", str(HERE / "engine.sh")
    say(f"starting a Docker engine in {folder}")
    try:
        run(script, "start", str(folder))
    except RuntimeError as error:
        raise Skipped(f"no Docker engine can be started here: {error}") from error
    try:
        lines = (folder / "environment").read_text(encoding="utf-8").splitlines()
        os.environ.update(dict(line.split("=", 1) for line in lines))
        yield
    finally:
        run(script, "stop", str(folder))


class WithKey(grpc.UnaryUnaryClientInterceptor):
    """Shows the gateway an API key."""

    def __init__(self, key: str) -> None:
        self._metadata = (("authorization", f"Bearer {key}"),)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)


@dataclass(frozen=True, kw_only=True)
class Published:
    """What of a local stack `Outside` asks for: here the ports that compose publishes."""

    bundle: Path
    ports: Ports
    redis_url: str
    kafka_bootstrap: str

    def address(self, part: str) -> str:
        return self.ports.address(part)


def api_key() -> str:
    """What the service `keys` made."""
    return compose("run", "--rm", "--no-deps", "-T", "keys", "cat", "/var/lib/freshet/secrets/api-key").strip()


@contextmanager
def client(key: str) -> Iterator[Outside]:
    """A client with this API key."""
    ports = Ports.default()
    redis_url = f"redis://{ports.address('redis')}/0"
    published = Published(bundle=BUNDLE, ports=ports, redis_url=redis_url, kafka_bootstrap=ports.address("kafka"))
    with Outside(published) as outside:  # type: ignore[arg-type]
        outside.gateway = gateway_pb2_grpc.GatewayServiceStub(grpc.intercept_channel(outside._channel, WithKey(key)))
        yield outside


def build() -> None:
    """The images; says how large each role's is, and over its base."""
    # One at a time: a build keeps a core busy.
    for service in (*SERVICES, "keys"):
        compose("build", service)
    base = size("python:3.11-slim")
    for role in ROLES:
        own = size(f"freshet-{role}:0.1.0")
        say(f"image {role:<9} {own / 1e6:4.0f} MB, {(own - base) / 1e6:4.0f} MB over its base")


def size(image: str) -> int:
    return int(run("docker", "image", "inspect", image, "--format", "{{.Size}}"))


@contextmanager
def ports_held() -> Iterator[None]:
    """No outgoing connection of this machine gets one of the documented ports while the block runs. One that has a port
    already is waited for; a server is not, and named."""
    deadline = time.monotonic() + 60
    while (taken := next(Ports.default().taken(), None)) is not None:
        assert time.monotonic() < deadline, taken
        time.sleep(0.5)
    with held_for_servers(LOOPBACK, Ports.default().numbers.values()):
        yield


def up() -> None:
    """Start everything and wait until every part is healthy."""
    began = time.monotonic()
    compose("up", "--detach", "--wait", "--wait-timeout", "300")
    unhealthy = {service for service in SERVICES if inspect(service)["State"]["Health"]["Status"] != "healthy"}
    assert not unhealthy, unhealthy
    say(f"all {len(SERVICES)} containers healthy after {time.monotonic() - began:.0f} s")


def inspect(service: str) -> Any:
    """What the engine says of the service's container."""
    (found,) = json.loads(run("docker", "inspect", f"freshet-test-{service}-1"))
    return found


def check_overlays() -> None:
    """Compose accepts every overlay over the file."""
    for overlay in sorted((ROOT / "deploy").glob("compose.*.yml")):
        run("docker", "compose", "-f", "docker-compose.yml", "-f", str(overlay), "config", "--quiet")
        say(f"overlay {overlay.name}: accepted")


def check_confinement() -> None:
    """Nobody is root; Freshet's own processes cannot write to their file system, and have no rights to lose or gain."""
    for service in SERVICES:
        assert compose("exec", "-T", service, "id", "-u").strip() != "0", service
    for process in OWN:
        assert inspect(process)["HostConfig"]["ReadonlyRootfs"], process
        told = compose("exec", "-T", process, "python", "-c", CONFINED).strip()
        assert told == "10001,10001,,1,Read-only file system", f"{process}: {told}"
    say("confinement: no container runs as root; Freshet's have read-only root file systems and no capabilities")


@dataclass(frozen=True)
class Sent:
    """A user's events as they were sent, oldest first."""

    user: str
    items: Sequence[str]
    times_s: Sequence[int]


def stream(outside: Outside) -> list[Sent]:
    """The last events of simulated people, half by RecordInteractions, half by a producer of their own."""
    data = simulate(SimulatorConfig())
    people = []
    for code in range(STREAM_USERS):
        rows = np.flatnonzero(data.users == code)[-STREAM_EVENTS:]
        items = [data.item_ids[item] for item in data.items[rows]]
        people.append(Sent(f"simulated-{code}", items, data.timestamps[rows].tolist()))
    said = []
    for number, person in enumerate(people):
        events = [event(person.user, item, at=at) for item, at in zip(person.items, person.times_s, strict=True)]
        if number % 2:
            said += [(one.token.partition, one.token.offset) for one in outside.record(*events)]
        else:
            said += [outside.put(person.user, one) for one in events]
    outside.applied(*dict(said).items())
    return people


def check_contents(outside: Outside, people: Sequence[Sent]) -> None:
    """Histories, seen items and query states in Redis: what was sent, and what the bundle's encoder makes of it."""
    bundle = outside.bundle
    rows = {item: row for row, item in enumerate(bundle.item_ids)}
    encoder = reference_encoder(bundle)
    for person in people:
        # Events of one second are ordered by their position, as they were sent.
        assert outside.history(person.user) == list(person.items), person.user
        assert outside.seen(person.user) == set(person.items), person.user
        job = EncodeJob(
            item_index=np.array([rows[item] for item in person.items], dtype=np.int64),
            event_time=np.array(person.times_s, dtype=np.int64),
            user_index=-1,
            positions=[len(person.items) - 1],
        )
        (expected,) = encoder.encode([job])
        stored = np.frombuffer(outside.stored_components(person.user) or b"", dtype="<f2").astype(np.float32)
        # Half precision, and keys and values that were kept: the last bit may differ.
        np.testing.assert_allclose(stored, expected.components[0].ravel(), atol=2e-3)


def reference_encoder(bundle: Bundle) -> InProcessEncoder:
    """The bundle's whole graph, nothing kept between calls."""
    return InProcessEncoder(bundle.path / "encoder.onnx", None, max_history=bundle.max_history, cache_bytes=0)


def check_answers(outside: Outside) -> None:
    """An event changes the next answer, words find their item, and nobody is let in without a key."""
    user, first, second = outside.new_user(), *outside.items[10:12]
    whole(outside, user, first)
    before = outside.ids(user)
    answer = whole(outside, user, second)
    assert [item.item_id for item in answer.items] != before
    assert not {first, second} & {item.item_id for item in answer.items}
    title = outside.bundle.titles[20]
    found = outside.gateway.Search(gateway_pb2.GatewayServiceSearchRequest(query=title, k=5), timeout=10)
    assert found.results[0].item_id == outside.items[20], title
    without_key = gateway_pb2_grpc.GatewayServiceStub(outside._channel)
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        without_key.Recommend(gateway_pb2.RecommendRequest(user_id=user, k=1), timeout=10)


def whole(outside: Outside, user: str, item: str) -> gateway_pb2.RecommendResponse:
    """The answer after one more event of the user: of the state that reflects it, and without a mark."""
    (receipt,) = outside.record(event(user, item))
    answer = outside.recommend(user, freshness_token=receipt.token)
    marks = [gateway_pb2.Degradation.Name(kind) for kind in answer.degradations]
    assert (answer.token_honoured, answer.state_source, marks) == (True, "stored", []), answer
    assert len(answer.items) == 10
    return answer


def check_console(key: str) -> None:
    """The console answers on its published port, shows nothing without a key, and lets the gateway's key in."""
    console = f"http://{Ports.default().address('console')}"
    assert urllib.request.urlopen(f"{console}/healthz", timeout=10).read() == b"serving\n"
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        page.goto(console)
        page.wait_for_url("**/sign-in")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator(".card")).to_have_count(12, timeout=30_000)


def check_dead_letters(outside: Outside) -> None:
    """A record that nobody can read is set aside with its bytes, and what is behind it is applied."""
    user, value = outside.new_user(), b"\xff not a message"
    place = outside.put(user, value)
    behind = outside.put(user, event(user, outside.items[0]), partition=place[0])
    outside.applied(behind)
    assert outside.history(user) == [outside.items[0]]
    assert until("its dead letter", lambda: _letter(outside, place)).value == value
    listed = json.loads(freshet("dead-letters", "list", "--kafka", Ports.default().address("kafka"), "--json"))
    assert f"interactions:{place[0]}:{place[1]}" in {letter["record"] for letter in listed["dead_letters"]}


def _letter(outside: Outside, place: tuple[int, int]) -> Any:
    try:
        return outside.dead_letter(place)
    except AssertionError:
        return None


def freshet(*arguments: str) -> str:
    return run(sys.executable, "-m", "services.cli", *arguments)


def kill_each(outside: Outside, user: str) -> None:
    """SIGKILL the first process of each container; it comes back by its restart policy, and answers are whole again."""
    for number, service in enumerate(SERVICES):
        before = inspect(service)
        # From a container that sees all processes: `docker kill` counts as a stop that was asked for.
        kill = f"import os; os.kill({before['State']['Pid']}, 9)"
        run("docker", "run", "--rm", "--pid=host", "--network=none", "python:3.11-slim", "python", "-c", kill)
        began = time.monotonic()

        def restarted(service: str = service, restarts: int = before["RestartCount"]) -> bool:
            return bool(inspect(service)["RestartCount"] > restarts)

        def healthy(service: str = service) -> bool:
            time.sleep(0.5)
            return bool(inspect(service)["State"]["Health"]["Status"] == "healthy")

        until(f"{service} is started again", restarted, 60)
        item = outside.items[100 + number]
        until(f"answers are whole after {service} was killed", lambda item=item: _is_whole(outside, user, item), 180)
        whole_s = time.monotonic() - began
        until(f"{service} is healthy again", healthy, 180)
        healthy_s = time.monotonic() - began
        say(f"killed {service:<16} answers whole after {whole_s:4.1f} s, healthy after {healthy_s:4.1f} s")


def _is_whole(outside: Outside, user: str, item: str) -> bool:
    try:
        whole(outside, user, item)
    except (grpc.RpcError, AssertionError):
        time.sleep(0.2)
        return False
    return True


def check() -> None:
    """All of it, on an engine that answers."""
    check_overlays()
    build()
    say("training a small bundle")
    freshet(*TRAINING)
    load_bundle(BUNDLE)
    up()
    check_confinement()
    key = api_key()
    with client(key) as outside:
        people = stream(outside)
        check_contents(outside, people)
        say(f"contents: {STREAM_USERS * STREAM_EVENTS} events of {STREAM_USERS} users, as sent and as encoded")
        check_answers(outside)
        say("answers: change after an event, honour its token, find words, ask for a key")
        check_console(key)
        say("console: signs in with the key on its published port, and shows a list")
        check_dead_letters(outside)
        say("dead letters: bytes set aside, what is behind them applied, listed by the command")
        kill_each(outside, outside.new_user())
        check_contents(outside, people)
        say("contents: as before the kills")
        written = outside.written()
    compose("down")
    up()
    assert api_key() == key
    with client(key) as outside:
        assert outside.written() == written
        check_contents(outside, people)
        until("answers are whole", lambda: _is_whole(outside, people[0].user, "1"), 60)
        say("volumes: the log, the states and the API key outlive `down`")


def main() -> int:
    os.environ["FRESHET_BUNDLE"] = str(BUNDLE)
    try:
        with engine(), ports_held():
            try:
                check()
            except BaseException:
                log = STATE / "containers.log"
                log.write_text(compose("ps", "--all") + compose("logs", "--timestamps"), encoding="utf-8")
                say(f"failed; the containers' logs are in {log}")
                raise
            finally:
                compose("down", "--volumes", "--timeout", "20")
    except Skipped as why:
        say(f"skipped: {why}")
        return 0
    say("passed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
