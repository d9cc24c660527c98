"""The sampled softmax over mixture-of-logits scores, and its gradients: training's inner loop on the CPU.

Groups of positions share their negatives. The computation from cosines to scores stays in the cache and is repeated for
negatives with a gradient.

Letters: N positions, K negatives per group, M items, P_q, P_x components, P = P_q * P_x, d component width, G hidden
width.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.algorithms.native import load_kernels

Array = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

INPUTS = (
    *("positive", "query", "query_gate", "items", "item_gate"),
    *("hidden_weight", "hidden_bias", "out_weight", "out_bias"),
)


_SCALARS = "group_size", "backward_negatives", "tau", "correction", "gate_dropout", "pair_dropout", "seed", "threads"


class _Batch(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("positions", "group_size", "negatives", "num_query", "num_item", "width", "hidden")
        ),
        *((name, ctypes.c_void_p) for name in (*INPUTS, "rows", "targets", "uniforms")),
        ("backward_negatives", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("tau", "correction", "gate_dropout", "pair_dropout")),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int64),
    ]


class _Gradients(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in INPUTS]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSoftmax:
    """The arguments of `mol_sampled_softmax`, C-contiguous.

    float32: positive (N,), query (N, P_q, d), query_gate (N, P), items (M, P_x, d), item_gate (M, P), hidden_weight (G,
    P), hidden_bias (G,), out_weight (P, G), out_bias (P,); int64: rows (groups, K), targets (N,). About
    `backward_negatives` of a position's negatives (0: all) have a gradient; uniforms (N,) in [0, 1) choose them.
    Dropouts depend only on `seed`. The same number of threads gives the same bits.
    """

    positive: Array
    query: Array
    query_gate: Array
    items: Array
    item_gate: Array
    hidden_weight: Array
    hidden_bias: Array
    out_weight: Array
    out_bias: Array
    rows: Rows
    targets: Rows
    uniforms: Array
    group_size: int
    tau: float
    correction: float = 0.0
    backward_negatives: int = 0
    gate_dropout: float = 0.0
    pair_dropout: float = 0.0
    seed: int = 0
    threads: int = 1

    def loss_and_gradients(self, *, kernels: ctypes.CDLL | None = None) -> tuple[float, dict[str, Array]]:
        """Return the summed loss, and its gradients by `INPUTS`. `kernels` replaces this processor's library.

        Cost: N K P (d + 2 G) products, and three times those of the negatives with a gradient.
        """
        (positions, num_query, width), (num_items, num_item, _) = self.query.shape, self.items.shape
        pairs, hidden, negatives = num_query * num_item, len(self.hidden_bias), self.rows.shape[1]
        shapes = {
            "positive": (positions,),
            "query_gate": (positions, pairs),
            "items": (num_items, num_item, width),
            "item_gate": (num_items, pairs),
            "hidden_weight": (hidden, pairs),
            "out_weight": (pairs, hidden),
            "out_bias": (pairs,),
            "uniforms": (positions,),
            "rows": (-(-positions // self.group_size), negatives),
            "targets": (positions,),
        }
        if self.rows.size and not 0 <= self.rows.min() <= self.rows.max() < num_items:
            raise ValueError(f"rows holds {self.rows.min()} to {self.rows.max()} allowed: 0 to {num_items - 1}")
        found = {name: np.zeros_like(getattr(self, name)) for name in INPUTS}
        batch = _Batch(
            positions=positions,
            negatives=negatives,
            num_query=num_query,
            num_item=num_item,
            width=width,
            hidden=hidden,
            **{
                name: _address(name, getattr(self, name), shapes.get(name), np.float32)
                for name in (*INPUTS, "uniforms")
            },
            **{name: _address(name, getattr(self, name), shapes[name], np.int64) for name in ("rows", "targets")},
            **{name: getattr(self, name) for name in _SCALARS},
        )
        gradients = _Gradients(**{name: array.ctypes.data for name, array in found.items()})
        call = (kernels or load_kernels(Path(__file__).parent)).freshet_mol_sampled_softmax
        call.restype = ctypes.c_double
        return call(ctypes.byref(batch), ctypes.byref(gradients)), found


def _address(name: str, array: npt.NDArray[np.generic], shape: tuple[int, ...] | None, dtype: type) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous or (shape is not None and array.shape != shape):
        raise ValueError(f"{name} is {array.dtype} {array.shape} allowed: contiguous {dtype.__name__} {shape or ''}")
    return int(array.ctypes.data)
