"""An upper bound on s of every item whose component cosines are below t_p: TopKPerEmbedding's certificate.

s = sum w_p c_p / sum w_p with w_p = exp(SiLU(z_p)), so s <= max_p t_p (arXiv:2407.15462, section 3.1; its Theorem 2 as
printed is no bound, see the tests). A tighter bound: an omitted item's w_p lies in an interval that follows from the
query, the extremes of the item gates, and the pair network's range over possible cosines. The largest mixture of t_p
over these intervals is a fractional program. Its solution gives the j largest t_p the highest weights and the others
the lowest, for the best j. Because weights share a denominator, it is at least as tight as a knapsack over intervals of
the softmax.

Bounds include their own float64 rounding errors; the caller adds the far larger float32 errors of t_p.

Letters: B queries, P component pairs, G hidden width.
"""

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.protocol import Scores
from services.algorithms.ops.mol_scores import MolScorer, rounding
from services.algorithms.scoring.states import QueryStates, silu

DoubleArray = npt.NDArray[np.float64]

# SiLU's minimum: position and value, rounded outwards.
_SILU_MINIMUM_AT, _LOWEST = -1.2784645427610738, -0.2784645427610739
_TINY = 1e-290
_SLACK = 1e-12  # relative allowance for float64 rounding, enough for P and G in the thousands


def silu_range(low: DoubleArray, high: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
    """The least and largest SiLU on each interval [low, high]: it falls until -1.278, then rises."""
    at_low, at_high = silu(low), silu(high)
    least = np.where((low <= _SILU_MINIMUM_AT) & (high >= _SILU_MINIMUM_AT), _LOWEST, np.minimum(at_low, at_high))
    return _outwards(least, np.maximum(at_low, at_high))


class GateBounds:
    """Per query, bounds of any item's gate weights."""

    def __init__(self, scorer: MolScorer) -> None:
        self._gate_range = scorer.gate_range
        self._norms = scorer.magnitudes.norms
        self._items = scorer.magnitudes
        self._pair_gate = scorer.pair_gate

    def log_weights(self, queries: QueryStates, highest: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
        """Bounds (B, P) on SiLU(z_p) = log w_p over items with cosines of at most `highest` (B, P)."""
        reach = rounding.cosine_magnitudes(queries, self._items)
        high = np.clip(highest, -reach, reach)
        low, top = self._network(queries, -reach, high)
        if queries.gate is not None and self._gate_range is not None:
            gate = queries.gate.astype(np.float64)
            at_least, at_most = gate * self._gate_range[0], gate * self._gate_range[1]
            low = low + np.minimum(at_least, at_most)
            top = top + np.maximum(at_least, at_most)
        return silu_range(*_outwards(low, top))

    def upper_bounds(self, queries: QueryStates, highest: DoubleArray) -> Scores:
        """Bounds (B,) on s of items with cosines of at most `highest` (B, P), -inf if there is no such item."""
        nothing = (highest == -np.inf).any(axis=1)
        values = np.where(nothing[:, None], 0.0, highest)
        if highest.shape[1] == 1:
            return np.asarray(np.where(nothing, -np.inf, values[:, 0]))
        low, high = self.log_weights(queries, values)
        return np.asarray(np.where(nothing, -np.inf, largest_mixture(values, low, high)))

    def _network(self, queries: QueryStates, low: DoubleArray, high: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
        """Bounds of the network's outputs over cosines in [low, high]: (B, P) each."""
        if self._pair_gate is None:
            return np.zeros_like(low), np.zeros_like(low)
        w1, b1, w2, b2 = (
            array.astype(np.float64)
            for array in (
                self._pair_gate.hidden_weight,
                self._pair_gate.hidden_bias,
                self._pair_gate.out_weight,
                self._pair_gate.out_bias,
            )
        )
        least, most = _affine_range(w1, b1, low, high)
        # A hidden unit reads sum_p w_p <f_pq, g_px> = sum_px <sum_pq w_p f_pq, g_px>. Cauchy-Schwarz per item component
        # often gives a far narrower range than extreme cosines.
        components = queries.components.astype(np.float64)
        weights = w1.reshape(len(b1), components.shape[1], len(self._norms))
        folded = weights.transpose(0, 2, 1) @ components[:, None]
        span = np.linalg.norm(folded, axis=-1) @ self._norms
        least, most = _outwards(np.maximum(least, b1 - span), np.minimum(most, b1 + span))
        return _affine_range(w2, b2, *silu_range(least, most))


def largest_mixture(values: DoubleArray, log_low: DoubleArray, log_high: DoubleArray) -> Scores:
    """The maximum of sum w_p values_p / sum w_p over w_p in [exp(log_low_p), exp(log_high_p)], rounded up: (B, P) each
    -> (B,).

    At the best ratio U, a weight is high where values_p > U, else low. So one of the P ways to give the j largest
    values the high weight has the maximum.
    """
    scale = log_high.max(axis=1, keepdims=True)
    order = np.argsort(-values, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    low = np.exp(np.take_along_axis(log_low - scale, order, axis=1))
    high = np.exp(np.take_along_axis(log_high - scale, order, axis=1))
    # Relative to the smallest value every term is at least 0, so nothing cancels.
    excess = ordered - ordered[:, -1:]
    rest_weight = low.sum(axis=1, keepdims=True) - np.cumsum(low, axis=1)
    rest = np.cumsum((low * excess)[:, ::-1], axis=1)[:, ::-1]
    rest = np.concatenate([rest[:, 1:], np.zeros_like(rest[:, :1])], axis=1)
    weight = np.cumsum(high, axis=1) + np.maximum(rest_weight, 0)
    # If all weights of a row underflow, the bound is the largest value.
    known = weight > _TINY
    mixture = np.where(known, (np.cumsum(high * excess, axis=1) + rest) / np.where(known, weight, 1), excess[:, :1])
    largest = np.abs(values).max(axis=1, initial=0)
    bound = ordered[:, -1] + mixture.max(axis=1) + _SLACK * (1 + largest)
    return np.asarray(np.minimum(bound, ordered[:, 0]))


def _affine_range(
    weight: DoubleArray, bias: DoubleArray, low: DoubleArray, high: DoubleArray
) -> tuple[DoubleArray, DoubleArray]:
    """Bounds of weight @ c + bias over c in [low, high]: weight (n, m), low and high (B, m) -> two (B, n)."""
    positive, negative = np.maximum(weight, 0).T, np.minimum(weight, 0).T
    size = _row_products(np.maximum(np.abs(low), np.abs(high)), np.abs(weight).T) + np.abs(bias)
    slack = _SLACK * size
    least = _row_products(low, positive) + _row_products(high, negative) + bias - slack
    return least, _row_products(high, positive) + _row_products(low, negative) + bias + slack


def _row_products(rows: DoubleArray, weight: DoubleArray) -> DoubleArray:
    """rows @ weight, row by row, so that sums do not depend on the number of rows."""
    return np.asarray((rows[:, None, :] @ weight)[:, 0])


def _outwards(low: DoubleArray, high: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
    return low - _SLACK * (1 + np.abs(low)), high + _SLACK * (1 + np.abs(high))
