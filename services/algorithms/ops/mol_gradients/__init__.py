"""Mixture-of-logits scores of a group of positions with the negatives that they share, and a loss's gradients.

Training's inner loop on the CPU. The pass from cosines to scores stays in the cache and is computed again for the
gradients. The loss is the caller's, between the two calls.

Letters: R positions, K negatives, M items, P_q, P_x components, P = P_q * P_x, d component width, G hidden width.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.native import load_kernels

Array = npt.NDArray[np.float32]

_INPUTS = ("query", "query_gate", "items", "item_gate", "hidden_weight", "hidden_bias", "out_weight", "out_bias")


class _Group(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("positions", "negatives", "num_query", "num_item", "width", "hidden")),
        *((name, ctypes.c_void_p) for name in (*_INPUTS[:4], "chosen", *_INPUTS[4:])),
        ("gate_dropout", ctypes.c_float),
        ("pair_dropout", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int64),
    ]


class _Gradients(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _INPUTS]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """One group's inputs, float32 and C-contiguous: query (R, P_q, d), query_gate (R, P), items (M, P_x, d),
    item_gate (M, P), chosen (K,) int64 rows of the items, and the pair network W2 SiLU(W1 c + b1) + b2:
    hidden_weight (G, P), hidden_bias (G,), out_weight (P, G), out_bias (P,).

    Dropout: see `mol_sampled_softmax`; what is dropped depends on `seed` alone. The same threads give the same bits.
    """

    query: Array
    query_gate: Array
    items: Array
    item_gate: Array
    chosen: npt.NDArray[np.int64]
    hidden_weight: Array
    hidden_bias: Array
    out_weight: Array
    out_bias: Array
    gate_dropout: float = 0.0
    pair_dropout: float = 0.0
    seed: int = 0
    threads: int = 1

    def scores(self, *, kernels: ctypes.CDLL | None = None) -> Array:
        """(R, K). Cost: R K P (d + 2 G) products. `kernels`: another library than this processor's."""
        found = np.empty((len(self.query), len(self.chosen)), np.float32)
        library = kernels or load_kernels("mol_gradients")
        library.freshet_mol_scores(ctypes.byref(self._group()), ctypes.c_void_p(_address("scores", found, found.shape)))
        return found

    def add_gradients(
        self, d_scores: Array, network: dict[str, Array], *, kernels: ctypes.CDLL | None = None
    ) -> tuple[Array, Array, Array, Array]:
        """The gradients of a loss whose gradients with respect to the scores are `d_scores` (R, K).

        Returns those of query (R, P_q, d), query_gate (R, P), of the chosen items in their order (K, P_x, d) and of
        their gate (K, P). Those of the pair network are added to `network`, arrays under the fields' names.
        Cost: about three times that of the scores.
        """
        (positions, num_query, width), num_item = self.query.shape, self.items.shape[1]
        negatives, pairs = len(self.chosen), num_query * num_item
        query, query_gate = (
            np.empty((positions, num_query, width), np.float32),
            np.empty((positions, pairs), np.float32),
        )
        items, item_gate = np.empty((negatives, num_item, width), np.float32), np.empty((negatives, pairs), np.float32)
        made = {"query": query, "query_gate": query_gate, "items": items, "item_gate": item_gate, **network}
        shapes = {name: getattr(self, name).shape for name in _INPUTS[4:]}
        gradients = _Gradients(**{name: _address(name, made[name], shapes.get(name)) for name in _INPUTS})
        library = kernels or load_kernels("mol_gradients")
        library.freshet_mol_gradients(
            ctypes.byref(self._group()),
            ctypes.c_void_p(_address("d_scores", d_scores, (positions, negatives))),
            ctypes.byref(gradients),
        )
        return query, query_gate, items, item_gate

    def _group(self) -> _Group:
        (positions, num_query, width), (num_items, num_item, _) = self.query.shape, self.items.shape
        pairs, hidden = num_query * num_item, len(self.hidden_bias)
        shapes = {
            "query_gate": (positions, pairs),
            "items": (num_items, num_item, width),
            "item_gate": (num_items, pairs),
            "hidden_weight": (hidden, pairs),
            "out_weight": (pairs, hidden),
            "out_bias": (pairs,),
        }
        if len(self.chosen) and not 0 <= self.chosen.min() <= self.chosen.max() < num_items:
            raise ValueError(f"chosen holds {self.chosen.min()} to {self.chosen.max()} allowed: 0 to {num_items - 1}")
        if self.chosen.dtype != np.int64 or not self.chosen.flags.c_contiguous:
            raise ValueError(f"chosen is {self.chosen.dtype} allowed: contiguous int64")
        return _Group(
            positions=positions,
            negatives=len(self.chosen),
            num_query=num_query,
            num_item=num_item,
            width=width,
            hidden=hidden,
            chosen=self.chosen.ctypes.data,
            gate_dropout=self.gate_dropout,
            pair_dropout=self.pair_dropout,
            seed=self.seed,
            threads=self.threads,
            **{name: _address(name, getattr(self, name), shapes.get(name)) for name in _INPUTS},
        )


def _address(name: str, array: Array, shape: tuple[int, ...] | None) -> int:
    if array.dtype != np.float32 or not array.flags.c_contiguous or (shape is not None and array.shape != shape):
        raise ValueError(f"{name} is {array.dtype} {array.shape} allowed: contiguous float32 {shape or ''}")
    return int(array.ctypes.data)
