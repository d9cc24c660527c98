"""What a codebook is asked to reproduce: vectors, and per point how errors along its own direction weigh.

The loss of a code is, up to constants, sum_i w_i (|r_i|^2 + s_i <r_i, u_i>^2) with r_i the residual of vector i, u_i
the unit direction of the *datapoint*, s_i = eta_i - 1 and w_i = h_across,i. The vectors are the datapoints themselves,
or what is left of them after a coarse centre; the directions are the datapoints' in both cases, because a query's
score is an inner product with the whole point.

Letters: X points, d width.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.algorithms.quantization.score_aware import threshold_weights
from services.algorithms.states import FloatArray

# Next to |x| = T eta has a pole, where float32 costs would lose the part across; such points hardly weigh anything.
_MAX_STIFFNESS = 1e4


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """X vectors to reproduce, as PyTorch float32 on the CPU.

    Shapes: vectors (X, d); directions (X, d), unit rows, zero where a point has no direction; stiffness (X,) = eta - 1;
    weights (X,), at most 1.
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

    def losses(self, decoded: Tensor) -> Tensor:
        """Weighted loss (X,) of stand-ins (X, d), in float64."""
        residual = self.vectors.double() - decoded.double()
        along = (residual * self.directions.double()).sum(dim=1)
        return self.weights.double() * (residual.square().sum(dim=1) + self.stiffness.double() * along.square())


def checked_points(points: npt.NDArray[np.floating], *, name: str = "points", width: int | None = None) -> FloatArray:
    """`points` as C-contiguous float32 (X, d); ValueError that names what is wrong."""
    if points.ndim != 2 or points.shape[1] == 0:
        raise ValueError(f"{name} has shape {points.shape}; expected (X, d) with d of at least 1")
    if width is not None and points.shape[1] != width:
        raise ValueError(f"{name} are {points.shape[1]} wide; expected {width}")
    result = np.ascontiguousarray(points, dtype=np.float32)
    if not np.isfinite(result).all():
        raise ValueError(f"{name} holds NaN or infinite values; every value must be finite")
    return result


def root_mean_square_norm(points: FloatArray) -> float:
    """The unit in which thresholds are stated: 1 for unit vectors; ValueError when every point is zero."""
    scale = float(np.sqrt(np.mean(np.einsum("xd,xd->x", points, points, dtype=np.float64))))
    if scale == 0:
        raise ValueError("every point is the zero vector; there is nothing to quantize")
    return scale


def score_aware_targets(
    points: FloatArray,
    *,
    threshold: float,
    scale: float,
    centres: FloatArray | None = None,
    all_may_be_short: bool = False,
) -> Targets:
    """Targets of the score-aware loss with w(t) = 1[t >= T].

    Shapes: points (X, d); centres (X, d), each point's coarse centre, or None. `threshold` is T / `scale`.
    A point with |x| <= T can never score above T, so it has weight 0 in training; what stands for it is chosen by plain
    l2 (stiffness 0), which keeps a point that cannot matter from being overrated.
    Raises: ValueError when no point is longer than T, unless `all_may_be_short` (a few points to encode).
    """
    norms = np.linalg.norm(points.astype(np.float64), axis=1)
    if points.shape[1] < 2:
        weights, stiffness = (norms > threshold * scale).astype(np.float64), np.zeros_like(norms)
    else:
        found = threshold_weights(norms / scale, points.shape[1], threshold)
        if found.empty.all() and not all_may_be_short:
            raise ValueError(
                f"threshold is {threshold} (in units of {scale:.4g}), and the longest point {norms.max() / scale:.4g}; "
                "T must be below it, or no score can reach T"
            )
        heaviest = found.log_across.max()
        weights = np.exp(found.log_across - heaviest) if np.isfinite(heaviest) else np.zeros_like(norms)
        stiffness = np.minimum(found.ratio - 1, _MAX_STIFFNESS)
    lengths = norms[:, None]
    directions = np.divide(points, lengths, out=np.zeros(points.shape), where=lengths > 0)
    return Targets(
        vectors=torch.from_numpy(points if centres is None else points - centres),
        directions=torch.from_numpy(directions.astype(np.float32)),
        stiffness=torch.from_numpy(stiffness.astype(np.float32)),
        weights=torch.from_numpy(weights.astype(np.float32)),
    )
