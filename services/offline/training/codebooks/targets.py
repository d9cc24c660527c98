"""A codebook's targets: vectors, and each point's weight of errors along its direction.

The loss of a code is, up to constants, sum_i w_i (|r_i|^2 + s_i <r_i, u_i>^2) with r_i the residual of vector i, u_i
the unit direction of the *datapoint*, s_i = eta_i - 1 and w_i = h_across,i. The vectors are the datapoints, or their
residuals after a coarse centre. The directions are the datapoints' in both cases, because a query's score is an inner
product with the whole point.

Letters: X points, d width.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.algorithms.scoring.states import FloatArray
from services.offline.training.codebooks.score_aware import ErrorWeights, threshold_weights

# eta has a pole at |x| = T, where float32 would lose the error across. Points near it have almost no weight.
_MAX_STIFFNESS = 1e4


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Vectors to reproduce, float32 on the CPU.

    Shapes: vectors (X, d); directions (X, d), unit rows, or zero; stiffness (X,) = eta - 1; weights (X,), at most 1.
    """

    vectors: Tensor
    directions: Tensor
    stiffness: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: slice | Tensor) -> "Targets":
        return Targets(
            vectors=self.vectors[rows],
            directions=self.directions[rows],
            stiffness=self.stiffness[rows],
            weights=self.weights[rows],
        )

    def rotated(self, rotation: Tensor | None) -> "Targets":
        """Return the targets after x @ rotation (d, d); losses do not change."""
        if rotation is None:
            return self
        return replace(self, vectors=self.vectors @ rotation, directions=self.directions @ rotation)

    def losses(self, decoded: Tensor) -> Tensor:
        """Return the weighted loss (X,) of decoded (X, d), in float64."""
        residual = self.vectors.double() - decoded.double()
        along = (residual * self.directions.double()).sum(dim=1)
        return self.weights.double() * (residual.square().sum(dim=1) + self.stiffness.double() * along.square())


def checked_points(points: npt.NDArray[np.floating]) -> FloatArray:
    """Return `points` as C-contiguous float32 (X, d). Raises: ValueError naming the defect."""
    if points.ndim != 2 or points.shape[1] == 0:
        raise ValueError(f"points has shape {points.shape}; expected (X, d) with d of at least 1")
    result = np.ascontiguousarray(points, dtype=np.float32)
    if not np.isfinite(result).all():
        raise ValueError("points holds NaN or infinite values; every value must be finite")
    return result


def root_mean_square_norm(points: FloatArray) -> float:
    """Return the unit of thresholds: 1 for unit vectors. Raises: ValueError if every point is zero."""
    scale = float(np.sqrt(np.mean(np.einsum("xd,xd->x", points, points, dtype=np.float64))))
    if scale == 0:
        raise ValueError("every point is the zero vector; there is nothing to quantize")
    return scale


def score_aware_targets(points: FloatArray, weights: ErrorWeights, *, centres: FloatArray | None = None) -> Targets:
    """Return targets of the score-aware loss for points (X, d) with these weights.

    centres (X, d): coarse centres, if any. A point with empty weights (|x| <= T) has weight 0 in training, and plain l2
    chooses its code (stiffness 0), so that its score is not overestimated.
    """
    heaviest = weights.log_across.max(initial=-np.inf)
    relative = np.exp(weights.log_across - heaviest) if np.isfinite(heaviest) else np.zeros(len(points))
    stiffness = np.minimum(weights.ratio - 1, _MAX_STIFFNESS)
    lengths = np.linalg.norm(points.astype(np.float64), axis=1)[:, None]
    directions = np.divide(points, lengths, out=np.zeros(points.shape), where=lengths > 0)
    return Targets(
        vectors=torch.from_numpy(points if centres is None else points - centres),
        directions=torch.from_numpy(directions.astype(np.float32)),
        stiffness=torch.from_numpy(stiffness.astype(np.float32)),
        weights=torch.from_numpy(relative.astype(np.float32)),
    )


def relative_weights(points: FloatArray, *, threshold: float, scale: float) -> ErrorWeights:
    """Return exact weights for points (X, d); T is in units of `scale`."""
    norms = np.linalg.norm(points.astype(np.float64), axis=1)
    return threshold_weights(norms / scale, points.shape[1], threshold)


def training_targets(
    points: FloatArray,
    *,
    threshold: float,
    most: int,
    generator: torch.Generator,
    centres: FloatArray | None = None,
) -> tuple[Targets, float]:
    """Return at most `most` targets, drawn by `generator`, and the points' scale.

    Raises: ValueError if every point is zero, or no longer than T.
    """
    scale = root_mean_square_norm(points)
    weights = relative_weights(points, threshold=threshold, scale=scale)
    if weights.empty.all():
        longest = float(np.linalg.norm(points, axis=1).max()) / scale
        raise ValueError(
            f"threshold is {threshold} and the longest point {longest:.4g}, both in units of the root mean square norm "
            f"{scale:.4g}; T must be below it, or no score can reach T"
        )
    targets = score_aware_targets(points, weights, centres=centres)
    if len(targets) > most:
        targets = targets[torch.randperm(len(targets), generator=generator)[:most].sort().values]
    return targets, scale
