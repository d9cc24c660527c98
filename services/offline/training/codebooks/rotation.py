"""A rotation before product quantization that gives every subspace its share of the variance.

Principal directions are assigned so that the products of variances within subspaces are as equal as possible: the
parametric solution of optimized product quantization (Ge et al., TPAMI 2014, section 3.3), one eigenvalue problem.
Inner products do not change.

Letters: X points, d width, m subspaces.
"""

import torch
from torch import Tensor

# Variances below this share of the largest are noise of the decomposition (pixels that are always black, say).
_SMALLEST_SHARE = 1e-9


def balancing_rotation(vectors: Tensor, num_subspaces: int) -> Tensor:
    """Return an orthogonal matrix R (d, d) float32, to be applied as x @ R, from vectors (X, d)."""
    exact = vectors.double()
    centred = exact - exact.mean(dim=0)
    variances, directions = torch.linalg.eigh(centred.T @ centred)
    logs = variances.clamp(min=max(float(variances[-1]) * _SMALLEST_SHARE, 1e-300)).log()
    # Shifted so that each direction increases its subspace's load.
    order = dealt((logs - logs.min()).tolist(), num_subspaces)
    rotation: Tensor = directions[:, order].float()
    return rotation.contiguous()


def dealt(sizes: list[float], num_groups: int) -> list[int]:
    """Return numbers of the d sizes in groups of d / m; each (largest first) goes to the lightest group with room."""
    room = len(sizes) // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [0.0] * num_groups
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        group = min((group for group in range(num_groups) if len(groups[group]) < room), key=loads.__getitem__)
        groups[group].append(number)
        loads[group] += sizes[number]
    return [number for group in groups for number in group]
