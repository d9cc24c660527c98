"""What a card is asked first (docs/decisions/010-gpu.md): is the error model's view of it right, is the kernel's shape.

The error model assumes how far `tanh.approx`, `exp2` and matrix products err. The kernel runs with two programs per
multiprocessor and computes the norm of the hidden values; both could be otherwise. With `TRITON_INTERPRET=1` and
`--device cpu` only the path is tried: then the functions are the interpreter's.
"""

# ruff: noqa: T201
# Kernels are Triton's language, not Python's types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from services.algorithms.indexes.protocol import take_queries
from services.algorithms.ops.mol_scores import fused, kernel
from services.algorithms.ops.mol_scores.device import DeviceQueries, DeviceScorer
from services.algorithms.ops.mol_scores.device_top_k import exact_answer
from services.algorithms.ops.mol_scores.kernel_error import _SUM, _TANH
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import Scene, shape_named
from services.offline.evaluation.gpu.rates import cuda_events, wall_clock

_EXP2 = 2.0**-20  # as `kernel_error.py` says
_BLOCK = 1024
# The line of the kernel that costs a sum of squares; without it only the time is looked at.
_SQUARES = "gate_error += tl.load(term + 3) * tl.sqrt(tl.sum(hidden * hidden, axis=1))"


@triton.jit
def _functions(values, tanhs, powers, SIZE: tl.constexpr, FAST: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(values + place)
    if FAST:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [value], tl.float32, is_pure=True, pack=1)
    else:
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * value)) - 1.0
    tl.store(tanhs + place, tanh)
    tl.store(powers + place, tl.exp2(-value))


@triton.jit
def _product(left, right, out, K: tl.constexpr, SIZE: tl.constexpr):
    row, inner = tl.arange(0, SIZE), tl.arange(0, K)
    a = tl.load(left + row[:, None] * K + inner[None, :])
    b = tl.load(right + inner[:, None] * SIZE + row[None, :])
    tl.store(out + row[:, None] * SIZE + row[None, :], tl.dot(a, b, tl.zeros((SIZE, SIZE), dtype=tl.float32)))


def _against(name: str, found: float, assumed: float) -> str:
    verdict = "as assumed" if found <= assumed else "LARGER THAN ASSUMED: certificates may be wrong"
    return f"SUMMARY {name}: 2^{np.log2(max(found, 1e-30)):.2f}, assumed 2^{np.log2(assumed):.2f}: {verdict}"


