"""Mixture-of-Logits scores by the compiled kernel (cpu.cpp): item states as stored, weights packed once.

Everything fits in tiles of a few dozen items, so no call needs memory beyond its result and about 200 KB per thread.

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address
from services.algorithms.native.threads import compute_threads
from services.algorithms.states import ItemStates, PairGate, QueryStates

Rows = npt.NDArray[np.int64]

# A second thread pays from about here (60 us of work against 20 us to start it).
_MULTIPLY_ADDS_PER_THREAD = 4_000_000


class _Problem(ctypes.Structure):
    """`FreshetMolProblem` of cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_components", "query_gate", "item_components", "item_gate")),
        *((name, ctypes.c_void_p) for name in ("hidden_weight", "hidden_bias", "out_weight", "out_bias")),
        *((name, ctypes.c_int64) for name in ("num_queries", "num_items", "query_parts", "item_parts")),
        *((name, ctypes.c_int64) for name in ("width", "hidden_width", "threads")),
    )


class NativeScores:
    """The kernels of one library over one catalogue. Holds the items' arrays as given (copied if not C-contiguous)."""

    def __init__(self, library: ctypes.CDLL, items: ItemStates, pair_gate: PairGate | None) -> None:
        """Prepare X items, which fit `pair_gate`.

        The softmax over a single pair is 1 whatever the gates say, so they are left out there.
        """
        self._library = library
        self._components = np.ascontiguousarray(items.components, dtype=np.float32)
        self._gate: npt.NDArray[np.float32] | None = None
        self._weights: tuple[npt.NDArray[np.float32], ...] = ()
        if items.gate is not None and items.gate.shape[1] > 1:
            self._gate = np.ascontiguousarray(items.gate, dtype=np.float32)
        if pair_gate is not None and pair_gate.num_pairs > 1:
            self._weights = (
                self._packed(pair_gate.hidden_weight),
                np.ascontiguousarray(pair_gate.hidden_bias, dtype=np.float32),
                self._packed(pair_gate.out_weight),
                np.ascontiguousarray(pair_gate.out_bias, dtype=np.float32),
            )

    def scores(self, queries: QueryStates) -> npt.NDArray[np.float32]:
        """Score every item for every query: (B, X)."""
        out = np.empty((len(queries), len(self._components)), dtype=np.float32)
        with self._problem(queries, out.size) as problem:
            self._library.freshet_mol_scores(problem, address(out))
        return out

    def scores_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[npt.NDArray[np.float32]]:
        """Score the items `rows[b]` (n_b,) for each query b: (n_b,) each."""
        flat, offsets = self._flatten(rows)
        out = np.empty(len(flat), dtype=np.float32)
        with self._problem(queries, len(flat)) as problem:
            self._library.freshet_mol_scores_at(problem, address(flat), address(offsets), address(out))
        return [out[start:stop] for start, stop in pairwise(offsets)]

    def scores_float64_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[npt.NDArray[np.float64]]:
        """The same in double precision."""
        flat, offsets = self._flatten(rows)
        out = np.empty(len(flat), dtype=np.float64)
        with self._problem(queries, len(flat)) as problem:
            self._library.freshet_mol_scores_at_float64(problem, address(flat), address(offsets), address(out))
        return [out[start:stop] for start, stop in pairwise(offsets)]

    def largest_norms(self) -> npt.NDArray[np.float64]:
        """The largest norm over all items of each component: (P_x,)."""
        num_items, parts, width = self._components.shape
        norms = np.zeros(parts)
        sizes = (num_items, parts, width, compute_threads())
        self._library.freshet_largest_norms(address(self._components), *map(ctypes.c_int64, sizes), address(norms))
        return norms

    def _flatten(self, rows: Sequence[Rows]) -> tuple[Rows, Rows]:
        """All rows in one array and where each query's begin: (N,), (B + 1,)."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(chosen) for chosen in rows], out=offsets[1:])
        flat = np.concatenate([*rows, np.empty(0, dtype=np.int64)]).astype(np.int64, copy=False)
        return flat, offsets

    @contextmanager
    def _problem(self, queries: QueryStates, num_pairs_scored: int) -> Iterator[object]:
        """The arguments of one call, whose arrays live as long as the context."""
        num_items, item_parts, width = self._components.shape
        query_parts = queries.components.shape[1]
        pairs = query_parts * item_parts
        hidden_width = len(self._weights[1]) if self._weights else 0
        work = num_pairs_scored * pairs * (width + 2 * hidden_width)
        threads = min(compute_threads(), 1 + work // _MULTIPLY_ADDS_PER_THREAD)
        gated = self._gate is not None and queries.gate is not None
        arrays = (
            np.ascontiguousarray(queries.components, dtype=np.float32),
            np.ascontiguousarray(queries.gate, dtype=np.float32) if gated else None,
            self._components,
            self._gate if gated else None,
            *(self._weights or (None,) * 4),
        )
        sizes = (len(queries), num_items, query_parts, item_parts, width, hidden_width, threads)
        yield ctypes.byref(_Problem(*map(address, arrays), *sizes))

    def _packed(self, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        source = np.ascontiguousarray(weights, dtype=np.float32)
        packed = np.empty_like(source)
        rows, depth = source.shape
        self._library.freshet_pack(address(source), ctypes.c_int64(rows), ctypes.c_int64(depth), address(packed))
        return packed
