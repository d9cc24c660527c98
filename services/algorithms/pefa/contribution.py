"""An interaction's contribution to its item's sums, as integers that do not depend on the batch.

In a mixture of logits an item component gets w * sum_pq pi_(pq,px) f_pq(q), with w the interaction's weight and pi the
gate weights of the query state and the item's bundle state. With the refreshed state, sums would depend on the order of
interactions. With one component per side, the item gets w * q, the paper's Q^T Y (equation 7).

Letters: n interactions, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.exact_floats import Doubles, exp_of_negative, silu, spare_bits, to_multiples
from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate, QueryStates, check_shapes

FixedPoint = npt.NDArray[np.int64]

SCALE_BITS = 30
"""In fixed point, an integer i means i * 2**-30, so rounding errors are at most 2**-31 (5e-10)."""
SCALE = 2**SCALE_BITS

# Limit of a component's values (normalised ones stay below 1.001 in half precision). It gives
# |contribution| <= 2 |w| 2**30, so sums with a total weight up to 2**31 (sums.py checks it) stay within 2**62.
MAX_COMPONENT = 2.0
MAX_WEIGHT = 2.0**16

_QUERY_BITS = 24  # half precision has only multiples of 2**-24, so this rounds nothing
_COSINE_BITS = 24
_HIDDEN_BITS = 20
_SOFTMAX_BITS = 40  # 2**12 terms of at most 1 stay exact
_SHARE_BITS = 24


class Contributions:
    """Converts one model's interactions to fixed point. The gate network is rounded so that its sums are exact."""

    def __init__(self, pair_gate: PairGate | None, *, leave_out: int | None = None) -> None:
        """leave_out: the user-id component of the query, if any, which is set to zero: an item must not learn its
        users' ids.
        """
        self.pair_gate, self.leave_out = pair_gate, leave_out
        self._network = None if pair_gate is None else _Network(pair_gate)

    def __call__(self, queries: QueryStates, weights: npt.NDArray[np.float64], items: ItemStates) -> FixedPoint:
        """The contributions of n interactions to their items' sums, one row each.

        Shapes: queries (n, P_q, d) and (n, P), weights (n,), items (n, P_x, d) and (n, P): row i is the bundle state of
        interaction i's item, or a row of `cold_start_items` -> (n, P_x, d) int64, in units of 2**-30.
        Exact:  a row's bits depend on that row alone, whatever the batch, the BLAS or the processor.
        Raises: ValueError with the field for shapes that disagree, values beyond the allowed sizes, or NaN.
        Source: arXiv:2312.02429, equation 7 (P = 1); the mixture's form is our own.
        Cost:   n P (2 d + 2 G) multiply-adds in float64 and n (G + 2 P) exponentials.
        """
        components, weights = self._checked(queries, weights, items)
        if components.shape[1] * items.components.shape[1] == 1:
            per_item = components
        else:
            shares = self._pair_shares(queries.gate, components, items)
            # Exact: both factors are multiples of 2**-24, and a sum is at most 2.
            per_item = np.matmul(shares.transpose(0, 2, 1), components)
        return np.asarray(np.rint(per_item * (weights * SCALE)[:, None, None]).astype(np.int64))

    def shares(self, queries: QueryStates, items: ItemStates) -> Doubles:
        """Gate weights pi of n pairs of query and item, (n, P_q, P_x). Raises: as a call."""
        components, _ = self._checked(queries, np.ones(len(queries)), items)
        if components.shape[1] * items.components.shape[1] == 1:
            return np.ones((len(queries), 1, 1))
        return self._pair_shares(queries.gate, components, items)

    def _checked(
        self, queries: QueryStates, weights: npt.NDArray[np.float64], items: ItemStates
    ) -> tuple[Doubles, Doubles]:
        check_shapes(queries, items, self.pair_gate)
        weights = np.asarray(weights, dtype=np.float64)
        if not len(queries) == len(items) or weights.shape != (len(queries),):
            raise ValueError(
                f"{len(queries)} queries, weights of shape {weights.shape} and {len(items)} items; "
                "allowed: one weight and one item row per query"
            )
        if not (np.abs(weights) <= MAX_WEIGHT).all():  # NaN included
            worst = weights[~(np.abs(weights) <= MAX_WEIGHT)][0]
            raise ValueError(f"weights hold {worst}; allowed: finite, at most {MAX_WEIGHT} in size")
        num_components = queries.components.shape[1]
        if self.leave_out is not None and not 0 <= self.leave_out < num_components:
            raise ValueError(f"leave_out={self.leave_out} allowed: 0 to {num_components - 1}, or None")
        for name, array in (("queries", queries.components), ("items", items.components)):
            if array.size and np.abs(array).max() > MAX_COMPONENT:
                raise ValueError(
                    f"{name}.components reach {np.abs(array).max()}; allowed: at most {MAX_COMPONENT} in size "
                    "(l2-normalised components)"
                )
        components = to_multiples(queries.components, _QUERY_BITS)
        if self.leave_out is not None:
            components[:, self.leave_out] = 0.0
        return components, weights

    def _pair_shares(self, query_gate: FloatArray | None, components: Doubles, items: ItemStates) -> Doubles:
        num_rows, num_query_components, _ = components.shape
        item_bits = spare_bits(components.shape[2] * MAX_COMPONENT**2, _QUERY_BITS)
        cosines = np.matmul(components, to_multiples(items.components, item_bits).transpose(0, 2, 1))
        gate = np.zeros((num_rows, num_query_components * items.components.shape[1]))
        if self._network is not None:
            gate += self._network(cosines.reshape(gate.shape))
        if query_gate is not None and items.gate is not None:
            gate += query_gate.astype(np.float64) * items.gate
        logits = silu(gate)
        logits -= logits.max(axis=1, keepdims=True)
        powers = to_multiples(exp_of_negative(logits), _SOFTMAX_BITS)
        shares = to_multiples(powers / powers.sum(axis=1, keepdims=True), _SHARE_BITS)
        return shares.reshape(num_rows, num_query_components, items.components.shape[1])


