"""The local stack's promises, on the real components: what runs, what survives, what is named when it goes wrong."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
import pytest
import tritonclient.grpc as inference
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.consumer.fetcher import ConsumerRecord
from outside import until

from services.algorithms.bundles.model_bundle import ENCODER_ONNX, load_bundle
from services.contracts.topics import ensure_topics
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.interactions import INTERACTIONS
from services.stack import Ports, Stack, StackError
from services.stack.components.inference_server import shared_memory_prefix
from services.stack.folders import REPOSITORY
from services.stack.ports import CONSOLE, PARTS

pytestmark = pytest.mark.integration


@pytest.fixture
def other_stack(tmp_path: Path):
    """A stack of its own, for what the session's must not suffer."""
    stack = Stack(tmp_path / "state", ports=Ports.free())
    yield stack
    stack.down()


def test_every_part_is_ready_and_tells_its_version(stack: Stack) -> None:
    assert [part.name for part in stack.status() if not part.healthy] == []
    versions = stack.versions()
    assert set(versions) == set(PARTS) - {CONSOLE}
    assert versions["kafka"].startswith("Apache Kafka 4.")
    assert versions["redis"].startswith("Redis ")
    assert versions["inference-server"].startswith("Triton Inference Server 2.")


def test_the_inference_server_exports_what_the_dashboards_show(stack: Stack) -> None:
    # By name alone: a model that nobody has asked yet has no sample.
    with urllib.request.urlopen(f"http://{stack.address('inference-server-metrics')}/metrics", timeout=5) as answer:
        exported = set(re.findall(r"^# TYPE (\w+) ", answer.read().decode(), re.MULTILINE))
    for board in (REPOSITORY / "deploy" / "dashboards").glob("*.json"):
        assert set(re.findall(r"\bnv_\w+", board.read_text(encoding="utf-8"))) <= exported, board.stem


def test_memory_stays_within_the_parts_rows_and_the_stacks_promise(stack: Stack) -> None:
    used = {part.name: part.memory_mb for part in stack.status()}
    assert {name: mb for name, mb in used.items() if mb > PARTS[name].memory_mb} == {}
    assert sum(used.values()) <= 1500


