"""What the operating system says of a local stack's processes; here the one process is this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest import machine


def test_the_processes_of_a_stack_are_those_that_it_notes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "gateway.json").write_text(json.dumps({"pid": os.getpid()}))
    assert machine.processes(tmp_path) == {"gateway": os.getpid()}
    assert machine.resident(os.getpid()) > 10_000_000
    with pytest.raises(ValueError, match="names no running stack"):
        machine.processes(tmp_path / "elsewhere")


def test_what_a_process_started_counts_with_it() -> None:
    memory = machine.resident(os.getpid())
    stands = "print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", stands], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"1"
        assert machine.resident(os.getpid()) > memory + (2 << 20)
        child.communicate(b"\n")
