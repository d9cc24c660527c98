"""Arithmetic whose bits depend only on the numbers: not on batch size, BLAS or instruction set.

A float matrix product adds in an order that depends on shape and library. So factors are multiples of powers of two,
with so few bits that every partial sum fits float64's 53 bits and nothing is rounded. The exponential consists of
single IEEE operations.
"""

import math

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

MANTISSA_BITS = 53
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # the high part ends in 21 zero bits
_TAYLOR = tuple(1 / math.factorial(power) for power in range(12, -1, -1))
_UNDERFLOW = -700.0


def to_multiples(values: npt.NDArray[np.floating], bits: int) -> Doubles:
    """Round to the nearest multiple of 2**-bits, ties to even, in float64."""
    scaled = np.ldexp(values.astype(np.float64), bits)
    return np.asarray(np.ldexp(np.rint(scaled, out=scaled), -bits))


def spare_bits(largest_sum: float, used: int) -> int:
    """The most fractional bits that a factor may have so that sums are exact.

    largest_sum: bounds the sum of absolute products. used: the other factor's fractional bits.
    """
    return MANTISSA_BITS - 1 - used - max(0, math.ceil(math.log2(max(largest_sum, 1.0))))


def exp_of_negative(x: Doubles) -> Doubles:
    """e**x for x <= 0 within 2e-16, from single IEEE operations; 0 for x below -700."""
    power = np.rint(x * _LOG2_E)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    result = np.full_like(rest, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        result *= rest
        result += coefficient
    out = np.ldexp(result, np.maximum(power, -1100).astype(np.int32))
    return np.asarray(np.where(x < _UNDERFLOW, 0.0, out))


def silu(x: Doubles) -> Doubles:
    small = exp_of_negative(-np.abs(x))
    return np.asarray(x * np.where(x >= 0, 1.0, small) / (1.0 + small))