def test_status_and_doctor_of_a_running_stack_exit_with_success(stack: Stack) -> None:
    for command in ("status", "doctor"):
        done = subprocess.run(
            [Path(sys.executable).parent / "freshet", command, "--state", stack.place.state.root, "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        assert told.get("healthy", True)
        assert told.get("errors", 0) == 0


def test_killed_part_is_reported_and_starts_again(other_stack: Stack) -> None:
    other_stack.up(["redis"])
    other_stack.kill("redis")
    assert other_stack.problem("redis") == "not running"
    other_stack.start("redis")
    assert other_stack.problem("redis") is None


def test_kafka_keeps_acknowledged_records_when_it_is_killed(other_stack: Stack) -> None:
    other_stack.up(["kafka"])
    ensure_topics(other_stack.kafka_bootstrap)
    producer = KafkaProducer(bootstrap_servers=other_stack.kafka_bootstrap, acks="all")
    producer.send(INTERACTIONS + SUFFIX, b"kept").get(timeout=30)
    producer.close()
    other_stack.kill("kafka")
    other_stack.start("kafka")
    consumer = KafkaConsumer(bootstrap_servers=other_stack.kafka_bootstrap)
    partition = TopicPartition(INTERACTIONS + SUFFIX, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    # Short polls: within one poll kafka-python does not ask again when the partition has no leader for a moment.
    deadline = time.monotonic() + 30
    records: list[ConsumerRecord] = []
    while not records and time.monotonic() < deadline:
        records = consumer.poll(timeout_ms=200).get(partition, [])
    consumer.close()
    assert [record.value for record in records] == [b"kept"]


def test_process_that_ends_while_starting_is_named_with_the_end_of_its_log(
    other_stack: Stack, small_bundle: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "bundle"
    broken.mkdir()
    for file in small_bundle.iterdir():
        (broken / file.name).symlink_to(file)
    (broken / "items.arrow").unlink()
    (broken / "items.arrow").write_bytes(b"not these bytes")
    other_stack.use_bundle(broken)
    with pytest.raises(StackError, match=r"(?s)candidates: ended while starting.*items\.arrow"):
        other_stack.up(["candidates"], timeout_s=60)


def _histories(rng: np.random.Generator, rows: int, length: int, wanted: int, num_items: int) -> dict[str, np.ndarray]:
    return {
        "item_index": rng.integers(0, num_items, (rows, length)),
        "event_time": np.sort(rng.integers(10**9, 10**9 + 10**6, (rows, length)), axis=1),
        "position": np.sort(rng.integers(0, length, (rows, wanted)), axis=1),
    }


def test_requests_of_unlike_lengths_share_a_batch_and_each_gets_its_own_states(
    inference_server: str, small_bundle: Path
) -> None:
    session = onnxruntime.InferenceSession(small_bundle / ENCODER_ONNX, providers=["CPUExecutionProvider"])
    wants_user = "user_index" in {spec.name for spec in session.get_inputs()}
    num_items = load_bundle(small_bundle).num_items
    client = inference.InferenceServerClient(inference_server)
    lock = threading.Lock()

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows, length, wanted = int(rng.integers(1, 70)), int(rng.integers(1, 100)), int(rng.integers(1, 6))
        arrays = _histories(rng, rows, length, wanted, num_items)
        inputs = []
        for name, values in (arrays | {"user_index": np.full((rows, 1), -1)}).items():
            tensor = inference.InferInput(name, list(values.shape), "INT64")
            tensor.set_data_from_numpy(values.astype(np.int64))
            inputs.append(tensor)
        answer = client.infer("encoder", inputs, client_timeout=60)
        with lock:
            expected = session.run(None, arrays | ({"user_index": np.full(rows, -1)} if wants_user else {}))
        for spec, states in zip(session.get_outputs(), expected, strict=True):
            np.testing.assert_allclose(answer.as_numpy(spec.name), states, atol=1e-4)

    seeds = count()

    def share_a_batch() -> bool:
        list(pool.map(ask, islice(seeds, 40)))
        (statistics,) = client.get_inference_statistics("encoder").model_stats
        return any(batch.batch_size > 70 for batch in statistics.batch_stats)

    with ThreadPoolExecutor(8) as pool:
        until("two requests are batched", share_a_batch)
    client.close()


def test_malformed_encode_request_is_refused_alone(inference_server: str) -> None:
    client = inference.InferenceServerClient(inference_server)
    inputs = []
    for name, values in (("item_index", [[0, 1]]), ("event_time", [[5, 6]]), ("position", [[2]])):
        tensor = inference.InferInput(name, [1, len(values[0])], "INT64")
        tensor.set_data_from_numpy(np.array(values, dtype=np.int64))
        inputs.append(tensor)
    with pytest.raises(inference.InferenceServerException, match=r"position spans 2\.\.2; allowed: 0\.\.1"):
        client.infer("encoder", inputs)
    assert client.is_model_ready("encoder")
    client.close()


def test_down_ends_what_the_parts_started_too(other_stack: Stack, small_bundle: Path) -> None:
    other_stack.use_bundle(small_bundle)
    other_stack.up(["inference-server"])
    (pid,) = [part.pid for part in other_stack.status() if part.running]
    assert pid is not None
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(family) > 1
    other_stack.down()
    assert [member.pid for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE] == []


def test_killed_inference_server_leaves_neither_process_nor_memory_behind(
    other_stack: Stack, small_bundle: Path
) -> None:
    mine = f"{shared_memory_prefix(other_stack.place)}*"
    other_stack.use_bundle(small_bundle)
    other_stack.up(["inference-server"])
    (pid,) = [part.pid for part in other_stack.status() if part.running]
    assert pid is not None
    stubs = psutil.Process(pid).children(recursive=True)
    other_stack.kill("inference-server")
    _, alive = psutil.wait_procs(stubs, timeout=30)
    # Where nobody reaps (a container's first process need not), a zombie stays: it has no memory.
    assert [stub for stub in alive if stub.is_running() and stub.status() != psutil.STATUS_ZOMBIE] == []
    left = set(Path("/dev/shm").glob(mine))
    assert left
    other_stack.start("inference-server")
    assert other_stack.problem("inference-server") is None
    other_stack.down()
    assert not left & set(Path("/dev/shm").glob(mine)), "shared memory of the killed server was left behind"


def test_recycled_process_id_is_never_signalled(other_stack: Stack) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        other_stack.place.state.make()
        noted = {"pid": bystander.pid, "created": psutil.Process(bystander.pid).create_time() - 100, "argv": []}
        (other_stack.place.state.run / "redis.json").write_text(json.dumps(noted))
        assert other_stack.down() == []
        other_stack.kill("redis")
        assert bystander.poll() is None
    finally:
        bystander.send_signal(signal.SIGKILL)
        bystander.wait()


def test_parts_on_other_ports_are_not_started_twice(other_stack: Stack) -> None:
    other_stack.up(["redis"])
    moved = Stack(other_stack.place.state.root, ports=Ports.free())
    with pytest.raises(StackError, match="run already with other ports"):
        moved.up(["redis"])