def cold_start_items(count: int, *, num_components: int, width: int, mean_gate: FloatArray | None) -> ItemStates:
    """Rows for items without a bundle state: components (count, P_x, d) of zeros, and gate (count, P) from mean_gate
    (P,), None for a plain dot product.

    Every cosine is 0, so pair weights depend on the query's gate only.
    """
    return ItemStates(
        components=np.zeros((count, num_components, width), dtype=np.float32),
        gate=None if mean_gate is None else np.tile(np.asarray(mean_gate, dtype=np.float32), (count, 1)),
    )


def mean_gate(items: ItemStates) -> FloatArray | None:
    """The catalogue's mean item gate (P,), the gate of new items; None without gates. Raises:
    ValueError without items.
    """
    if items.gate is None:
        return None
    if not len(items):
        raise ValueError("items holds 0 items; a mean gate needs at least 1")
    return np.asarray(items.gate.mean(axis=0, dtype=np.float64).astype(np.float32))


class _Network:
    """The gate's W2 SiLU(W1 c + b1) + b2, with so few bits that its matrix products are exact."""

    def __init__(self, pair_gate: PairGate) -> None:
        # |c| <= d MAX_COMPONENT^2 in theory, about 1 for normalised components; cosines are cut to 2.
        first = 2 * float(np.abs(pair_gate.hidden_weight).sum(axis=1).max(initial=0))
        self._bias = pair_gate.hidden_bias.astype(np.float64)
        self._first = to_multiples(pair_gate.hidden_weight, spare_bits(first, _COSINE_BITS)).T
        hidden = first + float(np.abs(self._bias).max(initial=0))
        second = hidden * float(np.abs(pair_gate.out_weight).sum(axis=1).max(initial=0))
        self._second = to_multiples(pair_gate.out_weight, spare_bits(second, _HIDDEN_BITS)).T
        self._out_bias = pair_gate.out_bias.astype(np.float64)

    def __call__(self, cosines: Doubles) -> Doubles:
        short = to_multiples(np.clip(cosines, -2.0, 2.0), _COSINE_BITS)
        hidden = to_multiples(silu(short @ self._first + self._bias), _HIDDEN_BITS)
        return np.asarray(hidden @ self._second + self._out_bias)
