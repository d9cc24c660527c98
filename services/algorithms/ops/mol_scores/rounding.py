"""How far a Mixture-of-Logits score computed in floating point can be from its exact value.

The bound is a priori: it follows the formula step by step with the magnitudes of one query and the largest of all
items, so it holds for every item and any order of summation (Higham's gamma_n). Exact search re-evaluates in float64
whatever lies within it. It assumes that exp and SiLU are within 8 units of roundoff (4 in the last place); measured: 2.

Letters: B queries, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.states import PairGate, QueryStates

DoubleArray = npt.NDArray[np.float64]

FLOAT32 = 2.0**-24
FLOAT64 = 2.0**-53
_FUNCTION_UNITS = 8
_SILU_SLOPE = 1.0999  # max |SiLU'|
_SILU_MINIMUM = 0.2785  # max -SiLU
_SECOND_ORDER = 1.01  # products of two relative errors, left out below


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemMagnitudes:
    """The largest values over a catalogue: norms (P_x,) of components, gate (P,) or None, and their width d."""

    norms: DoubleArray
    gate: DoubleArray | None
    width: int


def _gamma(terms: int, unit: float) -> float:
    return terms * unit / (1 - terms * unit)


def cosine_magnitudes(queries: QueryStates, items: ItemMagnitudes) -> DoubleArray:
    """Bound |<f_pq, g_px>| over all items, by Cauchy-Schwarz: (B, P), pair p = p_q * P_x + p_x."""
    query_norms = np.linalg.norm(queries.components.astype(np.float64), axis=-1)
    pairs = query_norms.shape[1] * len(items.norms)
    return np.asarray((query_norms[:, :, None] * items.norms).reshape(len(queries), pairs))


def error_bounds(
    queries: QueryStates, items: ItemMagnitudes, pair_gate: PairGate | None, *, unit: float
) -> DoubleArray:
    """Bound |computed s - exact s| over all items when the formula runs with unit roundoff `unit`: (B,)."""
    cosine = cosine_magnitudes(queries, items)
    num_pairs = cosine.shape[1]
    cosine_error = _gamma(items.width, unit) * cosine
    if num_pairs == 1:
        return np.asarray(cosine_error[:, 0] * _SECOND_ORDER)
    function_error = _FUNCTION_UNITS * unit
    gate = np.zeros_like(cosine)
    gate_error = np.zeros_like(cosine)
    if pair_gate is not None:
        w1, b1, w2, b2 = (
            np.abs(array.astype(np.float64))
            for array in (
                pair_gate.hidden_weight,
                pair_gate.hidden_bias,
                pair_gate.out_weight,
                pair_gate.out_bias,
            )
        )
        hidden = cosine @ w1.T + b1
        hidden_error = cosine_error @ w1.T + _gamma(num_pairs + 1, unit) * hidden
        active = np.maximum(hidden, _SILU_MINIMUM)
        active_error = _SILU_SLOPE * hidden_error + function_error * active
        gate = active @ w2.T + b2
        gate_error = active_error @ w2.T + _gamma(len(b1) + 1, unit) * gate
    if queries.gate is not None and items.gate is not None:
        gate = gate + np.abs(queries.gate.astype(np.float64)) * items.gate
    gate_error = gate_error + 3 * unit * gate
    logit = np.maximum(gate, _SILU_MINIMUM)
    logit_error = _SILU_SLOPE * gate_error + function_error * logit
    # Softmax: subtracting the maximum rounds once, exp is a relative error, i.e. one more error of the logit.
    largest_logit_error = logit_error.max(axis=1) + 2 * unit * logit.max(axis=1) + function_error
    # s = sum pi c has |ds| <= max |dlogit| * E|c - s|, and E|c - s| <= C for |c| <= C.
    largest_cosine = cosine.max(axis=1)
    total = (
        largest_cosine * largest_logit_error
        + cosine_error.max(axis=1)
        + _gamma(2 * num_pairs + 4, unit) * largest_cosine
    )
    return np.asarray(total * _SECOND_ORDER)
