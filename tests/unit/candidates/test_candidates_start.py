"""How the candidates process starts, or refuses to: settings, memory, the bundle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from retrieval_scene import make_bundle

from services.algorithms.items.catalogue import required_bytes
from services.candidates.config import CandidatesSettings
from services.platform.config import ConfigError, load_settings
from services.platform.memory import require_memory


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
