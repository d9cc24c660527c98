"""A bound on the error of a score of `kernel.py`. The kernel computes the norm of the cosines.

For one query-item pair with cosines c, hidden values h = SiLU(z) and gating weights pi, all as computed,

    |s computed - s exact| <= base + D e^D sd_pi(c),    D = constant + per_cosine ||c||

- *base* bounds the errors of the cosines. The rounding error of the stored vectors f', g' is measured: by
Cauchy-Schwarz it is at most ||f - f'|| ||g|| + ||f'|| ||g - g'||.
- *D* bounds the error of every gate logit (after SiLU). When logits move by at most D along a line, s changes at the
rate Cov_pi(change, c) <= D sd_pi(c), and sd_pi(c) grows at most by e^(t D). So equal cosines leave no gate error.
Errors pass
  through W2 SiLU(W1 c + b1) + b2 as Euclidean norms, with SiLU' in [-0.1, 1.1] = 0.5 +- 0.6, so that an error e of c
  becomes at most (0.5 ||(W2 W1)_p|| + 0.6 ||W2_p|| ||W1||) ||e||. The norm of the pair's own cosines makes D far
  tighter than the worst case. For the hidden values, ||z|| <= ||W1|| ||c|| + ||b1|| suffices (their exact norm cost
  0.6 of 4.1 ms at Books on an H200, and saved 68 of 261 items per query).

Assumed of the GPU: a matrix product of K terms errs by at most (K + 4) 2**-22 of the sum of magnitudes (float32 sums
that truncate), tanh.approx by 2**-10.9 of its value (PTX: 2**-11), exp2 by 2**-20.

Letters: B queries, P_q, P_x query and item components, P = P_q * P_x (pair p_q * P_x + p_x), d width.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.ops.mol_scores.rounding import DoubleArray
from services.algorithms.scoring.states import FloatArray, PairGate, QueryStates

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half the relative gap between neighbouring numbers
_SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}  # half the absolute gap, below the normal numbers
LARGEST = {"float16": 30_000.0, "bfloat16": 1e30}  # limit of values that are rounded to half precision
_SUM = 2.0**-22
_TANH = 2.0**-10.9
_FLOAT32 = 2.0**-23
_SLOPE, _SLOPE_CENTRE, _SLOPE_RADIUS = 1.1, 0.5, 0.6
_SECOND_ORDER = 1.002  # products of two errors, and the kernel's float32 sums of the numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredItems:
    """Largest values over a catalogue's items, which bound the effect of storing them in half precision.

    Shapes: norms and residual norms ||g - g'|| (P_x,); gates |x| and |x - x'| (P,), None without item gates.
    """

    width: int
    norms: DoubleArray
    residuals: DoubleArray
    gates: DoubleArray | None
    gate_residuals: DoubleArray | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelError:
    """The terms of the module's formula, (B, 3) float32, rounded up: base, constant, per_cosine.

    largest_half (B,): the largest value that the kernel rounds to half precision.
    """

    terms: FloatArray
    largest_half: DoubleArray


class KernelErrorModel:
    """Error bounds for one catalogue and pair gate."""

    def __init__(self, items: StoredItems, pair_gate: PairGate | None, *, precision: str) -> None:
        """Prepare bounds for `precision` "float16" or "bfloat16"."""
        self._items, self._unit, self._smallest = items, UNIT[precision], _SMALLEST[precision]
        self._network = None if pair_gate is None else _Network(pair_gate, precision)

    def bounds(
        self, queries: QueryStates, stored: npt.NDArray[np.float32], *, also: DoubleArray | float = 0.0
    ) -> KernelError:
        """The error of queries with components stored as `stored` (B, P_q, d). also (B,): added to base."""
        items = self._items
        exact, half = queries.components.astype(np.float64), stored.astype(np.float64)
        cosine, cosine_error = self._cosines(exact, half)
        pairs, sums = cosine.shape, (items.width + 4) * _SUM
        constant = np.full(len(exact), 2.0**-20)
        per_cosine = np.zeros(len(exact))
        largest_half = cosine.max(axis=1, initial=0)
        gate = np.zeros(pairs)
        gate_error = np.zeros(pairs)
        if queries.gate is not None and items.gates is not None and items.gate_residuals is not None:
            query_gate = np.abs(queries.gate.astype(np.float64))
            gate = query_gate * (items.gates + items.gate_residuals)
            gate_error = query_gate * items.gate_residuals
        # The error of SiLU(z) per |z|, plus exp's rounding error of its argument, the logit.
        function = _TANH / 2 + 16 * _FLOAT32
        if self._network is not None:
            network = self._network
            # As matrices, ||F G' - F' G''|| <= ||F - F'|| ||G|| + ||F'|| ||G - G''||, spectral times Frobenius.
            read = np.linalg.norm(exact - half, ord=2, axis=(1, 2)) * np.linalg.norm(items.norms)
            read += np.linalg.norm(half, ord=2, axis=(1, 2)) * np.linalg.norm(items.residuals)
            read += sums * np.linalg.norm(cosine, axis=1) + self._smallest * np.sqrt(pairs[1])
            constant += _SLOPE * network.per_read * read + network.constant + function * network.largest_bias
            # The first layer reads a cosine as two numbers in half precision.
            per_cosine += _SLOPE * network.per_read * self._unit**2 + network.per_cosine
            per_hidden = network.per_hidden + function * network.gate_per_hidden
            constant += per_hidden * network.hidden_constant
            per_cosine += per_hidden * network.hidden_per_cosine
            largest_half = np.maximum(largest_half, network.largest_hidden(cosine))
        gate_error = gate_error + 6 * _FLOAT32 * gate
        constant += (_SLOPE * gate_error + function * gate).max(axis=1, initial=0)
        base = cosine_error.max(axis=1, initial=0) + (2 * pairs[1] + 16) * _FLOAT32 * cosine.max(axis=1, initial=0)
        columns = [base + also, constant, per_cosine]
        terms = (_SECOND_ORDER * np.stack(columns, axis=1)).astype(np.float32)
        return KernelError(terms=np.nextafter(terms, np.float32(np.inf)), largest_half=largest_half)

    def cosine_errors(self, queries: QueryStates, stored: npt.NDArray[np.float32]) -> DoubleArray:
        return self._cosines(queries.components.astype(np.float64), stored.astype(np.float64))[1] * _SECOND_ORDER

    def _cosines(self, exact: DoubleArray, half: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
        """Bounds (B, P) of |cosine| as computed and of its error, for components (B, P_q, d), exact and as stored."""
        items = self._items
        norms = np.linalg.norm(half, axis=-1)[:, :, None]
        residuals = np.linalg.norm(exact - half, axis=-1)[:, :, None]
        stored_norms = items.norms + items.residuals
        error = residuals * items.norms + norms * items.residuals
        error += (items.width + 4) * _SUM * norms * stored_norms
        pairs = (len(exact), exact.shape[1] * len(items.norms))
        return (norms * stored_norms).reshape(pairs), error.reshape(pairs)


class _Network:
    """Bounds of W2 SiLU(W1 c + b1) + b2 for all P outputs, in the terms of the module's formula.

    per_read: an output's error per unit of ||error of c||. constant, per_cosine, per_hidden: the network adds an error
    of at most constant + per_cosine ||c|| + per_hidden ||z / 2||, SiLU's slope included. gate_per_hidden,
    largest_bias: |output| <= gate_per_hidden ||z / 2|| + largest_bias. hidden_constant, hidden_per_cosine: the computed
    ||z / 2|| <= hidden_constant + hidden_per_cosine ||c||.
    """

    def __init__(self, pair_gate: PairGate, precision: str) -> None:
        unit, smallest = UNIT[precision], _SMALLEST[precision]
        w1, w2 = pair_gate.hidden_weight.astype(np.float64), pair_gate.out_weight.astype(np.float64)
        b1, b2 = np.abs(pair_gate.hidden_bias.astype(np.float64)), np.abs(pair_gate.out_bias.astype(np.float64))
        (num_hidden, num_pairs), spectral = w1.shape, float(np.linalg.norm(w1, 2)) * (1 + 1e-9)
        rows = np.linalg.norm(w2, axis=1)
        largest_row = float(rows.max())
        product = np.linalg.norm(w2 @ w1, axis=1)
        self.per_read = float((_SLOPE_CENTRE * product + _SLOPE_RADIUS * rows * spectral).max())
        # Rounding errors are measured, because their norm is far below the matrix's norm times the unit.
        apart1, apart2 = _residual(pair_gate.hidden_weight, precision), _residual(pair_gate.out_weight, precision)
        largest_apart = float(np.linalg.norm(apart2, axis=1).max())
        first_sums, second_sums = (num_pairs + 6) * _SUM, (num_hidden + 6) * _SUM
        magnitudes = float(np.linalg.norm(np.abs(w1), 2))
        before_per_cosine = float(np.linalg.norm(apart1, 2)) + 2 * first_sums * magnitudes
        before_constant = first_sums * float(np.linalg.norm(b1))
        self.hidden_per_cosine = 0.5 * (spectral + before_per_cosine) * (1 + unit**2)
        self.hidden_constant = 0.5 * (float(np.linalg.norm(b1)) + before_constant)
        # ||h|| <= 2 ||z / 2||. Errors come from tanh, SiLU's own steps, and rounding h to half precision.
        hidden_per_hidden = _TANH + 16 * _FLOAT32 + 2 * unit * (1 + _TANH)
        self.per_cosine = _SLOPE * largest_row * _SLOPE * before_per_cosine
        own = largest_row * hidden_per_hidden + 2 * (largest_apart + second_sums * largest_row) * (1 + 2 * unit)
        self.per_hidden = _SLOPE * own
        self.constant = _SLOPE * (
            largest_row * (_SLOPE * before_constant + smallest * np.sqrt(num_hidden))
            + (second_sums + 6 * _FLOAT32) * float(b2.max())
        )
        self.gate_per_hidden, self.largest_bias = 2 * largest_row * (1 + 2 * unit), float(b2.max())
        self._w1, self._b1 = np.abs(w1), b1
        self._largest_weight = float(max(np.abs(w1).max(), np.abs(w2).max()))

    def largest_hidden(self, cosine: DoubleArray) -> DoubleArray:
        """The largest |hidden value| or weight that is rounded to half precision: cosines (B, P) -> (B,)."""
        largest = (cosine @ self._w1.T + self._b1).max(axis=1) * 1.01 + 1
        return np.asarray(np.maximum(largest, self._largest_weight))


def _residual(weight: FloatArray, precision: str) -> DoubleArray:
    exact = torch.from_numpy(np.array(weight))
    stored = 2 * (0.5 * exact).to(torch.float16 if precision == "float16" else torch.bfloat16).double()
    return np.asarray((exact.double() - stored).numpy())
