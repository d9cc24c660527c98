"""Encode points with serving's coordinate descent, and decode them.

Letters: X points, d width, m subspaces, k codewords each.
"""

import torch
from torch import Tensor

from services.algorithms.indexes.quantized.codebooks import encoded
from services.offline.training.codebooks.targets import Targets


def encode(targets: Targets, codebooks: Tensor, start: Tensor | None = None) -> Tensor:
    """Return codes (X, m) int64 of X targets with codebooks (m, k, d / m).

    It starts from `start` (X, m), or the nearest codewords by l2, and never ends with a larger loss.
    """
    vectors, directions, stiffness = (one.numpy() for one in (targets.vectors, targets.directions, targets.stiffness))
    present = None if start is None else start.numpy()
    return torch.from_numpy(encoded(vectors, directions, stiffness, codebooks.numpy(), present)).long()


def decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Return the vectors (X, d) of codes (X, m)."""
    num_subspaces = len(codebooks)
    return codebooks[torch.arange(num_subspaces), codes].flatten(1)