def functions(device: torch.device) -> None:
    """Largest relative errors of tanh on [2^-14, 16] and exp2 on [-60, 0], by float64."""
    count = (1 << 24) if device.type == "cuda" else 4 * _BLOCK
    exponents = torch.linspace(-14 if device.type == "cuda" else 0, 4, count, dtype=torch.float64)
    for name, values, place, exact, assumed in (
        ("tanh.approx", 2.0**exponents, 0, torch.tanh, _TANH),
        ("exp2", torch.linspace(0, 60, count, dtype=torch.float64), 1, lambda x: torch.exp2(-x), _EXP2),
    ):
        given = values.float().to(device)
        found = [torch.full_like(given, torch.nan) for _ in range(2)]
        _functions[(count // _BLOCK,)](given, *found, SIZE=_BLOCK, FAST=device.type == "cuda")
        wanted = exact(given.double())
        error = ((found[place].double() - wanted) / wanted).abs()
        at = int(error.argmax())
        assert not bool(torch.isnan(error).any()), f"{name} left values out"
        print(
            _against(
                f"{name}, error relative to its value, largest at {float(given[at]):.6g}", float(error[at]), assumed
            )
        )


def products(device: torch.device) -> None:
    """Largest error of a matrix product of float16 over K terms, relative to the sum of their magnitudes."""
    generator = torch.Generator().manual_seed(0)
    for terms in (32, 128):
        worst = 0.0
        for _ in range(64 if device.type == "cuda" else 1):
            left, right = (
                torch.randn(shape, generator=generator).mul(2.0 ** torch.randint(-6, 7, shape, generator=generator))
                for shape in ((64, terms), (terms, 64))
            )
            left, right = left.half().to(device), right.half().to(device)
            out = torch.full((64, 64), torch.nan, device=device)
            _product[(1,)](left, right, out, K=terms, SIZE=64)
            magnitude = left.double().abs() @ right.double().abs()
            worst = max(worst, float(((out.double() - left.double() @ right.double()).abs() / magnitude).max()))
        print(_against(f"sum of {terms} products, error relative to their magnitudes", worst, (terms + 4) * _SUM))


class _Variant:
    """A kernel launched with other options, which remembers what was compiled."""

    def __init__(self, launched: Any, options: dict[str, int]) -> None:
        self._launched, self._options = launched, options
        self.compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.compiled = self._launched[grid](*args, **{**options, **self._options})

        return launch


@contextmanager
def _launched_as(variant: _Variant, tile: int):
    before = fused.mol_scores_kernel, fused.TILE
    fused.mol_scores_kernel, fused.TILE = variant, tile
    try:
        yield
    finally:
        fused.mol_scores_kernel, fused.TILE = before


def _without_squares() -> ModuleType:
    """`kernel.py` whose first bound on the hidden values costs nothing; Triton wants a file to read it from."""
    source = Path(kernel.__file__).read_text(encoding="utf-8")
    assert source.count(_SQUARES) == 1, "kernel.py no longer has the line that is to be left out"
    path = Path(tempfile.mkdtemp()) / "kernel_without_squares.py"
    path.write_text(source.replace(_SQUARES, "gate_error += tl.load(term + 3)"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variants(scorer: DeviceScorer, prepared: DeviceQueries) -> None:
    """Milliseconds of the pass over everything, by how the kernel is launched and compiled."""
    clock = cuda_events if scorer.device.type == "cuda" else wall_clock
    plain, leaner = kernel.mol_scores_kernel, _without_squares().mol_scores_kernel
    for name, launched, tile, options in (
        ("as it is", plain, 64, {}),
        ("three programs per multiprocessor (168 registers)", plain, 64, {"maxnreg": 168}),
        ("one stage", plain, 64, {"num_stages": 1}),
        ("three stages", plain, 64, {"num_stages": 3}),
        ("eight warps", plain, 64, {"num_warps": 8}),
        ("tiles of 128 items, eight warps", plain, 128, {"num_warps": 8}),
        ("without the sum of squares", leaner, 64, {}),
        ("without it, three programs", leaner, 64, {"maxnreg": 168}),
        ("as it is, again", plain, 64, {}),
    ):
        variant = _Variant(launched, options)
        try:
            with _launched_as(variant, tile):
                timed = statistics.median(clock(lambda _: scorer.bounds(prepared, grouped=True), 8))
            found = [f"{field} {getattr(variant.compiled, field, None)}" for field in ("n_regs", "n_spills")]
            shared = getattr(getattr(variant.compiled, "metadata", None), "shared", None)
            print(f"SUMMARY kernel {name}: {timed:.3f} ms, {', '.join(found)}, shared {shared}", flush=True)
        except Exception as error:
            print(f"SUMMARY kernel {name}: failed: {type(error).__name__}: {str(error)[:200]}", flush=True)


def looser(scorer: DeviceScorer, prepared: DeviceQueries, scene: Scene) -> None:
    """Items left for float64 in a top 100, with the hidden values' norm and with ||W1|| ||c|| + ||b1|| for it."""
    gate = scene.pair_gate
    assert gate is not None
    errors = prepared.errors.clone()
    errors[:, 1] += errors[:, 3] * 0.5 * float(np.linalg.norm(gate.hidden_bias))
    errors[:, 2] += errors[:, 3] * 0.5 * float(np.linalg.norm(gate.hidden_weight, 2))
    errors[:, 3] = 0
    ranks = torch.arange(scorer.num_items, device=scorer.device)
    k = min(100, scorer.num_items // 4)
    for name, queries in (("the norm", prepared), ("its bound", replace(prepared, errors=errors))):
        capacity = min(16_384, scorer.num_items)
        left = exact_answer(scorer, queries, ranks, None, None, k=k, capacity=capacity).evaluated.double()
        print(f"SUMMARY float64 with {name}: {float(left.mean()):.0f} items a query, most {float(left.max()):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    functions(device)
    products(device)
    count, queries = (None, 32) if device.type == "cuda" else (400, 2)
    scene = generate(shape_named("books"), num_items=count, num_queries=queries, seed=0)
    scorer = DeviceScorer(scene.items, scene.pair_gate, device=device, kernels=True)
    prepared = scorer.prepare(take_queries(scene.queries, 0, queries))
    assert prepared.fused
    looser(scorer, prepared, scene)
    variants(scorer, prepared)


if __name__ == "__main__":
    main()
