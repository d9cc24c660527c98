"""Exact top-K that skips whole clusters of items before the bound pass.

Items are grouped by k-means over their stacked components. Within a cluster of centre mu and radii rho (per item
component) every cosine is at most <f_pq, mu_px> + ||f_pq|| rho_px, hence so is s; a cluster whose largest such bound
is below the threshold is skipped unseen. Helps where items lie in tight groups; in 32 to 512 dimensions of trained
components the radii are about 1 and nothing is skipped (docs/decisions/006 has the figures).

Letters: B queries, X items, C clusters, P_q, P_x components, d component width.
Cost: B C P d beside the bound pass. Memory: 4 bytes an item, and C P_x (d + 1) floats.
"""

import time

import numpy as np
import numpy.typing as npt

from services.algorithms.indexes.exact.two_pass import TwoPass
from services.algorithms.indexes.protocol import Mask, Pass
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan.cells import assign, nearest, sums_of_groups
from services.algorithms.scoring.states import QueryStates

_ITEMS_PER_CLUSTER = 256
_LARGEST_SAMPLE = 65_536
_ROUNDS = 5
_CHUNK = 8_192
_UP = 1 + 2.0**-20
_UNIT = 2.0**-24


class ExactClusters(TwoPass):
    """Low precision on the clusters, of about 256 items, that may hold an answer. Certificate: always exact."""

    name = "exact_clusters"
    _low_precision = True
    _by_gates = True

    def _prepare(self) -> None:
        self._clusters, self._centres, self._radii = _cluster(self.scorer)

    @property
    def nbytes(self) -> int:
        clusters = int(self._clusters.nbytes) + int(self._centres.nbytes) + int(self._radii.nbytes)
        return super().nbytes + clusters

    def _narrowed(
        self, queries: QueryStates, thresholds: npt.NDArray[np.float64], allowed: Mask | None
    ) -> tuple[Mask | None, tuple[Pass, ...]]:
        started = time.perf_counter()
        num_queries, _, width = queries.components.shape
        norms = np.linalg.norm(queries.components.astype(np.float64), axis=-1)
        flat = queries.components.reshape(-1, width)
        count, num_components, _ = self._centres.shape
        cosines = (flat @ self._centres.reshape(-1, width).T).reshape(num_queries, -1, count, num_components)
        # Roundings of the product (d) and of the sum, at the largest magnitudes there are.
        error = (width + 8) * 2 * _UNIT * norms[:, :, None, None] * (self.scorer.magnitudes.norms.max() + self._radii)
        bounds = (cosines + norms[:, :, None, None] * self._radii + error).max(axis=(1, 3))
        alive = bounds >= thresholds[:, None]
        mask = alive[:, self._clusters]
        if allowed is not None:
            mask &= allowed
        touched = np.full(num_queries, count, dtype=np.int64)
        return mask, (Pass("clusters", time.perf_counter() - started, touched),)


def _cluster(scorer: MolScorer) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Each item's cluster (X,), centres (C, P_x, d), radii (C, P_x) in float64 for the centres as stored."""
    flat = scorer.components.reshape(scorer.num_items, -1)
    count = max(1, scorer.num_items // _ITEMS_PER_CLUSTER)
    sample = flat[np.random.default_rng(0).permutation(scorer.num_items)[:_LARGEST_SAMPLE]]
    count = min(count, len(sample))
    centres = sample[:count]
    for _ in range(_ROUNDS):
        sums, sizes = sums_of_groups(sample, nearest(sample, centres), count)
        sizes = sizes[:, None]
        centres = np.where(sizes > 0, sums / np.maximum(sizes, 1).astype(np.float32), centres)
    clusters = assign(flat, centres)
    stacked = centres.reshape(count, scorer.num_item_components, scorer.width)
    radii = np.zeros((count, scorer.num_item_components))
    for start in range(0, scorer.num_items, _CHUNK):
        mine = clusters[start : start + _CHUNK]
        apart = scorer.components[start : start + _CHUNK].astype(np.float64) - stacked[mine]
        np.maximum.at(radii, mine, np.linalg.norm(apart, axis=-1))
    return clusters.astype(np.int32), stacked, radii * _UP
