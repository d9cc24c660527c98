"""ONNX Runtime keeps no device id and no figures for its maker where Freshet loads it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GRAPH = ROOT / "tests" / "golden" / "d00231b" / "mixture" / "encoder.onnx"
ENCODE = f"""
from pathlib import Path
from services.encoder.adapters.in_process import InProcessEncoder
InProcessEncoder(Path({str(GRAPH)!r}), None, max_history=8, cache_bytes=0).check()
"""


def test_encoding_leaves_nothing_in_the_home_folder(tmp_path: Path) -> None:
    # Nothing of this environment: ONNX Runtime keeps quiet by itself where it finds variables of a CI system.
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", ENCODE], env=environment, cwd=tmp_path, check=True, timeout=120)
    assert list(tmp_path.rglob("*")) == []
