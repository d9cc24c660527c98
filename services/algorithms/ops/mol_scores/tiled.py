"""Mixture-of-Logits scores by PyTorch, in tiles that stay in cache: the fallback where no kernel was built.

Everything is kept feature-major, (P, n) for a tile of n query-item pairs: both layers of the pair gate are then one
small matrix product each, and every elementwise step and reduction over P runs along n, where the vector units are.
Measured (EPYC, 1 thread, 4x2x32, G 64, X 3,706, B 1): 0.27 ms with 1 MiB tiles, 0.52 ms with 0.13 MiB tiles.

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden
width, n pairs in a tile. Inside this file the pair order is p_x * P_q + p_q, which lets one product per item
component write its rows in place; weights and gates are permuted once to match.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.lazy import lazy_property
from services.algorithms.states import ItemStates, PairGate, QueryStates

FloatMatrix = npt.NDArray[np.float32]
FloatVector = npt.NDArray[np.float32]
DoubleVector = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

DEFAULT_TILE_BYTES = 1 << 20
_ROWS_PER_STEP = 65_536  # of a pass that needs float64 copies
_QUERIES_PER_TILE = 4  # at X larger than a tile: 10 % faster than one query at a time (8x8x32, G 128, B 32)


def as_tensor(array: npt.NDArray[np.floating]) -> torch.Tensor:
    """View an array as a tensor without copying, read-only memory maps included (they are never written to)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array))


@dataclass(frozen=True, kw_only=True, slots=True)
class _GateWeights:
    """The pair gate with its biases as one more column: (G, P + 1) and (P, G + 1), pairs in this file's order."""

    hidden: torch.Tensor
    out: torch.Tensor

    def double(self) -> "_GateWeights":
        return _GateWeights(hidden=self.hidden.double(), out=self.out.double())


