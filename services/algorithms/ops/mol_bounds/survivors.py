"""The bound pass over a whole catalogue, by the compiled kernel.

Letters: B queries, X items.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, aligned_zeros, load_kernels
from services.algorithms.native.threads import compute_threads
from services.algorithms.ops.mol_bounds.int8_network import NETWORK_ARRAYS, Int8Network, int8_network
from services.algorithms.ops.mol_bounds.items import LEVELS, AverageItems, BoundItems
from services.algorithms.ops.mol_bounds.tables import ARRAYS, TURN, QueryTables, query_tables
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates

_ITEM_ARRAYS = ("codes", "scales", "component_errors", "item_errors", "gates")
_WORD = 64  # items per word of the kernel's answer
_ABSURD = 1e15  # larger numbers could overflow float32 when multiplied


@dataclass(frozen=True, kw_only=True, slots=True)
class Survivors:
    """Per query: remaining rows (n_b,), ascending, and the number of items that reached the gate test (B,)."""

    rows: list[npt.NDArray[np.int64]]
    tested: npt.NDArray[np.int64]


class _Items(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ITEM_ARRAYS),
        ("num_items", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("quads", "padded_components", "vectors")),
    )


class _Queries(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ARRAYS),
        *((name, ctypes.c_int32) for name in ("num_queries", "gated")),
    )


class _Network(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in NETWORK_ARRAYS),
        ("zero", ctypes.c_float),
        ("hidden_vectors", ctypes.c_int32),
    )


class BoundPass:
    """Drops items that provably score below a threshold. Thread-safe."""

    def __init__(
        self,
        scorer: MolScorer,
        *,
        by_gates: bool = True,
        kernels: ctypes.CDLL | None = None,
    ) -> None:
        """Prepare the items.

        by_gates: False tests only the largest cosine, as the paper's Algorithm 1. kernels: library, by default this
        processor's.
        """
        self.scorer = scorer
        self.by_gates = by_gates and scorer.num_pairs > 1
        self.items = items = BoundItems(scorer, with_gates=self.by_gates)
        self._native_items = _Items(
            **{name: address(getattr(items, name)) for name in _ITEM_ARRAYS},
            num_items=items.num_items,
            quads=items.lanes.quads,
            padded_components=items.lanes.padded_components,
            vectors=items.lanes.count // 16,
        )
        self.network: Int8Network | None = None
        self._is_sound = True
        self._native_network: _Network | None = None
        if self.by_gates and scorer.pair_gate is not None:
            self.network = int8_network(scorer.pair_gate, self.items.lanes, TURN)
            self._is_sound = self.network.is_sound
            self._network_arrays = {name: _aligned(getattr(self.network, name)) for name in NETWORK_ARRAYS}
            self._native_network = _Network(
                **{name: address(array) for name, array in self._network_arrays.items()},
                zero=self.network.zero,
                hidden_vectors=self.network.hidden_vectors,
            )
        self._kernels = kernels or load_kernels("mol_bounds")

    @property
    def nbytes(self) -> int:
        return self.items.nbytes

    def survivors(
        self,
        queries: QueryStates,
        thresholds: npt.NDArray[np.float64],
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> Survivors:
        """The allowed items that may have s >= threshold (B,); all others are below. allowed: (X,) or (B, X)."""
        items, num_queries, kernels = self.items, len(queries), self._kernels
        if not num_queries:
            return Survivors(rows=[], tested=np.zeros(0, dtype=np.int64))
        num_items = items.num_items
        tables = self.tables(queries, thresholds)
        native_queries = _Queries(
            **{name: address(getattr(tables, name)) for name in ARRAYS},
            num_queries=num_queries,
            gated=int(self.by_gates),
        )
        mask = None if allowed is None else np.ascontiguousarray(allowed)
        stride = ctypes.c_int64(0 if mask is None or mask.ndim == 1 else num_items)
        words = -(-num_items // _WORD)
        kept = np.zeros((num_queries, words), dtype=np.uint64)
        tested = np.zeros(num_queries, dtype=np.int64)
        threads = compute_threads()
        kernels.freshet_bounds(
            ctypes.byref(self._native_items),
            ctypes.byref(native_queries),
            None if self._native_network is None else ctypes.byref(self._native_network),
            address(mask),
            stride,
            address(kept),
            address(tested),
            threads,
        )
        counts = np.bitwise_count(kept).sum(axis=1)
        rows = [np.empty(int(count), dtype=np.int64) for count in counts]
        for query, found in enumerate(rows):
            kernels.freshet_list_rows(address(kept[query]), ctypes.c_int64(words), address(found))
        return Survivors(rows=rows, tested=tested)

    def tables(self, queries: QueryStates, thresholds: npt.NDArray[np.float64]) -> QueryTables:
        """The kernel's data of each query; on float32 overflow all items survive."""
        tables = query_tables(queries, self.items, self.network, thresholds)
        sound = np.isfinite(thresholds) & (tables.largest < _ABSURD) & self._is_sound
        tables.scalars[~sound, 0] = -np.inf
        tables.scalars[~sound, 1:5] = 0
        return tables


def _aligned(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    out = aligned_zeros(array.shape, array.dtype)
    out[...] = array
    return out


def best_averages(
    averages: AverageItems,
    queries: QueryStates,
    size: int,
    allowed: npt.NDArray[np.bool_] | None = None,
    *,
    kernels: ctypes.CDLL | None = None,
) -> list[npt.NDArray[np.int64]]:
    """Ascending rows of at most `size` allowed items whose means have the largest products with the query's mean."""
    size = min(size, averages.num_items)
    width = averages.width
    means = queries.components.mean(axis=1)
    reach = np.abs(means).max(axis=1, keepdims=True, initial=0.0)
    codes = np.zeros((len(queries), 4 * averages.quads), dtype=np.int8)
    codes[:, :width] = np.rint(means / np.where(reach > 0, reach, 1) * LEVELS)
    library = kernels or load_kernels("mol_bounds")
    corrections = -128 * codes.astype(np.int32).sum(axis=1, dtype=np.int32)
    mask = None if allowed is None else np.ascontiguousarray(allowed)
    rows = np.empty((len(queries), size), dtype=np.int64)
    library.freshet_best_averages(
        address(averages.codes),
        ctypes.c_int64(averages.num_items),
        averages.quads,
        address(codes),
        address(corrections),
        len(queries),
        address(mask),
        ctypes.c_int64(0 if mask is None or mask.ndim == 1 else averages.num_items),
        ctypes.c_int64(size),
        address(rows),
        compute_threads(),
    )
    return [np.sort(row[row >= 0]) for row in rows]
