"""What a call costs: a closed loop against a real gRPC server, whose processor time is this process's."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from pyarrow import feather

from loadtest import machine, path
from loadtest.compiled import NOT_SENT, OK, PlannedCall, build, send
from loadtest.requests import RECOMMEND, recommend


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A state folder whose one process is this one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "gateway.json").write_text(json.dumps({"pid": os.getpid()}))
    return tmp_path


def test_the_published_table_is_its_json() -> None:
    pages = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
    turns = [path.Turn(**turn) for turn in json.loads((pages / "path.json").read_text(encoding="utf-8"))["turns"]]
    assert path.table(turns) in (pages / "path.md").read_text(encoding="utf-8")


def test_callers_send_when_they_have_their_answers_and_end_in_time(small_gateway: Any) -> None:
    small_gateway.stall_after_calls, small_gateway.stall_s = 6, 2.0
    calls = [PlannedCall(due_s=9.0, method=RECOMMEND, request=recommend(str(row), 1)) for row in range(100_000)]
    answers = send(build(), f"127.0.0.1:{small_gateway.port}", calls, timeout_s=5, callers=2, lasts_s=1.0)
    answered = answers.status == OK
    assert answered.sum() == len(small_gateway.recommended)
    assert set(answers.status.tolist()) == {OK, NOT_SENT}
    # The clock of the calls is not looked at, and who waits does not send.
    assert answers.sent_s[answered].max() < 2.0
    # The sixth call stalls until no more are sent, and the other caller waits for one of its own.
    assert 6 <= answered.sum() <= 7
    assert 1 <= (answers.latency_s[answered] > 1.9).sum() <= 2


def test_the_processor_time_of_a_process_is_what_it_took(stack: Path) -> None:
    assert machine.processes(stack) == {"gateway": os.getpid()}
    before, began = machine.use(os.getpid()), time.process_time()
    while time.process_time() - began < 0.2:
        pass
    time.sleep(0.01)
    after = machine.use(os.getpid())
    assert after.processor_s - before.processor_s == pytest.approx(time.process_time() - began, abs=0.05)
    assert after.waits > before.waits
    assert machine.resident(os.getpid()) > 10_000_000
    with pytest.raises(ValueError, match="names no running stack"):
        machine.processes(stack / "elsewhere")


def test_what_a_process_started_counts_with_it() -> None:
    before, memory = machine.use(os.getpid()), machine.resident(os.getpid())
    burn = "import time\nwhile time.process_time() < .6: pass\nprint(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"1"
        assert machine.use(os.getpid()).processor_s >= before.processor_s + 0.45
        assert machine.resident(os.getpid()) > memory + (2 << 20)
        child.communicate(b"\n")


def test_each_subject_is_measured_and_the_table_stands_beside_an_empty_call(
    small_gateway: Any, stack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path, "_CALLERS", (1, 4))
    monkeypatch.setattr(path, "_LOOK_S", 0.05)
    monkeypatch.setattr(path, "_REST_S", 0.2)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), small_gateway.server)
    table = pa.table({"item_id": ["a", "b"], "title": ["Toy Story", "Heat"]})
    feather.write_feather(table, stack / "items.arrow")
    options = argparse.Namespace(items=stack / "items.arrow", num_users=20, seed=0, seconds=0.3, turns=1)
    stacks = [path._Stack(name="this", target=f"127.0.0.1:{small_gateway.port}", pids=machine.processes(stack))]
    turns = path._measure(options, stacks)
    of_recommend = [turn for turn in turns if turn.subject == "Recommend"]
    assert sum(turn.units for turn in of_recommend) == len(small_gateway.recommended)
    # The small gateway marks each of its answers and says 2 ms of reranking.
    assert [(turn.callers, turn.marked == turn.units, turn.scoring_ms) for turn in of_recommend] == [
        (1, True, 2.0),
        (4, True, 2.0),
    ]
    events = sum(turn.units for turn in turns if turn.subject.startswith("event"))
    assert events == sum(len(one.interactions) for one in small_gateway.recorded) - 20 * 3
    assert all(turn.total_ms > 0 and turn.bytes > 0 and not turn.failed for turn in turns)
    shown = path.table(turns)
    assert shown.count("\n| ") == len(turns)
    assert "gateway" in shown.splitlines()[2]
    assert path.plot(turns, stack / "path.png").stat().st_size > 1_000
