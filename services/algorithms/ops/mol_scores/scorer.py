"""Item states prepared for scoring: float32 scores with a proven error bound, and float64 re-evaluation.

The compiled kernel (cpu.cpp) computes scores. Only dot products with all items (P = 1) use BLAS, which is fastest
there.
The bound applies to both.

Letters: B queries, X items, P_x item components, P pairs, d component width.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from services.algorithms.lazy import lazy_property
from services.algorithms.native import address, load_kernels
from services.algorithms.native.threads import compute_threads
from services.algorithms.ops.mol_scores import rounding
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates, shape_of

Rows = npt.NDArray[np.int64]

# The work that justifies one more thread: it takes 60 us, starting the thread 20 us.
_MULTIPLY_ADDS_PER_THREAD = 4_000_000


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_components", "query_gate", "item_components", "item_gate")),
        *((name, ctypes.c_void_p) for name in ("hidden_weight", "hidden_bias", "out_weight", "out_bias")),
        *((name, ctypes.c_int64) for name in ("num_queries", "num_items", "query_parts", "item_parts")),
        *((name, ctypes.c_int64) for name in ("width", "hidden_width", "threads")),
    )


FloatMatrix = npt.NDArray[np.float32]
FloatVector = npt.NDArray[np.float32]
DoubleVector = npt.NDArray[np.float64]
Real = TypeVar("Real", np.float32, np.float64)

_DOT_FLOATS = 1 << 16  # dot products at a time, so that they are transposed in cache


class MolScorer:
    """X items ready to be scored. Thread-safe.

    components (X, P_x, d) and item_gate (X, P) or None are the given arrays, which may be memory maps, or copies if not
    C-contiguous. They are only read. Besides results, a call needs about 200 KB per thread.
    """

    def __init__(self, items: ItemStates, pair_gate: PairGate | None, *, kernels: ctypes.CDLL | None = None) -> None:
        """Prepare X items. kernels: another library than this processor's. Raises: ValueError if gates and components
        disagree.
        """
        self.shape = shape_of(items, pair_gate)
        self.num_pairs = self.shape.num_pairs
        self.num_items, self.num_item_components, self.width = (int(size) for size in items.components.shape)
        self.pair_gate = pair_gate
        self.components = np.ascontiguousarray(items.components, dtype=np.float32)
        self.item_gate = items.gate
        self._library = kernels or load_kernels("mol_scores")
        # A single pair's weight is always 1.
        self._gate: FloatMatrix | None = None
        self._weights: tuple[npt.NDArray[np.float32], ...] = ()
        if items.gate is not None and self.num_pairs > 1:
            self._gate = np.ascontiguousarray(items.gate, dtype=np.float32)
        if pair_gate is not None and self.num_pairs > 1:
            self._weights = (
                self._packed(pair_gate.hidden_weight),
                np.ascontiguousarray(pair_gate.hidden_bias, dtype=np.float32),
                self._packed(pair_gate.out_weight),
                np.ascontiguousarray(pair_gate.out_bias, dtype=np.float32),
            )
        self._last_bounds: tuple[QueryStates, DoubleVector] | None = None

    @property
    def num_query_components(self) -> int:
        return self.shape.num_query_components

    @lazy_property
    def gate_range(self) -> tuple[DoubleVector, DoubleVector] | None:
        """Each pair's least and largest item gate (P,), 0 without items; None without gates."""
        if self.item_gate is None:
            return None
        if not self.num_items:
            return np.zeros(self.num_pairs), np.zeros(self.num_pairs)
        return self.item_gate.min(axis=0).astype(np.float64), self.item_gate.max(axis=0).astype(np.float64)

    @property
    def nbytes(self) -> int:
        gate = 0 if self.item_gate is None else self.item_gate.size * 4
        return self.components.size * 4 + gate

    @lazy_property
    def magnitudes(self) -> rounding.ItemMagnitudes:
        """The largest item values, for error bounds and certificates."""
        gate = None if self.gate_range is None else np.maximum(-self.gate_range[0], self.gate_range[1])
        return rounding.ItemMagnitudes(norms=self._largest_norms(), gate=gate, width=self.width)

    def check(self, queries: QueryStates) -> None:
        """Raise ValueError as `ItemShape.check_queries` does."""
        self.shape.check_queries(queries)

    def scores(self, queries: QueryStates) -> FloatMatrix:
        """Score every item: (B, X) float32, each within `error_bounds` of the exact value."""
        self.check(queries)
        if self.num_pairs == 1:
            return _dot_products(queries.components[:, 0], self.components[:, 0])
        out = np.empty((len(queries), self.num_items), dtype=np.float32)
        with self._problem(queries, out.size) as problem:
            self._library.freshet_mol_scores(problem, address(out))
        return out

    def scores_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[FloatVector]:
        """Score the items `rows[b]` (n_b,) for each query b in float32: (n_b,) each, within `error_bounds`."""
        return self._scores_at(queries, rows, self._library.freshet_mol_scores_at, np.float32)

    def scores_float64_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[DoubleVector]:
        """Score as `scores_at` in float64 over the stored float32 states, within `error_bounds_float64`."""
        return self._scores_at(queries, rows, self._library.freshet_mol_scores_at_float64, np.float64)

    def scores_float64(self, queries: QueryStates, query: int, rows: Rows) -> DoubleVector:
        return self.scores_float64_at(queries.take(slice(query, query + 1)), [rows])[0]

    def error_bounds(self, queries: QueryStates) -> DoubleVector:
        """Bound |float32 score - exact value| for every item, per query: (B,)."""
        # The last bounds are cached, because a search asks repeatedly.
        last = self._last_bounds
        if last is None or last[0] is not queries:
            bounds = rounding.error_bounds(queries, self.magnitudes, self.pair_gate, unit=rounding.FLOAT32)
            bounds.flags.writeable = False
            self._last_bounds = last = (queries, bounds)
        return last[1]

    def error_bounds_float64(self, queries: QueryStates) -> DoubleVector:
        """Bound |float64 score - exact value| for every item, per query: (B,)."""
        return self.error_bounds(queries) * rounding.FLOAT64_PER_FLOAT32

    def _scores_at(
        self, queries: QueryStates, rows: Sequence[Rows], function: Callable[..., object], dtype: type[Real]
    ) -> list[npt.NDArray[Real]]:
        self.check(queries)
        self._check_rows(queries, rows)
        offsets = np.cumsum([0, *map(len, rows)])
        flat = np.concatenate([*rows, np.empty(0, dtype=np.int64)]).astype(np.int64, copy=False)
        out = np.empty(len(flat), dtype=dtype)
        with self._problem(queries, len(flat)) as problem:
            function(problem, address(flat), address(offsets), address(out))
        return [out[start:stop] for start, stop in pairwise(offsets)]

    def _check_rows(self, queries: QueryStates, rows: Sequence[Rows]) -> None:
        if len(rows) != len(queries):
            raise ValueError(f"rows has {len(rows)} entries; expected one per query: {len(queries)}")
        for chosen in rows:
            if len(chosen) and (chosen.min() < 0 or chosen.max() >= self.num_items):
                raise ValueError(f"rows={chosen.min()}..{chosen.max()} allowed: 0 to {self.num_items - 1}")

    def _largest_norms(self) -> DoubleVector:
        """Each component's largest norm over all items: (P_x,)."""
        norms = np.zeros(self.num_item_components)
        sizes = (*self.components.shape, compute_threads())
        self._library.freshet_largest_norms(address(self.components), *map(ctypes.c_int64, sizes), address(norms))
        return norms

    @contextmanager
    def _problem(self, queries: QueryStates, num_pairs_scored: int) -> Iterator[object]:
        query_parts, hidden_width = queries.components.shape[1], len(self._weights[1]) if self._weights else 0
        work = num_pairs_scored * self.num_pairs * (self.width + 2 * hidden_width)
        threads = min(compute_threads(), 1 + work // _MULTIPLY_ADDS_PER_THREAD)
        gated = self._gate is not None and queries.gate is not None
        arrays = (
            np.ascontiguousarray(queries.components, dtype=np.float32),
            np.ascontiguousarray(queries.gate, dtype=np.float32) if gated else None,
            self.components,
            self._gate if gated else None,
            *(self._weights or (None,) * 4),
        )
        sizes = (len(queries), self.num_items, query_parts, self.num_item_components, self.width, hidden_width, threads)
        yield ctypes.byref(_Problem(*map(address, arrays), *sizes))

    def _packed(self, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        source = np.ascontiguousarray(weights, dtype=np.float32)
        packed = np.empty_like(source)
        rows, depth = source.shape
        self._library.freshet_pack(address(source), ctypes.c_int64(rows), ctypes.c_int64(depth), address(packed))
        return packed


def _dot_products(queries: FloatMatrix, items: FloatMatrix) -> FloatMatrix:
    """Queries (B, d) times items (X, d): (B, X).

    Items are the left factor: OpenBLAS is slow for few rows and many columns.
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
