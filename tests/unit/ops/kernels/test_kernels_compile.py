"""The kernels compile for an H100/H200 at the papers' shapes, though no card is here: types, sizes, shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

SHARED_BYTES = 227 << 10  # what a program may have on that card


def test_every_kernel_compiles_for_hopper_and_fits_its_shared_memory(tmp_path: Path) -> None:
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | settings
    program = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    names = {kernel["name"] for kernel in found}
    assert names == {
        "ml-20m",
        "books",
        "books-rows",
        "nq320k",
        "nq320k-cosines",
        "maxima",
        "collect",
        "collect-values",
    }
    for kernel in found:
        assert kernel["shared"] <= SHARED_BYTES, kernel
        assert kernel["wgmma"] == (kernel["name"] != "collect-values"), kernel
        scores = not any(part in kernel["name"] for part in ("cosines", "maxima", "collect"))
        assert kernel["tanh"] == scores, kernel


def test_what_a_card_is_to_be_asked_runs(tmp_path: Path) -> None:
    """A training to its end, and modules that import: what a lent card must not be wasted on."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 12, 400, dtype=np.uint16), rng.integers(0, 30, 400, dtype=np.uint16)
    steps, events = rng.integers(0, 9_000, 400), tmp_path / "events.npz"
    np.savez(events, users=users, items=items, steps=steps, name=np.array("made"))
    options = f"- train {events} --device cpu --epochs 2 --seconds 60 --checkpoint {tmp_path}/kept".split()
    code = f"from tests.gpu import training, updates; import sys; sys.argv = {options}; training.main()"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path.cwd()), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all 2 epochs" in done.stdout
    assert "SUMMARY best by validation: mol" in done.stdout
