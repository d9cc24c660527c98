"""Two compact workers behind the gateway's port, with API keys, as clients with several connections meet them."""

import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import psutil
import pytest
from freshet.v1 import gateway_pb2, gateway_pb2_grpc
from outside import until

from services.gateway.edge.api_keys import create_key
from services.gateway.edge.roles import Role
from services.platform.machine import PortTaken, check_port_free
from services.stack import Ports, Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
CONNECTIONS, RATE, BURST = 24, 1.0, 20


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    roles = frozenset({Role.RECOMMEND})
    made = {
        "any": create_key(file, id="any", roles=roles),
        "slow": create_key(file, id="slow", roles=roles, requests_per_second=RATE, burst=BURST),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRESHET_API_KEYS", str(file))
        patch.setenv("FRESHET_AUDIT_LOG", str(file.with_name("audit.jsonl")))
        yield made


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, small_bundle: Path, secrets: dict[str, str]) -> Iterator[Stack]:
    ports = until("ports for two workers' metrics", _ports)
    stack = Stack(tmp_path_factory.mktemp("workers"), bundle=small_bundle, ports=ports, profile="compact", workers=2)
    stack.up(["kafka", "redis", "gateway"])
    yield stack
    stack.down()


def _ports() -> Ports | None:
    ports = Ports.free()
    try:
        check_port_free("127.0.0.1", ports["gateway-metrics"] + 100)
    except PortTaken:
        return None
    return ports


def answers(stack: Stack, secret: str, connections: int = CONNECTIONS, calls: int = 2) -> Counter[grpc.StatusCode]:
    """Of Recommend calls over connections of their own."""
    found: Counter[grpc.StatusCode] = Counter()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    with ExitStack() as open_:
        for _ in range(connections):
            channel = open_.enter_context(closing(grpc.insecure_channel(stack.address("gateway"), options)))
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            for _ in range(calls):
                try:
                    request = gateway_pb2.RecommendRequest(user_id="stranger", k=3)
                    answer = stub.Recommend(request, timeout=10, metadata=[("authorization", f"Bearer {secret}")])
                    assert len(answer.items) == 3
                    found[grpc.StatusCode.OK] += 1
                except grpc.RpcError as error:
                    found[error.code()] += 1
    return found


def answered_by(stack: Stack) -> list[float]:
    """Recommend calls that each worker has answered, by their own metrics."""
    found = []
    for worker in range(2):
        port = stack.ports["gateway-metrics"] + 100 * worker
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        calls = [line for line in lines if line.startswith("freshet_gateway_rpc_") and '"Recommend"' in line]
        found.append(sum(float(line.split()[-1]) for line in calls if "_count{" in line))
    return found


def its_workers(stack: Stack) -> list[psutil.Process]:
    (pid,) = (part.pid for part in stack.status() if part.name == "gateway")
    return psutil.Process(pid).children()


def test_connections_are_shared_by_workers_that_are_all_ready(workers: Stack, secrets: dict[str, str]) -> None:
    before = answered_by(workers)
    assert answers(workers, secrets["any"]) == {grpc.StatusCode.OK: 2 * CONNECTIONS}
    shares = [after - earlier for after, earlier in zip(answered_by(workers), before, strict=True)]
    assert sum(shares) == 2 * CONNECTIONS
    assert min(shares) > 0


def test_a_worker_that_ends_is_started_again_and_the_others_answer(workers: Stack, secrets: dict[str, str]) -> None:
    first = its_workers(workers)
    first[0].kill()
    until("the dead one's port is closed", lambda: len(its_workers(workers)) < 2 or its_workers(workers) != first)
    assert answers(workers, secrets["any"], connections=8) == {grpc.StatusCode.OK: 16}

    def both() -> bool:
        found = its_workers(workers)
        return len(found) == 2 and found != first and workers.problem("gateway") is None

    until("another one runs", both)
    assert first[1] in its_workers(workers)
    calls = answered_by_again(workers)
    assert answers(workers, secrets["any"]) == {grpc.StatusCode.OK: 2 * CONNECTIONS}
    assert all(after > before for after, before in zip(answered_by(workers), calls, strict=True))


def answered_by_again(stack: Stack) -> list[float]:
    """As `answered_by`, once the new worker listens: its metrics come right after its port."""

    def look() -> list[float] | None:
        try:
            return answered_by(stack)
        except OSError:
            return None

    return until("both workers' metrics", look)


def test_down_leaves_no_worker(workers: Stack) -> None:
    running = its_workers(workers)
    assert len(running) == 2
    workers.stop("gateway")
    assert psutil.wait_procs(running, timeout=10)[1] == []
