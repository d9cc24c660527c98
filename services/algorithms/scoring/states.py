"""The inputs of a Mixture-of-Logits score: query states, item states, and the gate's pair network.

A two-tower dot product has P_q = P_x = 1 and no gates. It needs only NumPy, so processes that pass states on need not
load PyTorch.

Letters: B batch, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# Components have length 1; absent ones 0, refreshed ones at most 1. Rounded to half precision or float32, 1 is at most
# MAX_LENGTH. Imported embeddings may have any length up to half precision's limit.
MAX_LENGTH, MAX_OWN_LENGTH = 1.001, 65_504.0
# Limit of query and item gates: half precision's largest number.
MAX_GATE = 65_504.0
_CHECKED_FLOATS = 1 << 16


def _parts(array: npt.NDArray[np.floating]) -> Iterator[slice]:
    """Slices of rows whose temporary arrays fit in the cache."""
    step = max(1, _CHECKED_FLOATS // max(1, array[:1].size))
    return (slice(start, start + step) for start in range(0, len(array), step))


def _check_finite(name: str, array: npt.NDArray[np.floating]) -> None:
    if not all(np.isfinite(array[part]).all() for part in _parts(array)):
        raise ValueError(f"{name} holds NaN or infinite values; every value must be finite")


def check_sizes(components: FloatArray, gate: FloatArray | None = None, *, longest: float = MAX_LENGTH) -> None:
    """Raise ValueError with the row unless every vector of components (n, P, d) has at most length `longest`, and
    every value of gate (n, P) at most size MAX_GATE; NaN also raises.

    Items with longer vectors would rank first for every query.
    """
    for part in _parts(components):
        lengths = np.sqrt(np.einsum("npd,npd->np", components[part], components[part]))
        if not (lengths <= longest).all():
            row, component = np.argwhere(~(lengths <= longest))[0]
            found = (
                f"components: row {part.start + row}, component {component} has length {lengths[row, component]:.6g}"
            )
            raise ValueError(f"{found}; allowed: at most {longest}")
    if gate is not None and gate.size and not (gate.max() <= MAX_GATE and gate.min() >= -MAX_GATE):
        raise ValueError(f"gate: values from {gate.min():.6g} to {gate.max():.6g}; allowed: {-MAX_GATE} to {MAX_GATE}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _States:
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
        """Some states, in this order. They are not checked again, since checking ten million takes seconds."""
        taken = object.__new__(type(self))
        object.__setattr__(taken, "components", self.components[rows])
        object.__setattr__(taken, "gate", None if self.gate is None else self.gate[rows])
        return taken

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The states of at least one part, one part after the other."""
        gates = [one.gate for one in parts if one.gate is not None]
        return cls(
            components=np.concatenate([one.components for one in parts]), gate=np.concatenate(gates) if gates else None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryStates(_States):
    """B query states of finite values.

    Shapes: components (B, P_q, d), rows l2-normalised or zero (an absent user-id component); gate (B, P), or None for a
    plain dot product.
    """

    axes = "(B, P_q, d)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemStates(_States):
    """X item states of finite values.

    Shapes: components (X, P_x, d), rows l2-normalised or zero (an item unknown to training); gate (X, P), or None for a
    plain dot product.
    """

    axes = "(X, P_x, d)"

    @property
    def bytes_per_item(self) -> float:
        total = self.components.nbytes + (0 if self.gate is None else self.gate.nbytes)
        return total / max(1, len(self))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairGate:
    """The gate's network on a pair's P cosines c = tau * l: W2 SiLU(W1 c + b1) + b2. Compared by identity.

    Gate weights are pi = softmax(SiLU(query gate * item gate + the network's output)), as in arXiv:2407.15462, appendix
    A.3 (GLU-SiLU). It reads cosines, not logits; this gives the same functions, because W1 absorbs 1 / tau.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemShape:
    """A model's item shape: P_x, d, P, and whether items have a gate."""

    num_components: int
    width: int
    num_pairs: int
    gated: bool

    @property
    def num_query_components(self) -> int:
        return self.num_pairs // self.num_components

    @property
    def bytes_per_item(self) -> int:
        return 4 * (self.num_components * self.width + (self.num_pairs if self.gated else 0))

    def check_items(self, states: ItemStates) -> None:
        """Raise ValueError with both values unless these states fit."""
        _, num_components, width = states.components.shape
        if (num_components, width) != (self.num_components, self.width):
            raise ValueError(
                f"items have {num_components} components of width {width}; "
                f"the index holds {self.num_components} of width {self.width}"
            )
        if (states.gate is not None) != self.gated:
            raise ValueError(
                f"items.gate is {_presence(states.gate is not None)} but the index's items have "
                f"{'one' if self.gated else 'none'}"
            )
        if states.gate is not None and states.gate.shape[1] != self.num_pairs:
            raise ValueError(f"items.gate has {states.gate.shape[1]} pairs; the index holds {self.num_pairs}")

    def check_queries(self, queries: QueryStates) -> None:
        """Raise ValueError with field and both values if these queries do not fit such items."""
        _, num_query_components, width = queries.components.shape
        if width != self.width:
            raise ValueError(f"query components have width {width} but item components have width {self.width}")
        if num_query_components * self.num_components != self.num_pairs:
            raise ValueError(
                f"{num_query_components} query components x {self.num_components} item components make "
                f"{num_query_components * self.num_components} pairs; the gate has {self.num_pairs}"
            )
        if (queries.gate is not None) != self.gated and self.num_pairs > 1:
            raise ValueError(
                f"query gate is {_presence(queries.gate is not None)} but the items' gate is "
                f"{_presence(self.gated)}; their product needs both or neither"
            )
        if queries.gate is not None and queries.gate.shape[1] != self.num_pairs:
            raise ValueError(f"query gate has {queries.gate.shape[1]} pairs; expected {self.num_pairs}")


def shape_of(items: ItemStates, pair_gate: PairGate | None) -> ItemShape:
    """Derive the shape from item states, which may be of zero items, and pair gate.

    Raises: ValueError with both values if pair counts disagree, P is not a multiple of P_x, or more than one pair has
    no gate.
    """
    _, num_components, width = items.components.shape
    if items.gate is not None and pair_gate is not None and items.gate.shape[1] != pair_gate.num_pairs:
        raise ValueError(f"items.gate has {items.gate.shape[1]} pairs but pair_gate has {pair_gate.num_pairs}")
    if items.gate is not None:
        num_pairs = items.gate.shape[1]
    elif pair_gate is not None:
        num_pairs = pair_gate.num_pairs
    elif num_components == 1:
        num_pairs = 1
    else:
        raise ValueError(
            f"items have {num_components} components but neither items.gate nor pair_gate is given; "
            "only a plain dot product (one component) goes without a gate"
        )
    if num_components < 1 or num_pairs < 1 or num_pairs % num_components:
        raise ValueError(f"{num_pairs} pairs are not a multiple of the items' {num_components} components")
    return ItemShape(num_components=num_components, width=width, num_pairs=num_pairs, gated=items.gate is not None)


def check_shapes(queries: QueryStates, items: ItemStates, pair_gate: PairGate | None) -> None:
    """Raise ValueError as `ItemShape` does unless all three match."""
    shape_of(items, pair_gate).check_queries(queries)


def _presence(there: bool) -> str:
    return "present" if there else "absent"


def silu(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The gate's activation (arXiv:1702.03118): x / (1 + e**-x), elementwise."""
    with np.errstate(over="ignore"):  # far below zero the exponential is infinite, the quotient correct
        return np.asarray(x / (1 + np.exp(-x)))
