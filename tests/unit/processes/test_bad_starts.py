"""Every process that cannot start says why on one line, naming both values, and ends with status 1."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from retrieval_scene import make_bundle

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.items.catalogue import required_bytes
from services.contracts.processes import PROCESSES


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle").path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def refusal(process: str, bundle: Path, program: Sequence[str] = (), **environment: object) -> str:
    """The one line that the process leaves behind."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")}
    own = {"FRESHET_BUNDLE": bundle, "FRESHET_METRICS_PORT": 0, f"FRESHET_{process.upper()}_PORT": 0} | environment
    done = subprocess.run(
        [sys.executable, *(program or ("-m", f"services.{process}"))],
        env=kept | {name: str(value) for name, value in own.items()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"freshet {process}: ")
    return line


@pytest.mark.parametrize("process", PROCESSES)
def test_a_wrong_checksum_is_refused_with_both(process: str, bundle: Path) -> None:
    states = bundle / "item_states.safetensors"
    content = bytearray(states.read_bytes())
    content[-1] ^= 1
    states.write_bytes(content)
    line = refusal(process, bundle)
    listed = json.loads((bundle / "manifest.json").read_text())["files"]["item_states.safetensors"]["sha256"]
    assert "item_states.safetensors has sha256" in line
    assert listed in line


def test_other_shapes_are_refused_with_both(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"num_items": 61}))
    line = refusal("reranker", bundle)
    assert "(60, 2, 8)" in line
    assert "(61, 2, 8)" in line


@pytest.mark.parametrize("process", PROCESSES)
def test_a_taken_port_is_named_with_its_owner(process: str, bundle: Path, taken_port: int) -> None:
    line = refusal(process, bundle, **{f"FRESHET_{process.upper()}_PORT": taken_port})
    assert f"port {taken_port} on 127.0.0.1 (gRPC) is taken: held by" in line
    assert f"(pid {os.getpid()})" in line


def test_a_taken_metrics_port_is_named_too(bundle: Path, taken_port: int) -> None:
    line = refusal("gateway", bundle, FRESHET_METRICS_PORT=taken_port)
    assert f"port {taken_port} on 127.0.0.1 (metrics) is taken: held by" in line


def test_a_model_without_memory_is_refused_with_need_and_limit(tmp_path: Path) -> None:
    large = make_bundle(tmp_path / "large", count=12000).path
    line = refusal("reranker", large, FRESHET_RERANKER_MAX_MEMORY_MB=1)
    needed = required_bytes(load_bundle(large).manifest) / (1 << 20)
    assert f"12000 items needs {needed:.1f} MiB" in line
    assert "allowed: 1.0 MiB (FRESHET_RERANKER_MAX_MEMORY_MB=1)" in line


OUT_OF_MEMORY = """
from services.platform.config import ProcessSettings
from services.platform.process import run_process

async def run(settings):
    raise MemoryError("unable to allocate 64 GiB")

raise SystemExit(run_process("encoder", ProcessSettings, run))
"""


def test_memory_that_runs_out_while_loading_is_said_in_one_line(tmp_path: Path) -> None:
    line = refusal("encoder", tmp_path / "large", ["-c", OUT_OF_MEMORY])
    assert line.endswith(f"not enough memory for the bundle at {tmp_path / 'large'}: unable to allocate 64 GiB")


def test_a_bundle_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal("gateway", tmp_path / "nowhere")
