"""Intervals for the pair network of the gate, m(c) = W2 SiLU(W1 c + b1) + b2, around a centre c0.

Taylor's theorem with the second derivative bounded: |m_p(c) - m_p(c0) - J_p (c - c0)| <= kappa_p ||c - c0||^2. kappa_p
is the larger of two numbers: the largest eigenvalue of W1' diag(u) W1 / 2 with u_g = max(W2_pg SiLU''), and the same
with u_g = max(-W2_pg SiLU''). The Jacobian is split into two directions, which hold nearly all of it, and a rest that
is bounded by its norm. Proof and measurements: docs/decisions/006.

Letters: B queries, P pairs, G hidden width.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import PairGate

Doubles = npt.NDArray[np.float64]

# SiLU'' lies in [-0.0370, 0.5]; it is even, and largest at 0.
_CURVATURE_UP, _CURVATURE_DOWN = 0.5, 0.0370
_UP = 1 + 1e-9  # margin for float64 rounding of the eigenvalues
_ITERATIONS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """The expansion of m around c0 of each query.

    Shapes: directions and slopes (2, B, P), others (B, P). middle: m(c0). directions: orthonormal. slopes: those of m
    along the directions. rest: norms of the Jacobian's rows without the directions. steepness: norms of its rows.
    """

    middle: Doubles
    directions: Doubles
    slopes: Doubles
    rest: Doubles
    steepness: Doubles


class NetworkBounds:
    """The constants of the network: `curvature` is kappa (P,). Without a pair gate there is no network: m = 0."""

    def __init__(self, pair_gate: PairGate | None, num_pairs: int) -> None:
        self.curvature = np.zeros(num_pairs)
        self._gate = pair_gate
        self._first = np.random.default_rng(0).standard_normal((num_pairs, min(2, num_pairs)))
        if pair_gate is None:
            return
        self._hidden = pair_gate.hidden_weight.astype(np.float64)
        self._out = pair_gate.out_weight.astype(np.float64)
        positive, negative = np.maximum(self._out, 0), np.maximum(-self._out, 0)
        for sides in (
            _CURVATURE_UP * positive + _CURVATURE_DOWN * negative,
            _CURVATURE_DOWN * positive + _CURVATURE_UP * negative,
        ):
            for pair, side in enumerate(sides):
                largest = np.linalg.eigvalsh((self._hidden.T * side) @ self._hidden)[-1]
                self.curvature[pair] = max(self.curvature[pair], 0.5 * float(largest) * _UP)

    @property
    def is_expanded(self) -> bool:
        """Whether there is a network to expand."""
        return self._gate is not None

    def around(self, centres: Doubles) -> Expansion:
        """Expand m around centres (B, P)."""
        num_queries, num_pairs = centres.shape
        nothing = np.zeros((num_queries, num_pairs))
        if self._gate is None:
            return Expansion(
                middle=nothing,
                directions=np.zeros((2, num_queries, num_pairs)),
                slopes=np.zeros((2, num_queries, num_pairs)),
                rest=nothing,
                steepness=nothing,
            )
        hidden = centres @ self._hidden.T + self._gate.hidden_bias
        sigmoid = 1 / (1 + np.exp(-np.clip(hidden, -700, 700)))
        middle = (hidden * sigmoid) @ self._out.T + self._gate.out_bias
        slope = sigmoid * (1 + hidden * (1 - sigmoid))
        jacobian = (self._out[None] * slope[:, None, :]) @ self._hidden
        directions = np.broadcast_to(self._first, (num_queries, *self._first.shape))
        for _ in range(_ITERATIONS):
            directions, _upper = np.linalg.qr(jacobian.transpose(0, 2, 1) @ (jacobian @ directions))
        directions = directions.astype(np.float32).astype(np.float64)  # as the pass will use them
        slopes = jacobian @ directions
        return Expansion(
            middle=middle,
            directions=directions.transpose(2, 0, 1),
            slopes=slopes.transpose(2, 0, 1),
            rest=np.linalg.norm(jacobian - slopes @ directions.transpose(0, 2, 1), axis=-1),
            steepness=np.linalg.norm(jacobian, axis=-1),
        )
