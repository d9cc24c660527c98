"""The real local stack, started once per session on free ports in a temporary folder, with a bundle trained in seconds.

Nothing is skipped: a component that cannot be started fails the tests that need it, with the launcher's own message.
Kafka, Redis and the inference server are also there alone, for tests that need no more.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import redis
from freshet.v1 import gateway_pb2, gateway_pb2_grpc

from services.contracts.topics import ensure_topics
from services.stack import Ports, Stack

TINY_TRAINING = """
import sys
from pathlib import Path
import pyarrow as pa
from services.offline.datasets.catalogue_file import Catalogue
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.offline.training.run import run_training

people = SimulatorConfig(
    num_users=300, num_items=400, num_topics=16, mean_events_per_user=40, max_events_per_user=120, seed=7
)
data = simulate(people)
prices = [float(row % 40) if row % 10 else None for row in range(data.num_items)]
languages = ["en" if row % 3 else "de" for row in range(data.num_items)]
attributes = pa.table({"price": prices, "language": languages})
run_training(
    out=Path(sys.argv[1]), seed=int(sys.argv[2]), interactions=data, epochs=1, split="none", head="mol", threads=1,
    catalogue=Catalogue(rows={one: row for row, one in enumerate(data.item_ids)}, attributes=attributes),
)
"""


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the `quick` shape over about 400 simulated items, ONNX encoder included, trained once a run.

    Its attributes: `price`, a number, of nine items in ten, and `language`, a tag.
    """
    return _trained(tmp_path_factory, seed=0)


@pytest.fixture(scope="session")
def next_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model of the same items, by another seed."""
    return _trained(tmp_path_factory, seed=1)


def _trained(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, part = shared / f"bundle-{seed}", shared / f"bundle-{seed}.part"
    with (shared / f"bundle-{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            # In a process of its own: this one stays without PyTorch, and without what exporting warns about.
            command = [sys.executable, "-c", TINY_TRAINING, str(part), str(seed)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            part.rename(folder)
    return folder


@pytest.fixture(scope="session")
def _session_stack(
    tmp_path_factory: pytest.TempPathFactory, stopped_after_its_group: list[Callable[[], object]]
) -> Iterator[Stack]:
    """The session's stack, nothing running yet."""
    stack = Stack(tmp_path_factory.mktemp("stack"), ports=Ports.free())
    stopped_after_its_group.append(stack.down)
    yield stack
    stack.down()


@pytest.fixture(scope="session")
def _session_compact_stack(
    tmp_path_factory: pytest.TempPathFactory, small_bundle: Path, stopped_after_its_group: list[Callable[[], object]]
) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("compact"), bundle=small_bundle, ports=Ports.free(), profile="compact")
    stopped_after_its_group.append(stack.down)
    yield stack
    stack.down()


@pytest.fixture
def compact_stack(_session_compact_stack: Stack) -> Stack:
    """Everything of the compact profile, beside the other stack."""
    _session_compact_stack.up()
    return _seen_by_gateway(_session_compact_stack)


@pytest.fixture
def kafka(_session_stack: Stack) -> str:
    """The broker's address, with Freshet's topics."""
    _session_stack.up(["kafka"])
    ensure_topics(_session_stack.kafka_bootstrap)
    return _session_stack.kafka_bootstrap


@pytest.fixture
def redis_url(_session_stack: Stack) -> str:
    """The state store's URL."""
    _session_stack.up(["redis"])
    return _session_stack.redis_url


@pytest.fixture
def own_redis(redis_url: str) -> Iterator[str]:
    """A database that no process of the stack writes to, empty."""
    url = redis_url.rsplit("/", 1)[0] + "/5"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()


@pytest.fixture
def inference_server(_session_stack: Stack, small_bundle: Path) -> str:
    """The inference server's gRPC address; it serves `small_bundle`'s encoder."""
    _session_stack.use_bundle(small_bundle)
    _session_stack.up(["inference-server"])
    return _session_stack.address("inference-server")


@pytest.fixture
def stack(_session_stack: Stack, small_bundle: Path) -> Stack:
    """Everything, healthy when the test begins, whatever the one before did to it."""
    _session_stack.use_bundle(small_bundle)
    _session_stack.up()
    return _seen_by_gateway(_session_stack)


def _seen_by_gateway(stack: Stack) -> Stack:
    """The stack, once its gateway knows that each part is back: it probes the encoder twice a second."""
    deadline = time.monotonic() + 30
    with grpc.insecure_channel(stack.address("gateway"), options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = gateway_pb2_grpc.GatewayServiceStub(channel).GetFreshness
        while marks := {*ask(gateway_pb2.GetFreshnessRequest(), timeout=10, wait_for_ready=True).degradations} - {
            gateway_pb2.DEGRADATION_NOT_FRESH
        }:
            assert time.monotonic() < deadline, f"the gateway still sees {marks}"
            time.sleep(0.05)
    return stack
