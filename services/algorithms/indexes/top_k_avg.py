"""TopKAvg(N): the N best by averaged components, one dot product per item, then full scores within that pool.

Its certificate rests on phi's pairs being the outer product of components (arXiv:2407.15462, equation 2): with the
item's mean component g-bar and radius rho_x = max_p ||g_p - g-bar||, every pair's cosine is at most
<f_pq, g-bar> + ||f_pq|| rho_x, hence s <= max over p_q of that. Useful when an item's components are close; where it
says no more than the norms alone, the answer is called an estimate.

Letters: B queries, X items, P_q, P_x query and item components, d component width, K results, N pool size.
Cost: X P_q d multiply-adds for scores and certificate, then float64 on N. Memory: d + 1 floats per item more.
"""

import time

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.indexes.protocol import (
    Mask,
    Pass,
    Pool,
    TopK,
    certificate,
    check_request,
    check_tie_ranks,
    empty_answer,
)
from services.algorithms.indexes.ranking import best_rows
from services.algorithms.indexes.rescoring import rescore
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import ItemStates, PairGate, QueryStates

_UNIT = 2.0**-24  # float32 roundoff
_DOTS_BYTES = 4 << 20  # one tile of (b, P_q, x) dot products


class TopKAvg:
    """The N best by averaged components, reordered by s. Certificate: bounded by the design's radius bound."""

    name = "top_k_avg"

    def __init__(
        self,
        items: ItemStates | MolScorer,
        pair_gate: PairGate | None = None,
        *,
        pool_size: int,
        tie_ranks: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Average X items' components; `pool_size` is N, raised to k where a search asks for more.

        A MolScorer is shared, not copied. Raises: ValueError for an empty index, a pool_size below 1, or shapes that
        disagree.
        """
        if pool_size < 1:
            raise ValueError(f"pool_size={pool_size} allowed: at least 1")
        self.scorer = items if isinstance(items, MolScorer) else MolScorer(items, pair_gate)
        self.pool_size = pool_size
        self._ranks = check_tie_ranks(tie_ranks, self.scorer.num_items)
        self._means, self._radii = _average(self.scorer)
        self._largest_mean = float(np.linalg.norm(self._means.numpy(), axis=1).max())

    @property
    def num_items(self) -> int:
        return self.scorer.num_items

    @property
    def nbytes(self) -> int:
        return self.scorer.nbytes + int(self._ranks.nbytes) + 4 * (self._means.numel() + self._radii.numel())

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """The top `k` by s of a pool of max(N, k), and how far from the exact top `k` that can be."""
        check_request(k=k, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        pool = self.first_stage(queries, max(k, self.pool_size), allowed)
        pools = [row[row >= 0] for row in pool.item_indices]
        answer = rescore(self.scorer, queries, pools, k, self._ranks)
        certificates = [
            certificate(bound=pool.bound(query), kth_score=answer.kth_score(query)) for query in range(len(queries))
        ]
        return TopK(
            item_indices=answer.item_indices,
            scores=answer.scores,
            certificates=tuple(certificates),
            passes=(*pool.passes, *answer.passes),
        )

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """The `size` best by averaged components: scores mean over p_q of <f_pq, g-bar>, and the bound on the rest."""
        check_request(k=size, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        self.scorer.check(queries)
        started = time.perf_counter()
        norms = np.linalg.norm(queries.components.astype(np.float64), axis=-1)
        averages, reaches = self._scan(queries, norms)
        # Roundings of the dot product (d), of the radius term and the sum (4), at the largest magnitudes there are.
        largest_radius = float(self._radii.max())
        error = (self.scorer.width + 8) * _UNIT * norms.max(axis=1, initial=0.0) * (self._largest_mean + largest_radius)
        trivial = norms.max(axis=1, initial=0.0) * self.scorer.magnitudes.norms.max(initial=0.0)
        if allowed is not None:
            averages[~np.broadcast_to(allowed, averages.shape)] = -np.inf
            reaches[~np.broadcast_to(allowed, reaches.shape)] = -np.inf
        item_indices, out = empty_answer(len(queries), min(size, self.num_items))
        bounds = np.full(len(queries), -np.inf)
        for query, scores in enumerate(averages):
            rows = best_rows(scores, size, self._ranks)
            item_indices[query, : len(rows)] = rows
            out[query, : len(rows)] = scores[rows]
            reaches[query, rows] = -np.inf
            reach = float(reaches[query].max())
            if reach > -np.inf:
                bound = reach + error[query]
                bounds[query] = bound if bound < trivial[query] else np.nan
        touched = np.full(len(queries), self.num_items, dtype=np.int64)
        first = Pass("first_stage", time.perf_counter() - started, touched)
        return Pool(item_indices=item_indices, scores=out, bounds=bounds, passes=(first,))

    def _scan(
        self, queries: QueryStates, norms: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Mean and largest reach over p_q, (B, X) each: mean <f_pq, g-bar> and max (<f_pq, g-bar> + ||f_pq|| rho)."""
        num_queries, num_components, width = queries.components.shape
        components = torch.from_numpy(np.array(queries.components.reshape(-1, width)))
        query_norms = torch.from_numpy(norms.astype(np.float32))[:, :, None]
        averages = torch.empty(num_queries, self.num_items)
        reaches = torch.empty(num_queries, self.num_items)
        step = max(1, _DOTS_BYTES // (4 * max(1, num_queries * num_components)))
        for x in range(0, self.num_items if num_queries else 0, step):
            dots = torch.mm(components, self._means[x : x + step].T).view(num_queries, num_components, -1)
            torch.mean(dots, dim=1, out=averages[:, x : x + step])
            dots.addcmul_(query_norms, self._radii[x : x + step])
            torch.amax(dots, dim=1, out=reaches[:, x : x + step])
        return averages.numpy(), reaches.numpy()


def _average(scorer: MolScorer) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean components (X, d) in float32 and, for the means as stored, radii (X,) rounded up."""
    components = scorer.components
    means = torch.empty(scorer.num_items, scorer.width)
    radii = torch.empty(scorer.num_items)
    for x in range(0, scorer.num_items, 65_536):
        exact = components[x : x + 65_536].double()
        means[x : x + 65_536] = exact.mean(dim=1)
        apart = exact - means[x : x + 65_536].double()[:, None, :]
        radius = torch.linalg.vector_norm(apart, dim=-1).amax(dim=1)
        radii[x : x + 65_536] = (radius * (1 + 2 * _UNIT)).float()
    return means, radii
