"""Runs a load test in a process of its own, as `freshet loadtest` does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def loadtest(scenario: str, port: int, items: Path, *more: object) -> subprocess.CompletedProcess[str]:
    """Run a scenario against a gateway on loopback; its results go beside the items."""
    command = [sys.executable, "-m", "loadtest", scenario, "--target", f"127.0.0.1:{port}", "--items", str(items)]
    command += ["--output", str(items.parent / "out"), *map(str, more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def summary_of(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the summary, the last line of the output."""
    assert finished.stdout, finished.stderr
    summary: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return summary
