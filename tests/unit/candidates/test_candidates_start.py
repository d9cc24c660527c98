"""How the candidates process starts, or refuses to: settings, memory, the bundle."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from retrieval_scene import make_bundle

from services.algorithms.indexes.mutable.snapshot import snapshots, write_snapshot
from services.algorithms.items.catalogue import required_bytes
from services.candidates.bootstrap import Live, opened
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.platform.config import ConfigError, load_settings
from services.platform.machine import require_memory
from services.platform.request_context import OFF
from services.platform.rpc.server import HealthState


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FRESHET_CANDIDATES_ALGORITHMS", "magic"),
        ("FRESHET_CANDIDATES_ALGORITHMS", "top_k_avg"),
        ("FRESHET_CANDIDATES_ALGORITHMS", "brute_force brute_force"),
        ("FRESHET_CANDIDATES_ALGORITHMS", " "),
        ("FRESHET_CANDIDATES_AUDIT_SHARE", "1.5"),
        ("FRESHET_CANDIDATES_MAX_MEMORY_MB", "-1"),
        ("FRESHET_CANDIDATES_PORT", "70000"),
        ("FRESHET_COMPUTE_THREADS", "0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"{variable}='{value}' allowed"):
        load_settings(CandidatesSettings)


def test_no_memory_for_the_model_ends_the_process_with_one_line(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", count=12000)
    environment = {**os.environ, "FRESHET_BUNDLE": str(bundle.path), "FRESHET_CANDIDATES_MAX_MEMORY_MB": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "services.candidates"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1
    (line,) = run.stderr.strip().splitlines()
    assert f"not enough memory for the bundle at {bundle.path}" in line
    assert f"12000 items needs {required_bytes(bundle.manifest) / (1 << 20):.1f} MiB" in line
    assert "allowed: 1.0 MiB (FRESHET_CANDIDATES_MAX_MEMORY_MB=1)" in line


def test_what_fits_passes_and_what_does_not_names_its_source() -> None:
    require_memory("a model", 1000, limit_mb=0, variable="X")
    with pytest.raises(MemoryError, match=r"a model needs 1099511627776\.0 MiB; .* \(what is available here\)"):
        require_memory("a model", 1 << 60, limit_mb=0, variable="X")


def snapshotting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object], **fields: Any) -> Any:
    """A service whose snapshot's writing begins with `wait`."""

    def write(*arguments: Any, **of: Any) -> Path:
        wait()
        return write_snapshot(*arguments, **of)

    monkeypatch.setattr("services.algorithms.items.live_catalogue.write_snapshot", write)
    monkeypatch.setattr(
        "services.candidates.bootstrap.CandidatesMetrics", lambda: CandidatesMetrics(CollectorRegistry())
    )
    settings = CandidatesSettings(
        port=0, metrics_port=0, bundle=make_bundle(tmp_path / "bundle").path,
        algorithms="quantized_tangents(50)", snapshots=str(tmp_path / "snapshots"), **fields,
    )  # fmt: skip
    return opened(settings, HealthState(), OFF)


async def test_a_stop_waits_for_the_snapshot_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with snapshotting(tmp_path, monkeypatch, partial(time.sleep, 0.3), follows_topics=False):
        pass
    assert len(snapshots(tmp_path / "snapshots")) == 1


async def test_a_follower_that_gave_a_snapshot_up_does_not_keep_a_process_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Follower:
        """Its stop has waited ten seconds for a disk that does not write."""

        def __init__(self, live: Live) -> None:
            assert live.snapshots is not None
            self.start = partial(live.snapshots.look, 0)
            self.stop, self.applied_in = bool, str

    monkeypatch.setattr("services.candidates.bootstrap.make_follower", lambda _, live, *rest: (Follower(live), []))
    released = threading.Event()
    service = snapshotting(tmp_path, monkeypatch, released.wait)
    _, live = await service.__aenter__()
    try:
        await asyncio.wait_for(service.__aexit__(None, None, None), timeout=10)
        assert not snapshots(tmp_path / "snapshots")
    finally:
        released.set()
        live.snapshots.close()
