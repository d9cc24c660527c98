"""Mixture-of-Logits scores by NumPy, in tiles that stay in cache: dot products, and everything without a kernel.

Everything is kept feature-major, (P, n) for a tile of n query-item pairs: both layers of the pair gate are then one
small matrix product each, and every elementwise step and reduction over P runs along n, where the vector units are.

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden
width, n pairs in a tile. Inside this file the pair order is p_x * P_q + p_q, which lets one product per item
component write its rows in place; weights and gates are permuted once to match.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.lazy import lazy_property
from services.algorithms.states import ItemStates, PairGate, QueryStates

FloatMatrix = npt.NDArray[np.float32]
FloatVector = npt.NDArray[np.float32]
DoubleVector = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]  # float32, or float64 for a second look

DEFAULT_TILE_BYTES = 1 << 20
_ROWS_PER_STEP = 65_536  # of a pass that needs float64 copies
_QUERIES_PER_TILE = 4  # at X larger than a tile: 10 % faster than one query at a time (8x8x32, G 128, B 32)
_SILU_FLOATS = 1 << 14  # four passes over what stays in the first caches: .75 of the time of passes over a whole tile
_DOT_FLOATS = 1 << 16  # of dot products at a time: their transposition stays in cache


@dataclass(frozen=True, kw_only=True, slots=True)
class _GateWeights:
    """The pair gate with its biases as one more column: (G, P + 1) and (P, G + 1), pairs in this file's order."""

    hidden: Floats
    out: Floats

    def double(self) -> "_GateWeights":
        return _GateWeights(hidden=self.hidden.astype(np.float64), out=self.out.astype(np.float64))


