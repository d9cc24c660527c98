"""Vector quantization under the score-aware loss: k whole-width centres, each point assigned to one.

The centre update is closed form (arXiv:1908.10396, Theorem 4.2, with h_along in its last sum, as in its proof and
gradient; the main text prints the weight across). Its centres are the coarse cells of an inverted file.

Letters: X points, d width, k centres.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.algorithms.scoring.states import FloatArray
from services.offline.training.codebooks.k_means import product_k_means
from services.offline.training.codebooks.targets import (
    Targets,
    checked_points,
    relative_weights,
    score_aware_targets,
    training_targets,
)

_TABLE_BYTES = 64 << 20
_TRAINING_POINTS_PER_CENTRE = 128
_MIN_TRAINING_POINTS = 16_384
_ROUNDS = 8
_SETTLED = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorQuantizer:
    """Centres (k, d) float32, and the assignment's threshold (a share of `scale`)."""

    centres: FloatArray
    threshold: float
    scale: float

    def assign(self, points: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
        """Return the centre numbers (X,) of least score-aware loss for points (X, d)."""
        checked = checked_points(points, width=self.centres.shape[1])
        if len(checked) == 0:
            return np.empty(0, dtype=np.int64)
        weights = relative_weights(checked, threshold=self.threshold, scale=self.scale)
        return _assigned(score_aware_targets(checked, weights), torch.from_numpy(self.centres)).numpy()


def train_vector_quantizer(
    points: npt.NDArray[np.floating],
    *,
    num_centres: int,
    threshold: float,
    seed: int = 0,
    on_step: Callable[[str, float], None] | None = None,
) -> VectorQuantizer:
    """Learn centres for points (X, d) from k-means by alternating assignment and the closed-form update.

    threshold as in `train_product_quantizer`; 0 is k-means. `on_step` gets the mean loss after "assign" and "update",
    which never rises. At most max(16,384, 128 k) points are used.
    Raises: ValueError for fewer points than centres, and as `train_product_quantizer`.
    """
    checked = checked_points(points)
    if not 1 <= num_centres <= len(checked):
        raise ValueError(f"num_centres is {num_centres}; it must be from 1 to the number of points, {len(checked)}")
    generator = torch.Generator().manual_seed(seed)
    most = max(_MIN_TRAINING_POINTS, _TRAINING_POINTS_PER_CENTRE * num_centres)
    targets, scale = training_targets(checked, threshold=threshold, most=most, generator=generator)
    centres = product_k_means(targets.vectors, 1, num_centres, generator)[0]
    if threshold > 0:
        centres = _refined(targets, centres, on_step or (lambda name, loss: None))
    return VectorQuantizer(centres=centres.numpy(), threshold=threshold, scale=scale)


def _refined(targets: Targets, centres: Tensor, report: Callable[[str, float], None]) -> Tensor:
    cells = _assigned(targets, centres)
    loss = float(targets.losses(centres[cells]).mean())
    report("assign", loss)
    for _ in range(_ROUNDS):
        before = loss
        centres = updated_centres(targets, cells, centres)
        losses = targets.losses(centres[cells])
        report("update", float(losses.mean()))
        unused = torch.nonzero(torch.bincount(cells, minlength=len(centres)) == 0)[:, 0]
        centres[unused] = targets.vectors[losses.argsort(descending=True)[: len(unused)]]
        cells = _assigned(targets, centres)
        loss = float(targets.losses(centres[cells]).mean())
        report("assign", loss)
        if loss > (1 - _SETTLED) * before:
            break
    return centres


def updated_centres(targets: Targets, cells: Tensor, centres: Tensor) -> Tensor:
    """Theorem 4.2: return the centres (k, d) of least loss for points in `cells` (X,); a centre without weight stays.

    Per centre the matrix is (sum w) I + V V^T with one column of V per point; fewer than d points are solved in their
    space (Woodbury), O(d n^2) instead of O(d^3).
    """
    result = centres.clone()
    order = cells.argsort(stable=True)
    sizes = torch.bincount(cells, minlength=len(centres)).tolist()
    for centre, rows in enumerate(torch.split(order, sizes)):
        part = targets[rows]
        weights = part.weights.double()
        total = weights.sum()
        if total == 0:
            continue
        directions, vectors = part.directions.double(), part.vectors.double()
        pull = weights * part.stiffness.double()
        wanted = weights @ vectors + (pull * (vectors * directions).sum(dim=1)) @ directions
        columns = directions * pull.sqrt()[:, None]
        if len(rows) < centres.shape[1]:
            inner = torch.eye(len(rows), dtype=torch.float64) * total + columns @ columns.T
            found = (wanted - columns.T @ torch.linalg.solve(inner, columns @ wanted)) / total
        else:
            found = torch.linalg.solve(
                torch.eye(len(wanted), dtype=torch.float64) * total + columns.T @ columns, wanted
            )
        result[centre] = found.float()
    return result


def _assigned(targets: Targets, centres: Tensor) -> Tensor:
    cells = torch.empty(len(targets), dtype=torch.long)
    block = max(1, _TABLE_BYTES // (8 * len(centres)))
    squares = centres.square().sum(dim=1)
    for first in range(0, len(targets), block):
        part = targets[slice(first, first + block)]
        cost = torch.addmm(squares, part.vectors, centres.T, alpha=-2)
        along = torch.addmm((part.vectors * part.directions).sum(dim=1)[:, None], part.directions, centres.T, alpha=-1)
        cells[first : first + block] = cost.addcmul_(along.square_(), part.stiffness[:, None]).argmin(dim=1)
    return cells
