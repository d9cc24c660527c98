"""`make test-fast` starts no component: what lies in a folder of stack tests is an integration test."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


@pytest.mark.parametrize("folder", ["integration", "e2e"])
def test_a_stack_test_without_a_mark_is_no_fast_test(folder: str, tmp_path: Path) -> None:
    for name in (folder, "unit"):
        path = tmp_path / "tests" / name / f"test_{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text("def test_it() -> None: ...\n")
    shutil.copy(CONFTEST, tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = integration\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "not integration", "tests"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stdout
    assert [line for line in found.splitlines() if "::" in line] == ["tests/unit/test_unit.py::test_it"]
