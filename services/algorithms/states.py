"""What a Mixture-of-Logits scores: query states, item states, and the gate's pair network.

A plain two-tower dot product is the case P_q = P_x = 1 without gates. Everything here is NumPy, so that a process
that only carries states (the gateway, say) never loads PyTorch.

Letters: B batch, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def _check_finite(name: str, array: npt.NDArray[np.floating]) -> None:
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds NaN or infinite values; every value must be finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class _States:
    """n states of finite values: components (n, P_q or P_x, d) and gate (n, P) or None."""

    axes: ClassVar[str]
    components: FloatArray
    gate: FloatArray | None = None

    def __post_init__(self) -> None:
        if self.components.ndim != 3:
            raise ValueError(f"components has shape {self.components.shape}; expected {self.axes}")
        _check_finite("components", self.components)
        if self.gate is not None:
            if self.gate.ndim != 2 or len(self.gate) != len(self.components):
                raise ValueError(f"gate has shape {self.gate.shape}; expected ({len(self.components)}, P)")
            _check_finite("gate", self.gate)

    def __len__(self) -> int:
        return len(self.components)

    def take(self, rows: slice | Sequence[int] | npt.NDArray[np.integer]) -> Self:
        """Some states, in that order."""
        return type(self)(components=self.components[rows], gate=None if self.gate is None else self.gate[rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryStates(_States):
    """B query states.

    Shapes: components (B, P_q, d), rows l2-normalised or zero (an absent user-id component); gate (B, P), or None
    for a plain dot product.
    """

    axes = "(B, P_q, d)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemStates(_States):
    """X item states, precomputed so that scoring a pair never touches the encoder.

    Shapes: components (X, P_x, d), l2-normalised; gate (X, P), or None for a plain dot product.
    """

    axes = "(X, P_x, d)"

    @property
    def bytes_per_item(self) -> float:
        """Bytes of one item's components and gate."""
        total = self.components.nbytes + (0 if self.gate is None else self.gate.nbytes)
        return total / max(1, len(self))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairGate:
    """The gate's network on a pair's P cosines c = tau * l: W2 SiLU(W1 c + b1) + b2. Equal to itself alone.

    The gating weights are pi = softmax(SiLU(query gate * item gate + this)), as in arXiv:2407.15462, appendix A.3
    (GLU-SiLU). It reads cosines, not logits: the same class of functions, since W1 absorbs 1 / tau.

    Shapes: hidden_weight (G, P), hidden_bias (G,), out_weight (P, G), out_bias (P,).
    """

    hidden_weight: FloatArray
    hidden_bias: FloatArray
    out_weight: FloatArray
    out_bias: FloatArray

    def __post_init__(self) -> None:
        hidden, pairs = self.hidden_weight.shape
        wanted = {"hidden_bias": (hidden,), "out_weight": (pairs, hidden), "out_bias": (pairs,)}
        for name, shape in wanted.items():
            found = getattr(self, name).shape
            if found != shape:
                raise ValueError(f"{name} has shape {found}; expected {shape} to fit hidden_weight {(hidden, pairs)}")
        for name in ("hidden_weight", *wanted):
            _check_finite(name, getattr(self, name))

    @property
    def num_pairs(self) -> int:
        return int(self.hidden_weight.shape[1])
