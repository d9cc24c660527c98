"""What a card is asked first (docs/decisions/010-gpu.md): is the error model's view of it right, is the kernel's shape.

The error model assumes how far `tanh.approx`, `exp2` and matrix products err. The kernel runs with two programs per
multiprocessor and three stages; both could be otherwise. With `TRITON_INTERPRET=1` and
`--device cpu` only the path is tried: then the functions are the interpreter's.
"""

# ruff: noqa: T201
# Kernels are Triton's language, not Python's types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import argparse
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from services.algorithms.indexes.protocol import take_queries
from services.algorithms.ops.mol_scores import fused, kernel
from services.algorithms.ops.mol_scores.device import DeviceQueries, DeviceScorer
from services.algorithms.ops.mol_scores.kernel_error import _SUM, _TANH
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import shape_named
from services.offline.evaluation.gpu.rates import cuda_events, wall_clock

_EXP2 = 2.0**-20  # as `kernel_error.py` says
_BLOCK = 1024


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


def variants(scorer: DeviceScorer, prepared: DeviceQueries) -> None:
    """Milliseconds of the pass over everything, by how the kernel is launched and compiled."""
    clock = cuda_events if scorer.device.type == "cuda" else wall_clock
    plain = kernel.mol_scores_kernel
    for name, tile, options in (
        ("unchanged", 64, {}),
        ("three programs per multiprocessor (168 registers)", 64, {"maxnreg": 168}),
        ("one stage", 64, {"num_stages": 1}),
        ("two stages", 64, {"num_stages": 2}),
        ("four stages", 64, {"num_stages": 4}),
        ("tiles of 128 items, eight warps", 128, {"num_warps": 8}),
        ("unchanged, again", 64, {}),
    ):
        variant = _Variant(plain, options)
        try:
            with _launched_as(variant, tile):
                timed = statistics.median(clock(lambda _: scorer.bounds(prepared, grouped=True), 8))
            found = [f"{field} {getattr(variant.compiled, field, None)}" for field in ("n_regs", "n_spills")]
            shared = getattr(getattr(variant.compiled, "metadata", None), "shared", None)
            print(f"SUMMARY kernel {name}: {timed:.3f} ms, {', '.join(found)}, shared {shared}", flush=True)
        except Exception as error:
            print(f"SUMMARY kernel {name}: failed: {type(error).__name__}: {str(error)[:200]}", flush=True)


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
    variants(scorer, prepared)


if __name__ == "__main__":
    main()
