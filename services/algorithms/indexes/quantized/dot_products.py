"""Quantized finds the top K of plain dot products by small integer codes in cells, and evaluates them exactly.

For two-tower models and imported embeddings (P = 1, any norm). One native call chooses cells, scans codes, collects
a pool and evaluates it in float64 (ops/quantized_scan).

With `visit`, only some cells are scanned. This is fast, but the gap depends on the omitted cells' radii and is usually
far above 0, or there is no proof. Otherwise a bound excludes items: ||q|| times a cell's largest residual error plus
the error of the query's code. This answer is exact, with a pool of about 2 K for 8-bit codes.

Letters: B queries, K results, N pool size.
"""

import math
import time
from collections.abc import Mapping

import numpy as np

from services.algorithms.indexes.pools import check_pool_size
from services.algorithms.indexes.protocol import (
    EXACT,
    Certificate,
    Mask,
    Pass,
    Pool,
    Scores,
    TopK,
    certificate,
)
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
from services.algorithms.scoring.states import FloatArray, QueryStates

# Absolute error allowance for products of denormal numbers.
_SMALLEST = 1e-35


class Quantized(ScoredIndex):
    """The top K by dot product. Certificate: exact without `visit`; else the gap follows from the omitted cells'
    radii.
    """

    name = "quantized"

    def __init__(
        self,
        items: MolScorer,
        *,
        pool_size: int = 1,
        visit: Visit | None = None,
        cells: Cells | CellScan | None = None,
        seed: int = 0,
        coder: Coder = vectors_coded,
    ) -> None:
        """Prepare like `ScoredIndex`. pool_size: N, how many best items by code are evaluated exactly, at least k.

        visit: None for an exact search. cells: `default_cells` if None; a CellScan is shared.
        Raises: ValueError also for more than one component pair, or if sizes disagree.
        """
        check_pool_size("pool_size", pool_size)
        super().__init__(items)
        if self.scorer.num_pairs != 1:
            raise ValueError(f"items make {self.scorer.num_pairs} pairs; allowed: 1, a plain dot product")
        self.pool_size, self.visit, self._codes = pool_size, visit, dict[str, RowCodes]()
        vectors = self.scorer.components[:, 0]
        if isinstance(cells, CellScan):
            if cells.num_items != self.num_items:
                raise ValueError(f"cells hold {cells.num_items} items; the index has {self.num_items}")
            self.cells = cells
        else:
            chosen = default_cells(*vectors.shape) if cells is None else cells
            part = f"{self.name}-items"
            codes = coder(part, lambda: vectors, vectors.shape, cells=chosen, seed=seed)
            self._codes = {codes_key(part, chosen, seed): codes}
            self.cells = CellScan(codes, vectors=vectors)
        self._largest_norm = float(self.scorer.magnitudes.norms.max(initial=0))
        # A dot product's float64 error bound is proportional to the query's norm, except for denormal numbers.
        direction = np.zeros((1, 1, self.scorer.width), dtype=np.float32)
        direction[0, 0, 0] = 1
        self._error_per_norm = float(self.scorer.error_bounds_float64(QueryStates(components=direction))[0])

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.cells.nbytes

    @property
    def row_codes(self) -> Mapping[str, RowCodes]:
        return self._codes

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None, max_gap: float = 0.0) -> TopK:
        self.check(queries, k, allowed)
        started = time.perf_counter()
        vectors = queries.components[:, 0]
        norms = _norms(vectors)
        tolerances = 2 * (self._error_per_norm * norms + _SMALLEST)
        if self.visit is None:
            answer = self.cells.proven(vectors, k, allowed=allowed, tolerances=tolerances)
            certificates = (EXACT,) * len(queries)
        else:
            answer = self.cells.best(
                vectors, k, pool=self.pool_size, visit=self.visit, allowed=allowed, tolerances=tolerances
            )
            # This is -inf for an answer with fewer than k items.
            kth_scores = answer.scores[:, -1] - tolerances
            certificates = self._certificates(answer.bounds, norms, kth_scores, whole=k <= self.num_items)
        return TopK(
            item_indices=answer.rows,
            scores=answer.scores,
            certificates=certificates,
            passes=(Pass("quantized", time.perf_counter() - started, answer.touched[:, 0]),),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best items by code, their scores by code, and a bound on all other items."""
        self.check(queries, size, allowed)
        started = time.perf_counter()
        visit = self.visit or Visit(probes=self.cells.num_cells)
        answer = self.cells.pool(queries.components[:, 0], size, visit=visit, allowed=allowed)
        trivial = _norms(queries.components[:, 0]) * self._largest_norm
        bounds = np.where(answer.bounds < trivial, answer.bounds, np.nan)
        first = Pass("first_stage", time.perf_counter() - started, answer.touched[:, 0])
        return Pool(item_indices=answer.rows, scores=answer.scores, bounds=bounds, passes=(first,))

    def _certificates(
        self, bounds: Scores, norms: Scores, kth_scores: Scores, *, whole: bool
    ) -> tuple[Certificate, ...]:
        """Certificates from the scan's bounds (B,): "estimate" if the norms alone are as tight.

        It uses plain floats, because a query's scan takes 0.1 ms, and NumPy calls on one element would take a fifth of
        it.
        """
        found = []
        for bound, norm, kth in zip(bounds.tolist(), norms.tolist(), kth_scores.tolist(), strict=True):
            kth_score = kth if whole and kth > -math.inf else None
            found.append(certificate(bound=bound if bound < norm * self._largest_norm else None, kth_score=kth_score))
        return tuple(found)


def _norms(vectors: FloatArray) -> Scores:
    exact = vectors.astype(np.float64)
    return np.asarray(np.sqrt(np.einsum("bd,bd->b", exact, exact)))
