"""Item states prepared for scoring: float32 scores with a proven error bound, and float64 re-evaluation.

The compiled kernel (cpu.cpp) does the work. Plain dot products of everything (P = 1) are a matrix product, which BLAS
does best; the bound holds for both.

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.algorithms.lazy import lazy_property
from services.algorithms.native import load_kernels
from services.algorithms.ops.mol_scores import rounding
from services.algorithms.ops.mol_scores.native import NativeScores
from services.algorithms.state_shapes import shape_of
from services.algorithms.states import ItemStates, PairGate, QueryStates

FloatMatrix = npt.NDArray[np.float32]
FloatVector = npt.NDArray[np.float32]
DoubleVector = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

_DOT_FLOATS = 1 << 16  # of dot products at a time: their transposition stays in cache


class MolScorer:
    """X items ready to be scored. Safe to use from several threads.

    `components` (X, P_x, d) and `item_gate` (X, P), or None, are the arrays as given, memory maps included, not to be
    written to; `shape` is what they and the pair gate imply.
    Memory beside results: about 200 KB per thread.
    """

    def __init__(self, items: ItemStates, pair_gate: PairGate | None) -> None:
        """Prepare X items. Raises: ValueError if gates and components disagree."""
        self.shape = shape_of(items, pair_gate)
        self.num_pairs, self.num_query_components = self.shape.num_pairs, self.shape.num_query_components
        self.num_items, self.num_item_components, self.width = (int(size) for size in items.components.shape)
        self.pair_gate = pair_gate
        self.components = np.ascontiguousarray(items.components)
        self.item_gate = items.gate
        self._native = NativeScores(load_kernels("mol_scores"), items, pair_gate)
        self._last_bounds: tuple[QueryStates, DoubleVector] | None = None

    @lazy_property
    def gate_range(self) -> tuple[DoubleVector, DoubleVector] | None:
        """The least and the largest item gate of each pair (P,), which bounds on gating weights rest on; None without.

        Both are 0 over an empty catalogue.
        """
        if self.item_gate is None:
            return None
        if not self.num_items:
            return np.zeros(self.num_pairs), np.zeros(self.num_pairs)
        return self.item_gate.min(axis=0).astype(np.float64), self.item_gate.max(axis=0).astype(np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held per item: components and gate as they were given, nothing else."""
        gate = 0 if self.item_gate is None else self.item_gate.size * 4
        return self.components.size * 4 + gate

    @lazy_property
    def magnitudes(self) -> rounding.ItemMagnitudes:
        """The largest item values, which error bounds and certificates rest on."""
        gate = None if self.gate_range is None else np.maximum(-self.gate_range[0], self.gate_range[1])
        return rounding.ItemMagnitudes(norms=self._native.largest_norms(), gate=gate, width=self.width)

    def check(self, queries: QueryStates) -> None:
        """Raise ValueError, naming both values, if these queries cannot be scored against these items."""
        self.shape.check_queries(queries)

    def scores(self, queries: QueryStates) -> FloatMatrix:
        """Score every item: (B, X) float32, each within `error_bounds` of the exact value."""
        self.check(queries)
        if self.num_pairs > 1:
            return self._native.scores(queries)
        return _dot_products(queries.components[:, 0], self.components[:, 0])

    def scores_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[FloatVector]:
        """Score the items `rows[b]` (n_b,) for each query b in float32: (n_b,) each, within `error_bounds`."""
        self.check(queries)
        self._check_rows(queries, rows)
        return self._native.scores_at(queries, rows)

    def scores_float64_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[DoubleVector]:
        """The same in float64 over the stored float32 states, within `error_bounds_float64`."""
        self.check(queries)
        self._check_rows(queries, rows)
        return self._native.scores_float64_at(queries, rows)

    def scores_float64(self, queries: QueryStates, query: int, rows: Rows) -> DoubleVector:
        """Score item `rows` for query number `query` in float64: (len(rows),)."""
        return self.scores_float64_at(queries.take(slice(query, query + 1)), [rows])[0]

    def error_bounds(self, queries: QueryStates) -> DoubleVector:
        """Bound |float32 score - exact value| for every item, per query: (B,)."""
        # One search asks several times, for the same queries.
        last = self._last_bounds
        if last is None or last[0] is not queries:
            bounds = rounding.error_bounds(queries, self.magnitudes, self.pair_gate, unit=rounding.FLOAT32)
            bounds.flags.writeable = False
            self._last_bounds = last = (queries, bounds)
        return last[1]

    def error_bounds_float64(self, queries: QueryStates) -> DoubleVector:
        """Bound |float64 score - exact value| for every item, per query: (B,)."""
        return self.error_bounds(queries) * rounding.FLOAT64_PER_FLOAT32

    def _check_rows(self, queries: QueryStates, rows: Sequence[Rows]) -> None:
        if len(rows) != len(queries):
            raise ValueError(f"rows has {len(rows)} entries; expected one per query: {len(queries)}")
        for chosen in rows:
            if len(chosen) and (chosen.min() < 0 or chosen.max() >= self.num_items):
                raise ValueError(f"rows={chosen.min()}..{chosen.max()} allowed: 0 to {self.num_items - 1}")


def _dot_products(queries: FloatMatrix, items: FloatMatrix) -> FloatMatrix:
    """Queries (B, d) times items (X, d): (B, X).

    The items come first in the product: OpenBLAS is slow where few rows meet many columns.
    """
    out = np.empty((len(queries), len(items)), dtype=np.float32)
    if len(queries) == 1:
        np.matmul(items, queries[0], out=out[0])
    elif len(queries):
        transposed = np.ascontiguousarray(queries.T)
        step = max(256, _DOT_FLOATS // len(queries))
        for start in range(0, len(items), step):
            out[:, start : start + step] = (items[start : start + step] @ transposed).T
    return out
