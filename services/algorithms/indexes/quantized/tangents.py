"""The first stage of a Mixture of Logits by its tangents: plain dot products that equal the mixture where it is
largest.

s(q, x) = sum_p pi_p c_p is a function of the item's components g (the cosines c are linear in them) and its gate. Its
tangent at one item is <v, (g, gate)> plus a constant, with v computed from the query and that item. A query has one
tangent per group of its best items with the same pair of largest weight. Each tangent adds its best items by code to
the pool (decision 046). The method is our own; TopKAvg (arXiv:2407.15462, section 3.2) is the same with equal weights.

Nothing bounds the difference of s and a tangent: the certificate is "estimate" unless the pool has all allowed items.
Measurements: docs/benchmarks/large-catalogues.md.

Letters: B queries, X items, P_x item components, P pairs, d width, M tangents of a query, n items, w = P_x d + P
coordinates (P_x d without gates), N pool size. Cost: M scans of w / 2 bytes per item of the visited cells, and full
scores of the sample and the pool. Memory: w / 2 + 4 bytes per item.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.pools import certificates, check_pool_size
from services.algorithms.indexes.protocol import Indices, Mask, Pass, Pool, Scores, TopK, empty_answer
from services.algorithms.indexes.rescoring import rescore
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import (
    CellAnswer,
    Cells,
    CellScan,
    Coder,
    RowCodes,
    Visit,
    codes_key,
    default_cells,
    vectors_coded,
)
from services.algorithms.ops.top_rows import count_passing
from services.algorithms.scoring.states import ItemStates, QueryStates

DoubleArray = npt.NDArray[np.float64]

_SAMPLE, _CENTRE = 2_048, 64
_LOOK = Visit(probes=8)
# Cells whose items are not expected to reach the pool are omitted: a quarter of the cells finds as much as all.
_REACH = 0.5
_CHUNK = 65_536


class VectorScan(Protocol):
    """Coded items (X, w), searched by dot products."""

    @property
    def num_cells(self) -> int: ...

    def pool(
        self, queries: npt.NDArray[np.float32], size: int, /, *, visit: Visit, allowed: Mask | None = None
    ) -> CellAnswer:
        """The `size` best allowed items, or fewer if there are fewer, for each query (M, w). allowed: (X,)."""


class TangentIndex(ScoredIndex, ABC):
    """The N / M best items by code for each of a query's M tangents, at least k each; their union is reordered by s.

    Certificate: an estimate. pool_size: N; visit: the visited cells, None for all.
    """

    name: str
    _gate_scale: DoubleArray | None = None  # None: from the items' gates

    def __init__(
        self,
        items: MolScorer,
        *,
        pool_size: int,
        visit: Visit | None = None,
        cells: Cells | None = None,
        seed: int = 0,
        coder: Coder = vectors_coded,
    ) -> None:
        """Prepare like `ScoredIndex`. cells: None for the class's format. Raises: ValueError also for a pool_size below
        1.
        """
        check_pool_size("pool_size", pool_size)
        self.pool_size, self._visit, self._chosen, self._seed = pool_size, visit, cells, seed
        self._coder, self._parts = coder, dict[str, Callable[[], RowCodes]]()
        self._bytes_of_codes = 0
        super().__init__(items)

    def with_sizes(self, *, pool_size: int, visit: Visit | None = None) -> Self:
        """An index with other sizes that shares these codes. Its `nbytes` does not count them."""
        check_pool_size("pool_size", pool_size)
        other = copy(self)
        other.pool_size, other._visit, other._bytes_of_codes = pool_size, visit, 0
        return other

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._bytes_of_codes

    @property
    def row_codes(self) -> Mapping[str, RowCodes]:
        return {key: of_part() for key, of_part in self._parts.items()}

    def _prepare(self) -> None:
        num_items = self.num_items
        generator = np.random.default_rng(self._seed)
        chosen = generator.choice(num_items, min(num_items, _SAMPLE), replace=False)
        self._sample = np.sort(chosen).astype(np.int64)
        self._slopes = Slopes(self.scorer, self._gate_scale)
        self.cells = self._scan()

    @abstractmethod
    def _scan(self) -> VectorScan:
        """All items' coded vectors."""

    @property
    def visit(self) -> Visit:
        return self._visit or Visit(probes=self.cells.num_cells)

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None, max_gap: float = 0.0) -> TopK:
        """The top `k` by s of a pool of about N items."""
        self.check(queries, k, allowed)
        started = time.perf_counter()
        lists = self._lists(queries, self.pool_size, k, allowed)
        pools = [np.unique(rows[rows >= 0]) for rows, _ in lists.found]
        first = Pass("first_stage", time.perf_counter() - started, lists.touched)
        answer = rescore(self.scorer, queries, pools, k)
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=certificates(self._bounds(queries, pools, allowed), answer.kth_scores),
            passes=(first, *answer.passes),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best items; an item's score is the highest value of the query's tangents at its code."""
        self.check(queries, size, allowed)
        started = time.perf_counter()
        lists = self._lists(queries, 2 * size, size, allowed)
        item_indices, scores = empty_answer(len(queries), min(size, self.num_items))
        pools = []
        for query, (listed, heights) in enumerate(lists.found):
            rows, inverse = np.unique(listed, return_inverse=True)
            best = np.full(len(rows), -np.inf)
            np.maximum.at(best, inverse.ravel(), heights.ravel())
            rows, best = rows[rows >= 0], best[rows >= 0]
            order = np.argsort(-best, kind="stable")[:size]
            item_indices[query, : len(order)], scores[query, : len(order)] = rows[order], best[order]
            pools.append(rows[order])
        first = Pass("first_stage", time.perf_counter() - started, lists.touched)
        bounds = self._bounds(queries, pools, allowed)
        return Pool(item_indices=item_indices, scores=scores, bounds=bounds, passes=(first,))

    def _bounds(self, queries: QueryStates, pools: Sequence[Indices], allowed: Mask | None) -> Scores:
        """-inf for a pool with all allowed items, else NaN, which means no proof."""
        counts = count_passing(allowed, len(queries), self.num_items)
        sizes = np.array([len(pool) for pool in pools], dtype=np.int64)
        return np.where(sizes == counts, -np.inf, np.nan)

    def _lists(self, queries: QueryStates, size: int, least: int, allowed: Mask | None) -> "_Lists":
        """For each of a query's M tangents, the `size` / M best items by code, at least `least`."""
        found, touched = [], np.zeros(len(queries), dtype=np.int64)
        for query, (vectors, heights) in enumerate(self.tangents(queries)):
            mask = allowed if allowed is None or allowed.ndim == 1 else allowed[query]
            depth = min(max(-(-size // len(vectors)), least), self.num_items)
            answer = self.cells.pool(vectors, depth, visit=self.visit, allowed=mask)
            found.append((answer.rows, answer.scores + heights[:, None]))
            touched[query] = answer.touched[:, 0].max()
        return _Lists(found, touched)

    def tangents(self, queries: QueryStates) -> list[tuple[npt.NDArray[np.float32], Scores]]:
        """Each query's tangents: vectors (M, w) and heights at the origin (M,). A plain dot product is its own
        tangent.
        """
        if self.scorer.num_pairs == 1:
            return self._tangents(queries, [self._sample[:1]] * len(queries))
        sampled = self.scorer.scores_at(queries, [self._sample] * len(queries))
        known = [self._sample[_best(scores, _CENTRE)] for scores in sampled]
        near = self._tangents(queries, known)
        looked = [self.cells.pool(vectors, _CENTRE, visit=_LOOK).rows.ravel() for vectors, _ in near]
        rows = [np.union1d(old, new[new >= 0]) for old, new in zip(known, looked, strict=True)]
        scored = self.scorer.scores_at(queries, rows)
        known = [one[_best(scores, _CENTRE)] for one, scores in zip(rows, scored, strict=True)]
        return self._tangents(queries, known)

    def _tangents(self, queries: QueryStates, known: Sequence[Indices]) -> list[tuple[npt.NDArray[np.float32], Scores]]:
        return [self._slopes.at(queries.take([query]), rows) for query, rows in enumerate(known)]


class QuantizedTangents(TangentIndex):
    """Tangents over scalar codes."""

    name = "quantized_tangents"

    def _scan(self) -> VectorScan:
        # 4 bits for every coordinate find .9925 of the top 100 of a million items in 1.9 ms (N 2,000); 8 bits find
        # .9942 in 2.4 ms. Two thirds of the coordinates find .936.
        cells = Cells(num_cells=default_cells(self.num_items, self.scorer.width).num_cells, bits=4)
        cells, part = self._chosen or cells, f"{self.name}-slopes"
        shape = (self.num_items, self._slopes.width)
        codes = self._coder(part, self._slopes.vectors, shape, cells=cells, seed=self._seed)
        self._parts[codes_key(part, cells, self._seed)] = lambda: codes
        scan = CellScan(codes)
        self._bytes_of_codes += scan.nbytes
        return scan

    @property
    def visit(self) -> Visit:
        return self._visit or Visit(probes=self.cells.num_cells, reach=_REACH)


@dataclass(frozen=True, slots=True)
class _Lists:
    """Per query, rows (M, n) and values (M, n), padded with -1 and -inf. touched (B,): scanned items."""

    found: list[tuple[Indices, Scores]]
    touched: Indices


class Slopes:
    """Items as vectors (w,) for tangents, and one query's tangents.

    gate_scale (P,): divisor of item gates, by default the gates' spread; slopes by a gate are multiplied by it. All
    coordinates are coded with the same step, so gates must have the components' magnitude.
    """

    def __init__(self, scorer: MolScorer, gate_scale: DoubleArray | None = None) -> None:
        self._scorer = scorer
        _, num_components, width = scorer.components.shape
        self._split = num_components * width
        gate = scorer.item_gate
        self.width = self._split + (0 if gate is None else scorer.num_pairs)
        if gate is not None and gate_scale is None:
            spread = np.maximum(gate[:: max(1, len(gate) // 100_000)].std(axis=0), 1e-6)
            gate_scale = spread.astype(np.float64) * width**0.5
        self.gate_scale = None if gate is None else gate_scale
        network = scorer.pair_gate
        self._network = (
            None
            if network is None
            else tuple(
                array.astype(np.float64)
                for array in (network.hidden_weight, network.hidden_bias, network.out_weight, network.out_bias)
            )
        )

    def vectors(self) -> npt.NDArray[np.float32]:
        """The items' vectors (X, w)."""
        scorer = self._scorer
        vectors = np.empty((scorer.num_items, self.width), dtype=np.float32)
        states = ItemStates(components=scorer.components, gate=scorer.item_gate)
        for x in range(0, scorer.num_items, _CHUNK):
            self.write(states.take(slice(x, x + _CHUNK)), vectors[x : x + _CHUNK])
        return vectors

    def write(self, items: ItemStates, out: npt.NDArray[np.float32]) -> None:
        """Write some items' vectors: out (n, w)."""
        out[:, : self._split] = items.components.reshape(len(items), -1)
        if items.gate is not None and self.gate_scale is not None:
            out[:, self._split :] = items.gate / self.gate_scale

    def at(self, query: QueryStates, rows: Indices) -> tuple[npt.NDArray[np.float32], Scores]:
        """One query's tangents: vectors (M, w) and heights (M,).

        Items `rows` (n,) with the same pair of largest weight form a group; each tangent is at a group's mean.
        """
        components = query.components[0].astype(np.float64)
        cosines = np.einsum("qd,npd->nqp", components, self._scorer.components[rows].astype(np.float64))
        cosines = cosines.reshape(len(rows), -1)
        gates = None
        if self._scorer.item_gate is not None and query.gate is not None:
            gates = self._scorer.item_gate[rows].astype(np.float64)
        weights = self._parts(query, cosines, gates)[0]
        heaviest = weights.argmax(axis=1)
        groups = [np.flatnonzero(heaviest == pair) for pair in np.unique(heaviest)]
        c = np.stack([cosines[group].mean(axis=0) for group in groups])
        g = None if gates is None else np.stack([gates[group].mean(axis=0) for group in groups])
        score, by_cosine, by_gate = self._slope(query, c, g)
        num_components = self._scorer.num_item_components
        by_component = np.einsum("mqp,qd->mpd", by_cosine.reshape(len(groups), -1, num_components), components).reshape(
            len(groups), -1
        )
        height = score - (by_cosine * c).sum(axis=1)
        vectors = np.zeros((len(groups), self.width))
        vectors[:, : self._split] = by_component
        if g is not None and by_gate is not None and self.gate_scale is not None:
            height = height - (by_gate * g).sum(axis=1)
            vectors[:, self._split :] = by_gate * self.gate_scale
        return vectors.astype(np.float32), height

    def _parts(
        self, query: QueryStates, cosines: DoubleArray, gates: DoubleArray | None
    ) -> tuple[DoubleArray, DoubleArray, DoubleArray | None]:
        """Gate weights (n, P), their inputs z (n, P), and the hidden layer's inputs (n, G)."""
        z, hidden = np.zeros_like(cosines), None
        if self._network is not None:
            w1, b1, w2, b2 = self._network
            hidden = cosines @ w1.T + b1
            z = z + _silu(hidden) @ w2.T + b2
        if gates is not None and query.gate is not None:
            z = z + query.gate[0].astype(np.float64) * gates
        logits = _silu(z)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True), z, hidden

    def _slope(
        self, query: QueryStates, cosines: DoubleArray, gates: DoubleArray | None
    ) -> tuple[DoubleArray, DoubleArray, DoubleArray | None]:
        """s (m,) and its derivatives (m, P) by cosines and (m, P) by the item gate."""
        weights, z, hidden = self._parts(query, cosines, gates)
        score = (weights * cosines).sum(axis=1)
        by_z = weights * (cosines - score[:, None]) * _silu_slope(z)
        by_cosine = weights
        if self._network is not None and hidden is not None:
            w1, _, w2, _ = self._network
            by_cosine = by_cosine + ((by_z @ w2) * _silu_slope(hidden)) @ w1
        by_gate = None
        if gates is not None and query.gate is not None:
            by_gate = by_z * query.gate[0].astype(np.float64)
        return score, by_cosine, by_gate


def _best(scores: npt.NDArray[np.float32], count: int) -> Indices:
    return np.argpartition(-scores, count)[:count] if count < len(scores) else np.arange(len(scores))


def _silu(x: DoubleArray) -> DoubleArray:
    return x * _sigmoid(x)


def _sigmoid(x: DoubleArray) -> DoubleArray:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))


def _silu_slope(x: DoubleArray) -> DoubleArray:
    sigmoid = _sigmoid(x)
    return np.asarray(sigmoid * (1 + x * (1 - sigmoid)))