class TiledScores:
    """The NumPy path over one catalogue. The item gate is transposed when it is first needed."""

    def __init__(self, items: ItemStates, pair_gate: PairGate | None, *, tile_bytes: int = DEFAULT_TILE_BYTES) -> None:
        """Prepare X items, which fit `pair_gate`. Raises ValueError if one pair exceeds the budget."""
        self.num_items, self.num_item_components, _ = (int(size) for size in items.components.shape)
        if items.gate is not None:
            self.num_pairs = items.gate.shape[1]
        else:
            self.num_pairs = 1 if pair_gate is None else pair_gate.num_pairs
        # Row of the public order p_q * P_x + p_x for each row of this file's order p_x * P_q + p_q.
        public = np.arange(self.num_pairs).reshape(-1, self.num_item_components)
        self._pair_order = public.T.reshape(-1)
        self._components = np.ascontiguousarray(items.components)
        self._item_gate = items.gate
        self._weights: _GateWeights | None = None
        if pair_gate is not None:
            hidden = np.column_stack([pair_gate.hidden_weight[:, self._pair_order], pair_gate.hidden_bias])
            out = np.column_stack([pair_gate.out_weight[self._pair_order], pair_gate.out_bias[self._pair_order]])
            self._weights = _GateWeights(hidden=hidden, out=out)
        self._hidden_width = 0 if pair_gate is None else len(pair_gate.hidden_bias)
        bytes_per_pair = 4 * (max(self._hidden_width, self.num_pairs) + 1)
        if tile_bytes < bytes_per_pair:
            raise ValueError(f"tile_bytes is {tile_bytes}; one query-item pair needs {bytes_per_pair}")
        self._pairs_per_tile = tile_bytes // bytes_per_pair

    @lazy_property
    def _gate(self) -> FloatMatrix | None:
        return None if self._item_gate is None else np.ascontiguousarray(self._item_gate.T[self._pair_order])

    def scores(self, queries: QueryStates) -> FloatMatrix:
        """Score every item for every query: (B, X)."""
        num_queries = len(queries)
        out = np.empty((num_queries, self.num_items), dtype=np.float32)
        if not num_queries or not self.num_items:
            return out
        if self.num_pairs == 1:
            _dot_products(queries.components[:, 0], self._components[:, 0], out)
            return out
        items_per_tile = min(self.num_items, self._pairs_per_tile)
        queries_per_tile = max(1, self._pairs_per_tile // items_per_tile)
        if self.num_items > self._pairs_per_tile >= 1024:
            queries_per_tile = min(_QUERIES_PER_TILE, num_queries)
            items_per_tile = self._pairs_per_tile // queries_per_tile
        components_QBd = np.ascontiguousarray(queries.components.transpose(1, 0, 2))
        gate_PB = None
        if self._gate is not None and queries.gate is not None:
            gate_PB = queries.gate.T[self._pair_order]
        workspace = _Workspace(self.num_pairs, self._hidden_width, items_per_tile * queries_per_tile)
        for b in range(0, num_queries, queries_per_tile):
            tile_components = np.ascontiguousarray(components_QBd[:, b : b + queries_per_tile])
            tile_gate = None if gate_PB is None else gate_PB[:, b : b + queries_per_tile, None]
            for x in range(0, self.num_items, items_per_tile):
                self._score_tile(
                    tile_components,
                    tile_gate,
                    self._components[x : x + items_per_tile],
                    None if self._gate is None else self._gate[:, None, x : x + items_per_tile],
                    self._weights,
                    workspace,
                    out[b : b + queries_per_tile, x : x + items_per_tile],
                )
        return out

    def scores_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[FloatVector]:
        """Score the items `rows[b]` (n_b,) for each query b: (n_b,) each."""
        return [
            self._score_rows(queries, query, chosen, self._weights, np.float32) for query, chosen in enumerate(rows)
        ]

    def scores_float64_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[DoubleVector]:
        """The same in double precision."""
        weights = self._weights_float64
        return [self._score_rows(queries, query, chosen, weights, np.float64) for query, chosen in enumerate(rows)]

    def largest_norms(self) -> DoubleVector:
        """The largest norm over all items of each component, in float64: (P_x,)."""
        norms = np.zeros(self.num_item_components)
        for start in range(0, self.num_items, _ROWS_PER_STEP):
            rows = self._components[start : start + _ROWS_PER_STEP].astype(np.float64)
            norms = np.maximum(norms, np.linalg.norm(rows, axis=-1).max(axis=0))
        return norms

    @lazy_property
    def _weights_float64(self) -> _GateWeights | None:
        return None if self._weights is None else self._weights.double()

    def _score_rows(
        self,
        queries: QueryStates,
        query: int,
        rows: Rows,
        weights: _GateWeights | None,
        dtype: type[np.float32] | type[np.float64],
    ) -> Floats:
        """Score some items for one query in `dtype`: (len(rows),)."""
        out = np.empty((1, len(rows)), dtype=dtype)
        components = queries.components[query].astype(dtype)[:, None, :]
        gate = None
        if self._gate is not None and queries.gate is not None:
            gate = queries.gate[query, self._pair_order].astype(dtype)[:, None, None]
        step = max(1, self._pairs_per_tile // 2)
        for start in range(0, len(rows), step):
            chosen = rows[start : start + step]
            workspace = _Workspace(self.num_pairs, self._hidden_width, len(chosen), dtype=dtype)
            item_gate = None if self._gate is None else self._gate[:, chosen].astype(dtype)[:, None, :]
            items = self._components[chosen].astype(dtype)
            self._score_tile(components, gate, items, item_gate, weights, workspace, out[:, start : start + step])
        return np.asarray(out[0])

    def _score_tile(
        self,
        query_components: Floats,
        query_gate: Floats | None,
        item_components: Floats,
        item_gate: Floats | None,
        weights: _GateWeights | None,
        workspace: "_Workspace",
        out: Floats,
    ) -> None:
        """One tile: query_components (P_q, b, d), query_gate (P, b, 1), items (x, P_x, d), (P, 1, x) -> out (b, x)."""
        num_query_components, num_queries, width = query_components.shape
        num_items = len(item_components)
        flat_queries = query_components.reshape(num_query_components * num_queries, width)
        if self.num_pairs == 1:
            np.matmul(flat_queries, item_components[:, 0].T, out=out)
            return
        pairs = num_queries * num_items
        cosines = workspace.cosines(pairs)
        for p_x in range(self.num_item_components):
            rows = slice(p_x * num_query_components, (p_x + 1) * num_query_components)
            target = cosines[rows].reshape(num_query_components * num_queries, num_items)
            np.matmul(flat_queries, item_components[:, p_x].T, out=target)
        gate = workspace.gate(pairs).reshape(self.num_pairs, num_queries, num_items)
        if weights is None:
            gate.fill(0)
        else:
            hidden = workspace.hidden(pairs)
            np.matmul(weights.hidden, cosines, out=hidden[:-1])
            _silu_in_place(hidden[:-1])
            np.matmul(weights.out, hidden, out=gate.reshape(self.num_pairs, pairs))
        if query_gate is not None and item_gate is not None:
            gate += query_gate * item_gate
        _silu_in_place(gate)
        gate -= gate.max(axis=0)
        np.exp(gate, out=gate)
        total = gate.sum(axis=0)
        gate *= cosines[:-1].reshape(self.num_pairs, num_queries, num_items)
        np.divide(gate.sum(axis=0), total, out=out)


class _Workspace:
    """Buffers for one tile, reused by all tiles of a call. The last row of cosines and hidden is 1: the bias."""

    def __init__(
        self,
        num_pairs: int,
        hidden_width: int,
        size: int,
        dtype: type[np.float32] | type[np.float64] = np.float32,
    ) -> None:
        self._num_pairs, self._hidden_width = num_pairs, hidden_width
        self._cosines: Floats = np.empty((num_pairs + 1) * size, dtype=dtype)
        self._hidden: Floats = np.empty((hidden_width + 1) * size if hidden_width else 0, dtype=dtype)
        self._gate: Floats = np.empty(num_pairs * size, dtype=dtype)

    def cosines(self, pairs: int) -> Floats:
        view = self._cosines[: (self._num_pairs + 1) * pairs].reshape(self._num_pairs + 1, pairs)
        view[-1] = 1
        return view

    def hidden(self, pairs: int) -> Floats:
        view = self._hidden[: (self._hidden_width + 1) * pairs].reshape(self._hidden_width + 1, pairs)
        view[-1] = 1
        return view

    def gate(self, pairs: int) -> Floats:
        return self._gate[: self._num_pairs * pairs].reshape(self._num_pairs, pairs)


def _dot_products(queries: FloatMatrix, items: FloatMatrix, out: FloatMatrix) -> None:
    """Queries (B, d) times items (X, d) -> out (B, X).

    The items come first in the product: OpenBLAS is slow where few rows meet many columns.
    """
    if len(queries) == 1:
        np.matmul(items, queries[0], out=out[0])
        return
    transposed = np.ascontiguousarray(queries.T)
    step = max(256, _DOT_FLOATS // len(queries))
    for start in range(0, len(items), step):
        out[:, start : start + step] = (items[start : start + step] @ transposed).T


def _silu_in_place(values: Floats) -> None:
    """x / (1 + exp(-x)) of contiguous values, some at a time; where exp overflows, x / inf is the right -0."""
    flat = values.reshape(-1)
    scratch = np.empty(min(_SILU_FLOATS, flat.size), dtype=flat.dtype)
    with np.errstate(over="ignore"):
        for start in range(0, flat.size, _SILU_FLOATS):
            part = flat[start : start + _SILU_FLOATS]
            below = np.negative(part, out=scratch[: part.size])
            np.exp(below, out=below)
            below += 1
            part /= below
