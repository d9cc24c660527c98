"""What the sampled softmax reads, named once for the fused version and its reference."""

from typing import NamedTuple

from torch import Tensor


class States(NamedTuple):
    """Components, l2-normalised or zero, and gate: (N, P_q, d) with (N, P), or (M, P_x, d) with (M, P)."""

    components: Tensor
    gate: Tensor


class GateWeights(NamedTuple):
    """The pair network W2 SiLU(W1 c + b1) + b2: (G, P), (G,), (P, G), (P,)."""

    hidden_weight: Tensor
    hidden_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


class Negatives(NamedTuple):
    """Positions g * R to (g + 1) * R - 1 share the K negatives rows[g], rows of the item states.

    Shapes: rows (ceil(N / R), K), target_rows (N,): a negative that is the position's own target doesn't count.
    """

    rows: Tensor
    target_rows: Tensor
    group_size: int
