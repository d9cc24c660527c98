"""TopKAvg and TopKPerEmbedding for Mixtures of Logits with their first stage over quantized vectors.

The pools come from small integer codes in cells instead of every item's floats: averaged components take a quarter of
the scan's bytes and a fraction of its items, and component pairs are searched one by one. The certificates of the plain
algorithms stay valid: scanned items are bounded by the score by code plus ||f|| times the largest residual error, the
others by ||f|| times a cell's radius. With omitted cells the latter is seldom better than the norms: "estimate".

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d width, K results, N pool size.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.pools import certificates, check_pool_size
from services.algorithms.indexes.protocol import (
    Indices,
    Mask,
    Pass,
    Pool,
    Scores,
    TopK,
    asked_again,
    empty_answer,
)
from services.algorithms.indexes.rescoring import rescore
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import (
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
from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate, QueryStates

_CHUNK = 65_536


class CodedIndex(ScoredIndex):
    """The common part. pool_size: N; visit: the visited cells, None for all."""

    name: str

    def __init__(
        self,
        items: ItemStates | MolScorer,
        pair_gate: PairGate | None = None,
        *,
        pool_size: int,
        visit: Visit | None = None,
        cells: Cells | None = None,
        seed: int = 0,
        coder: Coder = vectors_coded,
        tie_ranks: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """As `ScoredIndex`; `cells` None: `default_cells`. Raises: ValueError also for a pool_size below 1."""
        check_pool_size("pool_size", pool_size)
        self.pool_size, self._visit, self._chosen, self._seed = pool_size, visit, cells, seed
        self._coder, self._parts = coder, dict[str, Callable[[], RowCodes]]()
        self._bytes_of_codes = 0
        super().__init__(items, pair_gate, tie_ranks=tie_ranks)

    def with_sizes(self, *, pool_size: int, visit: Visit | None = None) -> Self:
        """Return the same index with other sizes; the shared codes count as the first one's bytes."""
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

    def _coded(self, part: str, vectors: Callable[[], FloatArray], width: int) -> CellScan:
        """Code X vectors (X, width) in cells. part: their name in this index."""
        cells = self._chosen or default_cells(self.num_items, width)
        part = f"{self.name}-{part}"
        codes = self._coder(part, vectors, (self.num_items, width), cells=cells, seed=self._seed)
        self._parts[codes_key(part, cells, self._seed)] = lambda: codes
        scan = CellScan(codes, tie_ranks=self.ranks)
        self._bytes_of_codes += scan.nbytes
        return scan


class QuantizedTopKAvg(CodedIndex):
    """The N best by averaged components as coded, reordered by s. Certificate: TopKAvg's, plus the codes' error.

    N is at least k.
    """

    name = "quantized_top_k_avg"

    def _prepare(self) -> None:
        means, self._largest_radius, self._largest_mean = _averages(self.scorer)
        self.cells = self._coded("averages", lambda: means, self.scorer.width)
        self._largest_norm = float(self.scorer.magnitudes.norms.max(initial=0))

    @property
    def visit(self) -> Visit:
        """The cells of a scan."""
        return self._visit or Visit(probes=self.cells.num_cells)

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """Return the top `k` by s of a pool of max(N, k), and its possible gap."""
        self.check(queries, k, allowed)
        pool = self.first_stage(queries, max(k, self.pool_size), allowed)
        answer = rescore(self.scorer, queries, [row[row >= 0] for row in pool.item_indices], k, self.ranks)
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=certificates(pool.bounds, answer.kth_scores),
            passes=(*pool.passes, *answer.passes),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """Return the `size` best by code: scores mean over p_q of <f_pq, g-bar> as coded, and the bound on the rest."""
        self.check(queries, size, allowed)
        started = time.perf_counter()
        components = queries.components.astype(np.float64)
        average = components.mean(axis=1).astype(np.float32)
        answer = self.cells.pool(average, size, visit=self.visit, allowed=allowed)
        # <f_pq, g> <= <f-bar, g-bar> + ||f_pq - f-bar|| ||g-bar|| + ||f_pq|| rho, each at its largest.
        norms = np.linalg.norm(components, axis=-1).max(axis=1, initial=0)
        apart = np.linalg.norm(components - average[:, None], axis=-1).max(axis=1, initial=0)
        bounds = answer.bounds + apart * self._largest_mean + norms * self._largest_radius
        return Pool(
            item_indices=answer.rows,
            scores=answer.scores,
            bounds=np.where(bounds < norms * self._largest_norm, bounds, np.nan),
            passes=(Pass("first_stage", time.perf_counter() - started, answer.touched[:, 0]),),
        )


