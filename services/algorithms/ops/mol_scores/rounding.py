"""A bound on the floating-point error of a Mixture-of-Logits score.

The bound follows the formula step by step with one query's magnitudes and the largest magnitudes of all items. So it
holds for every item and order of summation (Higham's gamma_n), in the kernel and in BLAS. Vectors are bounded by
Euclidean norms,
matrices by spectral norms: with c the P cosines and M_p = ||f|| ||g|| their magnitudes,

    ||c|| <= C = ||F|| ||G||_F                       ||dc|| <= gamma_d ||M||
    ||z|| <= Z = ||W1|| C + ||b1||                   ||dz|| <= ||W1|| ||dc|| + gamma_P+1 (||W1||_F C + ||b1||)
    ||h|| <= Z                                       ||dh|| <= max |SiLU'| ||dz|| + units Z
    |g_p| <= A_p = ||W2_p|| Z + |b2_p| + |q_p x_p|   |dg_p| <= ||W2_p|| ||dh|| + gamma_G+1 (A_p - |q_p x_p|) + 3 u A_p

and so on through the softmax. Bounds by sums of absolute values would be 1.3 times as large at a trained 4x2x32 gate
and 1.8 times at 8x4x64. This bound is 1e-4 and 4e-4; observed errors are 1e-7, but unproven. exp and SiLU must be
within 8 units of roundoff; vector.hpp states 4 and 6. Below exp(-87.3) weights saturate; 1e-35 covers this and denormal
numbers.

Letters: B queries, P_x item components, P pairs, d component width, G gate hidden width.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import PairGate, QueryStates

DoubleArray = npt.NDArray[np.float64]

FLOAT32 = 2.0**-24
FLOAT64 = 2.0**-53
# Every term is at most proportional to the unit, so this much of a float32 bound holds for float64.
FLOAT64_PER_FLOAT32 = FLOAT64 / FLOAT32
_FUNCTION_UNITS = 8
_SILU_SLOPE = 1.0999  # max |SiLU'|
_SECOND_ORDER = 1.01  # covers products of two relative errors
_ABSOLUTE = 1e-35


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemMagnitudes:
    """Largest magnitudes over a catalogue: norms (P_x,) of components, and gate (P,) or None. width: d."""

    norms: DoubleArray
    gate: DoubleArray | None
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _NetworkNorms:
    """The pair gate's norms: W1's spectral and Frobenius norms, the norms of b1 and of W2's rows (P,), |b2| (P,); and
    G.
    """

    hidden: float
    hidden_frobenius: float
    hidden_bias: float
    out: DoubleArray
    out_bias: DoubleArray
    hidden_width: int


@lru_cache(maxsize=16)
def _network_norms(gate: PairGate) -> _NetworkNorms:
    """Cached, because every search needs a spectral norm, which takes a millisecond for 128 x 64."""
    hidden = gate.hidden_weight.astype(np.float64)
    return _NetworkNorms(
        hidden=float(np.linalg.norm(hidden, ord=2)),
        hidden_frobenius=float(np.linalg.norm(hidden)),
        hidden_bias=float(np.linalg.norm(gate.hidden_bias.astype(np.float64))),
        out=np.linalg.norm(gate.out_weight.astype(np.float64), axis=1),
        out_bias=np.abs(gate.out_bias.astype(np.float64)),
        hidden_width=len(hidden),
    )


def _gamma(terms: int, unit: float) -> float:
    return terms * unit / (1 - terms * unit)


def cosine_magnitudes(queries: QueryStates, items: ItemMagnitudes) -> DoubleArray:
    """Bound |<f_pq, g_px>| over all items, by Cauchy-Schwarz: (B, P), pair p = p_q * P_x + p_x."""
    query_norms = np.linalg.norm(queries.components.astype(np.float64), axis=-1)
    pairs = query_norms.shape[1] * len(items.norms)
    return np.asarray((query_norms[:, :, None] * items.norms).reshape(len(queries), pairs))


def cosine_errors(queries: QueryStates, items: ItemMagnitudes) -> DoubleArray:
    """Bound the error of a cosine of float32 vectors, for any order of summation and all items: (B, P)."""
    return np.asarray((items.width + 1) * FLOAT32 * cosine_magnitudes(queries, items) * 1.01)


def error_bounds(
    queries: QueryStates, items: ItemMagnitudes, pair_gate: PairGate | None, *, unit: float
) -> DoubleArray:
    """Bound |computed s - exact s| over all items when the formula runs with unit roundoff `unit`: (B,)."""
    cosine = cosine_magnitudes(queries, items)
    num_queries, num_pairs = cosine.shape
    largest_cosine = cosine.max(axis=1)
    largest_cosine_error = _gamma(items.width, unit) * largest_cosine
    if num_pairs == 1:
        return np.asarray(largest_cosine_error * _SECOND_ORDER + _ABSOLUTE)
    function_error = _FUNCTION_UNITS * unit
    gate = np.zeros((num_queries, num_pairs))
    gate_error = np.zeros((num_queries, num_pairs))
    if pair_gate is not None:
        network = _network_norms(pair_gate)
        cosines, cosines_error = _cosine_norms(queries, items, cosine, unit)
        hidden = network.hidden * cosines + network.hidden_bias
        hidden_error = network.hidden * cosines_error + _gamma(num_pairs + 1, unit) * (
            network.hidden_frobenius * cosines + network.hidden_bias
        )
        active_error = _SILU_SLOPE * hidden_error + function_error * hidden
        gate = hidden[:, None] * network.out + network.out_bias
        gate_error = active_error[:, None] * network.out + _gamma(network.hidden_width + 1, unit) * gate
    if queries.gate is not None and items.gate is not None:
        gate = gate + np.abs(queries.gate.astype(np.float64)) * items.gate
    # |SiLU(g)| <= |g|, so `gate` bounds the logits too.
    logit_error = _SILU_SLOPE * (gate_error + 3 * unit * gate) + function_error * gate
    # In softmax, subtracting the maximum rounds once; exp's relative error adds to the logit's error.
    largest_logit_error = logit_error.max(axis=1) + 2 * unit * gate.max(axis=1) + function_error
    # s = sum pi c has |ds| <= max |dlogit| * E|c - s|, and E|c - s| <= C for |c| <= C.
    total = (
        largest_cosine * largest_logit_error + largest_cosine_error + _gamma(2 * num_pairs + 4, unit) * largest_cosine
    )
    return np.asarray(total * _SECOND_ORDER + _ABSOLUTE)


def _cosine_norms(
    queries: QueryStates, items: ItemMagnitudes, cosine: DoubleArray, unit: float
) -> tuple[DoubleArray, DoubleArray]:
    """Bounds over all items of ||c||, the norm of the P cosines, and of the norm of their errors, (B,) each."""
    components = queries.components.astype(np.float64)
    # The cosines are the matrix F G': its Frobenius norm is at most ||F|| ||G||_F.
    spectral = np.sqrt(np.linalg.eigvalsh(components @ components.transpose(0, 2, 1))[:, -1].clip(min=0))
    return spectral * np.linalg.norm(items.norms), _gamma(items.width, unit) * np.linalg.norm(cosine, axis=1)
