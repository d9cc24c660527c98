"""The gate's pair network, m(c) = W2 SiLU(W1 c + b1) + b2, in int8 with error bounds.

Each step's error changes m_p by at most the error's norm times a factor (decision 006). The factor is steepness_p, at
least the Lipschitz constant, for the cosines; ||W2_p|| max|SiLU'| ||W1 - W1~|| for W1's codes; sum_g |W2_pg| for the
activations' codes and SiLU's 32 lines; ||W2_p - W2~_p|| for W2's codes.

Letters: P pairs, L lanes, G hidden width (padded to 16 in arrays).
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.mol_bounds.items import LEVELS, VECTOR, Lanes, bounded
from services.algorithms.scoring.states import PairGate, silu

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]

UNIT = 2.0**-24
_SLOPE = 1.0999  # max |SiLU'|
# SiLU' lies in [-0.0999, 1.0999], so its diagonal matrix is 1/2 plus a matrix of norm at most 0.5999.
_SLOPE_MIDDLE, _SLOPE_SPREAD = 0.5, 0.5999
_SEGMENTS, _SEGMENT_WIDTH, _LOWEST = 32, 0.5, -8.0
_UP = 1 + 2.0**-16  # covers float64 roundings, and the pass's roundings of norms and sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Network:
    """Arrays as in cpu.cpp: hidden (L / 4, G, 4), out (G / 4, L, 4), vectors (G,) or (L,), segments of SiLU (32,)."""

    hidden: Codes
    hidden_corrections: npt.NDArray[np.int32]
    hidden_scales: Floats
    hidden_bias: Floats
    out: Codes
    out_scales: Floats
    out_offsets: Floats
    steepness: Floats
    hidden_rounding: Floats
    out_rounding: Floats
    out_sums: Floats
    segment_values: Floats
    segment_slopes: Floats
    zero: float
    segment_error: float
    reach: float  # the largest of all ||W1_g|| and |b1_g|: |h| <= reach * (||c|| + 1)

    @property
    def hidden_vectors(self) -> int:
        return len(self.hidden_bias) // VECTOR

    @property
    def is_sound(self) -> bool:
        """Whether no array overflowed float32; otherwise the bounds prove nothing."""
        arrays = (getattr(self, field.name) for field in fields(self) if field.name not in ("hidden", "out"))
        return all(bool((np.abs(array) < 1e15).all()) for array in arrays)

    def function_error(self, cosine_norm: Doubles) -> Doubles:
        """An activation's error (B,) before coding, for cosine vectors of at most this norm (B,)."""
        largest_hidden = self.reach * (cosine_norm + 1)
        return np.asarray(self.segment_error + 64 * UNIT * (largest_hidden + 1))


# In the order of cpu.cpp.
NETWORK_ARRAYS = tuple(
    field.name for field in fields(Int8Network) if field.name not in ("zero", "segment_error", "reach")
)


def int8_network(pair_gate: PairGate, lanes: Lanes, turn: float) -> Int8Network:
    """Code the network for cosines in lanes. turn: subtracted from outputs, since the pass measures gates relative to
    it.
    """
    hidden, bias = pair_gate.hidden_weight.astype(np.float64), pair_gate.hidden_bias.astype(np.float64)
    out, offsets = pair_gate.out_weight.astype(np.float64), pair_gate.out_bias.astype(np.float64)
    width = len(bias)
    padded = -(-width // VECTOR) * VECTOR
    hidden_codes, hidden_scales = _coded_rows(hidden)
    out_codes, out_scales = _coded_rows(out)
    hidden_left, out_left = hidden - hidden_codes * hidden_scales[:, None], out - out_codes * out_scales[:, None]
    by_lane = np.zeros((padded, lanes.count), dtype=np.int8)
    by_lane[:width, lanes.of_pair] = hidden_codes
    back = np.zeros((lanes.count, padded), dtype=np.int8)
    back[lanes.of_pair, :width] = out_codes
    out_norms = np.linalg.norm(out, axis=1)
    values, slopes, segment_error = _silu_segments()
    zero = -0.2785 - 2 * segment_error
    sums = np.abs(out_codes * out_scales[:, None]).sum(axis=1)

    def in_hidden(vector: Doubles) -> Floats:
        return np.pad(bounded(vector), (0, padded - width)).astype(np.float32)

    return Int8Network(
        hidden=_quads(by_lane),
        hidden_corrections=-128 * by_lane.sum(axis=1, dtype=np.int32),
        hidden_scales=in_hidden(hidden_scales),
        hidden_bias=in_hidden(bias),
        out=_quads(back),
        out_scales=lanes.spread(out_scales),
        out_offsets=lanes.spread(offsets + zero * (out_codes * out_scales[:, None]).sum(axis=1) - turn),
        steepness=lanes.spread(
            (
                _SLOPE_MIDDLE * np.linalg.norm(out @ hidden, axis=1)
                + _SLOPE_SPREAD * out_norms * np.linalg.norm(hidden, ord=2)
            )
            * _UP
        ),
        hidden_rounding=lanes.spread(_SLOPE * out_norms * np.linalg.norm(hidden_left, ord=2) * _UP),
        out_rounding=lanes.spread(np.linalg.norm(out_left, axis=1) * _UP),
        out_sums=lanes.spread(np.maximum(sums, np.abs(out).sum(axis=1)) * _UP),
        segment_values=values,
        segment_slopes=slopes,
        zero=zero,
        segment_error=segment_error,
        reach=float(max(np.linalg.norm(hidden, axis=1).max(), np.abs(bias).max()) * 1.01),
    )


def _quads(rows: Codes) -> Codes:
    """(n, m) as (m / 4, n, 4)."""
    return np.ascontiguousarray(rows.reshape(len(rows), -1, 4).transpose(1, 0, 2))


def _coded_rows(matrix: Doubles) -> tuple[Doubles, Doubles]:
    reach = np.abs(matrix).max(axis=1, initial=0.0)
    scales = np.where(reach > 0, np.maximum(reach / LEVELS, 1e-30), 1.0).astype(np.float32).astype(np.float64)
    return np.clip(np.rint(matrix / scales[:, None]), -LEVELS, LEVELS), scales


def _silu_segments() -> tuple[Floats, Floats, float]:
    """32 lines a + b h over [-8, 8): values a, slopes b, their largest error. The outer two also cover values
    beyond.
    """
    starts = _LOWEST + _SEGMENT_WIDTH * np.arange(_SEGMENTS, dtype=np.float64)
    ends = starts + _SEGMENT_WIDTH
    slopes = (silu(ends) - silu(starts)) / _SEGMENT_WIDTH
    slopes[0], slopes[-1] = 0.0, 1.0
    slopes = slopes.astype(np.float32).astype(np.float64)
    # Points reach slightly beyond each segment, whose number is computed in float32. Beyond 8, SiLU only approaches its
    # line.
    points: Doubles = starts[:, None] + np.linspace(-1e-5, _SEGMENT_WIDTH + 1e-5, 2001, dtype=np.float64)
    apart = silu(points) - slopes[:, None] * points
    values = ((apart.max(axis=1) + apart.min(axis=1)) / 2).astype(np.float32).astype(np.float64)
    values[0] = values[-1] = 0.0
    # Between grid points SiLU - line moves by less than 1.1 * 0.5 / 4000.
    error = float(np.abs(apart - values[:, None]).max()) + 1.5e-4
    return values.astype(np.float32), slopes.astype(np.float32), error