class QuantizedTopKPerEmbedding(CodedIndex):
    """The union of the N best per component pair as coded, reordered by s. Certificate: a bound on items outside the
    lists.

    Cells are per component; N is doubled while a union has fewer than k items.
    """

    name = "quantized_top_k_per_embedding"

    def _prepare(self) -> None:
        components = self.scorer.components
        self.cells = [
            self._coded(f"component-{p_x}", partial(_component, components, p_x), self.scorer.width)
            for p_x in range(self.scorer.num_item_components)
        ]

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """Return the top `k` by s of the union of the N best per pair, and its possible gap."""
        self.check(queries, k, allowed)
        return self._search(queries, k, allowed, self.pool_size)

    def _search(self, queries: QueryStates, k: int, allowed: Mask | None, depth: int) -> TopK:
        """Use lists of `depth`, and deeper ones for queries with a short union; each query as if alone."""
        lists = self._lists(queries, depth, allowed)
        pools = [lists.union(query)[0] for query in range(len(queries))]
        answer = rescore(self.scorer, queries, pools, k, self.ranks)
        bounds = lists.bounds.copy()
        bounds[[len(pool) for pool in pools] == lists.num_allowed] = -np.inf
        found = TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=certificates(bounds, answer.kth_scores),
            passes=(Pass("first_stage", lists.seconds, lists.touched), *answer.passes),
        )
        return asked_again(
            found,
            lists.short(k),
            queries,
            allowed,
            lambda queries, allowed: self._search(queries, k, allowed, min(4 * lists.depth, k)),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """Return the `size` best of the union of the lists, by an item's best coded cosine among the lists that have
        it.
        """
        self.check(queries, size, allowed)
        return self._first_stage(queries, size, allowed, -(-2 * size // self.scorer.num_pairs))

    def _first_stage(self, queries: QueryStates, size: int, allowed: Mask | None, depth: int) -> Pool:
        lists = self._lists(queries, depth, allowed)
        started = time.perf_counter()
        item_indices, scores = empty_answer(len(queries), min(size, self.num_items))
        bounds = lists.bounds.copy()
        for query in range(len(queries)):
            rows, best = lists.union(query)
            order = np.lexsort((self.ranks[rows], -best))
            if len(rows) > size:
                # Listed but outside the pool: its cosines in its own lists are at most this, the others at most those
                # lists' bounds.
                bounds[query] = max(bounds[query], best[order[size]] + lists.errors[query])
            order = order[:size]
            item_indices[query, : len(order)], scores[query, : len(order)] = rows[order], best[order]
        bounds[np.count_nonzero(item_indices >= 0, axis=1) == lists.num_allowed] = -np.inf
        first = Pass("first_stage", lists.seconds + time.perf_counter() - started, lists.touched)
        pool = Pool(item_indices=item_indices, scores=scores, bounds=bounds, passes=(first,))
        return asked_again(
            pool,
            lists.short(size),
            queries,
            allowed,
            lambda queries, allowed: self._first_stage(queries, size, allowed, min(4 * lists.depth, size)),
        )

    def _lists(self, queries: QueryStates, depth: int, allowed: Mask | None) -> "_Lists":
        return _Lists(self.cells, queries, min(depth, self.num_items), self._visit, allowed)


class _Lists:
    """The best by code of every component pair of B queries, P lists of `depth` each."""

    def __init__(
        self, cells: Sequence[CellScan], queries: QueryStates, depth: int, visit: Visit | None, allowed: Mask | None
    ) -> None:
        started = time.perf_counter()
        self.depth, self._num_items = depth, cells[0].num_items
        num_queries, p_q, width = queries.components.shape
        lists = (num_queries, len(cells), p_q)
        self._rows = np.empty((*lists, depth), dtype=np.int64)
        self._scores = np.empty((*lists, depth))
        bounds = np.empty(lists)
        errors = np.zeros((num_queries, p_q))
        self.touched = np.zeros(num_queries, dtype=np.int64)
        # Queries with a common mask are searched together; otherwise one by one.
        whole = [slice(0, num_queries)] if allowed is None or allowed.ndim == 1 else []
        for chosen in whole or [slice(query, query + 1) for query in range(num_queries)]:
            count = chosen.stop - chosen.start
            mask = allowed if allowed is None or allowed.ndim == 1 else allowed[chosen.start]
            flat = queries.components[chosen].reshape(-1, width)
            for p_x, scan in enumerate(cells):
                everything = Visit(probes=scan.num_cells)
                found = scan.pool(flat, depth, visit=visit or everything, allowed=mask)
                self._rows[chosen, p_x] = found.rows.reshape(count, p_q, depth)
                self._scores[chosen, p_x] = found.scores.reshape(count, p_q, depth)
                bounds[chosen, p_x] = found.bounds.reshape(count, p_q)
                errors[chosen] = np.maximum(errors[chosen], scan.errors(flat).reshape(count, p_q))
                scanned = found.touched[:, 0].reshape(count, p_q).max(axis=1)
                self.touched[chosen] = np.maximum(self.touched[chosen], scanned)
        self.num_allowed: Indices = count_passing(allowed, num_queries, self._num_items)
        self.bounds: Scores = bounds.max(axis=(1, 2), initial=-np.inf)
        self.errors: Scores = errors.max(axis=1, initial=0)
        self.seconds = time.perf_counter() - started

    def union(self, query: int) -> tuple[Indices, Scores]:
        """Return the distinct rows of a query's lists, by row number, and the best score of each."""
        rows, scores = self._rows[query].reshape(-1), self._scores[query].reshape(-1)
        rows, scores = rows[rows >= 0], scores[rows >= 0]
        distinct, inverse = np.unique(rows, return_inverse=True)
        best = np.full(len(distinct), -np.inf)
        np.maximum.at(best, inverse, scores)
        return distinct, best

    def short(self, wanted: int) -> Indices:
        """Return the queries whose union has fewer than `wanted` items although deeper lists would have more: (n,)."""
        if self.depth >= min(wanted, self._num_items):
            return np.empty(0, dtype=np.int64)
        sizes = np.array([len(self.union(query)[0]) for query in range(len(self._rows))], dtype=np.int64)
        return np.flatnonzero((sizes < wanted) & (sizes < self.num_allowed))


def _component(components: FloatArray, p_x: int) -> FloatArray:
    return np.ascontiguousarray(components[:, p_x])


def _averages(scorer: MolScorer) -> tuple[npt.NDArray[np.float32], float, float]:
    """Return mean components (X, d) in float32; the largest distance of a component from its stored mean; the largest
    norm.
    """
    means = np.empty((scorer.num_items, scorer.width), dtype=np.float32)
    largest_radius = largest_mean = 0.0
    for x in range(0, scorer.num_items, _CHUNK):
        rows = slice(x, x + _CHUNK)
        exact = scorer.components[rows].astype(np.float64)
        means[rows] = exact.mean(axis=1)
        stored = means[rows].astype(np.float64)
        largest_radius = max(largest_radius, float(np.linalg.norm(exact - stored[:, None], axis=-1).max()))
        largest_mean = max(largest_mean, float(np.linalg.norm(stored, axis=-1).max()))
    return means, largest_radius * (1 + 1e-12), largest_mean * (1 + 1e-12)
