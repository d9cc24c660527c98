"""exp and SiLU of native/vector.hpp against extended precision, over the whole range of float32."""

import ctypes

import numpy as np
import pytest
from native_builds import native_builds

from services.algorithms.native import INSTRUCTION_SETS, address

EXP_NOT_POSITIVE, EXP_SATURATED, SILU = 0, 1, 2
UNIT = 2.0**-24
LIMIT = np.float32(87.3)


def evaluate(instruction_set: str, function: int, values: np.ndarray) -> np.ndarray:
    builds = native_builds("mol_scores")
    if instruction_set not in builds:
        pytest.skip(f"this processor lacks {instruction_set}")
    out = np.empty_like(values)
    builds[instruction_set].freshet_elementwise(
        ctypes.c_int(function), address(values), ctypes.c_int64(len(values)), address(out)
    )
    return out


def values() -> np.ndarray:
    """A fine grid, normal values, and random bit patterns (every exponent, denormal ones included), all finite."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, size=1_000_000, dtype=np.uint32).view(np.float32)
    grid = np.linspace(-90, 90, 1_000_001).astype(np.float32)
    found = np.concatenate([grid, rng.normal(size=500_000).astype(np.float32), patterns])
    return found[np.isfinite(found)]


every_build = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)


@every_build
def test_exp_is_within_four_units(instruction_set: str) -> None:
    x = values()
    x = x[np.abs(x) <= LIMIT]
    exact = np.exp(x.astype(np.longdouble))
    found = evaluate(instruction_set, EXP_SATURATED, x)
    assert np.abs(found / exact - 1).max() <= 4 * UNIT
    negative = x <= 0
    assert (evaluate(instruction_set, EXP_NOT_POSITIVE, x[negative]) == found[negative]).all()


@every_build
def test_exp_saturates_instead_of_overflowing(instruction_set: str) -> None:
    x = values()
    found = evaluate(instruction_set, EXP_SATURATED, np.append(x, [np.inf, -np.inf]).astype(np.float32))
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert (found[:-2][x > LIMIT] == found[-2]).all()
    assert (found[:-2][x < -LIMIT] == found[-1]).all()
    assert found[-1] < 2e-38
    assert (evaluate(instruction_set, EXP_NOT_POSITIVE, x[x < -LIMIT]) == found[-1]).all()


@every_build
def test_silu_is_within_six_units(instruction_set: str) -> None:
    x = values()
    x = x[(x >= -LIMIT) & (np.abs(x) >= 1e-37)]  # below, x / 2 is itself denormal
    wide = x.astype(np.longdouble)
    exact = wide / (1 + np.exp(-wide))
    assert np.abs(evaluate(instruction_set, SILU, x) / exact - 1).max() <= 6 * UNIT


@every_build
def test_silu_far_out_is_the_identity_or_nothing(instruction_set: str) -> None:
    x = values()
    found = evaluate(instruction_set, SILU, x)
    assert np.isfinite(found).all()
    assert (found[x > LIMIT] == x[x > LIMIT]).all()
    assert np.abs(found[x < -LIMIT]).max() <= 2e-36
    tiny = np.abs(x) < 1e-37
    assert np.abs(found[tiny] - x[tiny] / 2).max() <= 1e-44


@every_build
def test_a_length_that_is_no_multiple_of_the_lanes_is_served(instruction_set: str) -> None:
    x = np.linspace(-3, 3, 64).astype(np.float32)
    whole = evaluate(instruction_set, SILU, x)
    for size in (0, 1, 3, 15, 17, 63):
        assert (evaluate(instruction_set, SILU, x[:size].copy()) == whole[:size]).all()