class TiledScores:
    """The PyTorch path over one catalogue. The item gate is transposed when it is first needed."""

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
        self._components = as_tensor(items.components)
        self._item_gate = items.gate
        self._weights: _GateWeights | None = None
        if pair_gate is not None:
            hidden = np.column_stack([pair_gate.hidden_weight[:, self._pair_order], pair_gate.hidden_bias])
            out = np.column_stack([pair_gate.out_weight[self._pair_order], pair_gate.out_bias[self._pair_order]])
            self._weights = _GateWeights(hidden=as_tensor(hidden), out=as_tensor(out))
        self._hidden_width = 0 if pair_gate is None else len(pair_gate.hidden_bias)
        bytes_per_pair = 4 * (max(self._hidden_width, self.num_pairs) + 1)
        if tile_bytes < bytes_per_pair:
            raise ValueError(f"tile_bytes is {tile_bytes}; one query-item pair needs {bytes_per_pair}")
        self._pairs_per_tile = tile_bytes // bytes_per_pair

    @lazy_property
    def _gate(self) -> torch.Tensor | None:
        return None if self._item_gate is None else as_tensor(self._item_gate.T[self._pair_order])

    def scores(self, queries: QueryStates) -> FloatMatrix:
        """Score every item for every query: (B, X)."""
        num_queries = len(queries)
        out = torch.empty(num_queries, self.num_items)
        if not num_queries or not self.num_items:
            return np.asarray(out.numpy())
        items_per_tile = min(self.num_items, self._pairs_per_tile)
        queries_per_tile = max(1, self._pairs_per_tile // items_per_tile)
        if self.num_items > self._pairs_per_tile >= 1024:
            queries_per_tile = min(_QUERIES_PER_TILE, num_queries)
            items_per_tile = self._pairs_per_tile // queries_per_tile
        components_QBd = torch.from_numpy(np.ascontiguousarray(queries.components.transpose(1, 0, 2)))
        gate_PB = None
        if self._gate is not None and queries.gate is not None:
            gate_PB = torch.from_numpy(queries.gate.T[self._pair_order])
        workspace = _Workspace(self.num_pairs, self._hidden_width, items_per_tile * queries_per_tile)
        for b in range(0, num_queries, queries_per_tile):
            tile_components = components_QBd[:, b : b + queries_per_tile].contiguous()
            tile_gate = None if gate_PB is None else gate_PB[:, b : b + queries_per_tile, None]
            for x in range(0, self.num_items, items_per_tile):
                tile_out = out[b : b + queries_per_tile, x : x + items_per_tile]
                item_gate = None if self._gate is None else self._gate[:, None, x : x + items_per_tile]
                self._score_tile(
                    tile_components,
                    tile_gate,
                    self._components[x : x + items_per_tile],
                    item_gate,
                    self._weights,
                    workspace,
                    tile_out,
                )
        return np.asarray(out.numpy())

    def scores_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[FloatVector]:
        """Score the items `rows[b]` (n_b,) for each query b: (n_b,) each."""
        out = []
        for query, chosen in enumerate(rows):
            scores = torch.empty(1, len(chosen))
            self._score_rows(queries, query, chosen, self._weights, scores)
            out.append(np.asarray(scores[0].numpy()))
        return out

    def scores_float64_at(self, queries: QueryStates, rows: Sequence[Rows]) -> list[DoubleVector]:
        """The same in double precision."""
        out = []
        for query, chosen in enumerate(rows):
            scores = torch.empty(1, len(chosen), dtype=torch.float64)
            self._score_rows(queries, query, chosen, self._weights_float64, scores)
            out.append(np.asarray(scores[0].numpy()))
        return out

    def largest_norms(self) -> DoubleVector:
        """The largest norm over all items of each component, in float64: (P_x,)."""
        norms = np.zeros(self.num_item_components)
        for start in range(0, self.num_items, _ROWS_PER_STEP):
            rows = self._components[start : start + _ROWS_PER_STEP].double()
            norms = np.maximum(norms, torch.linalg.vector_norm(rows, dim=-1).amax(dim=0).numpy())
        return norms

    @lazy_property
    def _weights_float64(self) -> _GateWeights | None:
        return None if self._weights is None else self._weights.double()

    def _score_rows(
        self, queries: QueryStates, query: int, rows: Rows, weights: _GateWeights | None, out: torch.Tensor
    ) -> None:
        """Score some items for one query in the dtype of `out` (1, len(rows))."""
        dtype = out.dtype
        components = torch.from_numpy(np.ascontiguousarray(queries.components[query])).to(dtype)[:, None, :]
        gate = None
        if self._gate is not None and queries.gate is not None:
            gate = torch.from_numpy(queries.gate[query, self._pair_order]).to(dtype)[:, None, None]
        step = max(1, self._pairs_per_tile // 2)
        for start in range(0, len(rows), step):
            chosen = torch.from_numpy(np.ascontiguousarray(rows[start : start + step]))
            workspace = _Workspace(self.num_pairs, self._hidden_width, len(chosen), dtype=dtype)
            item_gate = None if self._gate is None else self._gate[:, chosen].to(dtype)[:, None, :]
            tile_out = out[:, start : start + step]
            items = self._components[chosen].to(dtype)
            self._score_tile(components, gate, items, item_gate, weights, workspace, tile_out)

    def _score_tile(
        self,
        query_components: torch.Tensor,
        query_gate: torch.Tensor | None,
        item_components: torch.Tensor,
        item_gate: torch.Tensor | None,
        weights: _GateWeights | None,
        workspace: "_Workspace",
        out: torch.Tensor,
    ) -> None:
        """One tile: query_components (P_q, b, d), query_gate (P, b, 1), items (x, P_x, d), (P, 1, x) -> out (b, x)."""
        num_query_components, num_queries, width = query_components.shape
        num_items = len(item_components)
        flat_queries = query_components.view(num_query_components * num_queries, width)
        if self.num_pairs == 1:
            torch.mm(flat_queries, item_components[:, 0].T, out=out)
            return
        pairs = num_queries * num_items
        cosines = workspace.cosines(pairs)
        for p_x in range(self.num_item_components):
            rows = slice(p_x * num_query_components, (p_x + 1) * num_query_components)
            target = cosines[rows].view(num_query_components * num_queries, num_items)
            torch.mm(flat_queries, item_components[:, p_x].T, out=target)
        gate = workspace.gate(pairs).view(self.num_pairs, num_queries, num_items)
        if weights is None:
            gate.zero_()
        else:
            hidden = workspace.hidden(pairs)
            torch.mm(weights.hidden, cosines, out=hidden[:-1])
            torch.nn.functional.silu(hidden[:-1], inplace=True)
            torch.mm(weights.out, hidden, out=gate.view(self.num_pairs, pairs))
        if query_gate is not None and item_gate is not None:
            gate.addcmul_(query_gate, item_gate)
        torch.nn.functional.silu(gate, inplace=True)
        gate.sub_(gate.amax(dim=0)).exp_()
        total = gate.sum(dim=0)
        gate.mul_(cosines[:-1].view(self.num_pairs, num_queries, num_items))
        torch.div(gate.sum(dim=0), total, out=out)


class _Workspace:
    """Buffers for one tile, reused by all tiles of a call. The last row of cosines and hidden is 1: the bias."""

    def __init__(self, num_pairs: int, hidden_width: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        self._num_pairs, self._hidden_width = num_pairs, hidden_width
        self._cosines = torch.empty((num_pairs + 1) * size, dtype=dtype)
        self._hidden = torch.empty((hidden_width + 1) * size if hidden_width else 0, dtype=dtype)
        self._gate = torch.empty(num_pairs * size, dtype=dtype)

    def cosines(self, pairs: int) -> torch.Tensor:
        view = self._cosines[: (self._num_pairs + 1) * pairs].view(self._num_pairs + 1, pairs)
        view[-1] = 1
        return view

    def hidden(self, pairs: int) -> torch.Tensor:
        view = self._hidden[: (self._hidden_width + 1) * pairs].view(self._hidden_width + 1, pairs)
        view[-1] = 1
        return view

    def gate(self, pairs: int) -> torch.Tensor:
        return self._gate[: self._num_pairs * pairs].view(self._num_pairs, pairs)
