"""Encoding by coordinate descent: the code of each point under the anisotropic loss.

With plain l2 the m subspaces are independent. Here one number couples them: the residual's length along the point's
direction, a sum of one term per subspace. So after two tables per point (squared error and length along, for each
codeword) a subspace is re-chosen in O(k), all points at once, and a sweep over all costs O(m k) per point
(arXiv:1908.10396, section 4.1, step 2). It knows nothing of how codebooks are found.

Letters: X points, d width, m subspaces, k codewords each.
"""

import torch
from torch import Tensor

from services.offline.training.codebooks.targets import Targets

_TABLE_BYTES = 128 << 20
_MAX_SWEEPS = 10


def encode(targets: Targets, codebooks: Tensor, start: Tensor | None = None) -> Tensor:
    """Codes (X, m) int64 of X targets with codebooks (m, k, d / m).

    Starts from `start` (X, m), or from the nearest codewords by l2, and never ends with a larger loss than it started
    from. Ties keep the present codeword, then the smallest number. Tables hold at most 128 MB.
    """
    num_subspaces, num_codewords, _ = codebooks.shape
    codes = torch.empty((len(targets), num_subspaces), dtype=torch.long)
    block = max(1, _TABLE_BYTES // (8 * num_subspaces * num_codewords))
    for first in range(0, len(targets), block):
        rows = slice(first, first + block)
        codes[rows] = _encode_block(targets[rows], codebooks, None if start is None else start[rows])
    return codes


def decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Vectors (X, d) that codes (X, m) stand for, in the codebooks' dtype."""
    num_subspaces = len(codebooks)
    return codebooks[torch.arange(num_subspaces), codes].flatten(1)


def _encode_block(targets: Targets, codebooks: Tensor, start: Tensor | None) -> Tensor:
    num_subspaces, _, sub_width = codebooks.shape
    num_points = len(targets)

    def by_subspace(rows: Tensor) -> Tensor:
        return rows.view(num_points, num_subspaces, sub_width).transpose(0, 1)

    vectors, directions = by_subspace(targets.vectors), by_subspace(targets.directions)
    words = codebooks.transpose(1, 2)
    # Squared errors less the vector's own squared length, and lengths along: both (m, X, k).
    cost = torch.baddbmm(codebooks.square().sum(dim=2)[:, None, :], vectors, words, alpha=-2)
    along = torch.baddbmm((vectors * directions).sum(dim=2, keepdim=True), directions, words, alpha=-1)
    codes = cost.argmin(dim=2) if start is None else start.T.contiguous()
    total = along.gather(2, codes[..., None]).sum(dim=0)[:, 0]
    stiffness = targets.stiffness
    cost.addcmul_(along.square(), stiffness[None, :, None])
    buffer = torch.empty_like(cost[0])
    for _ in range(_MAX_SWEEPS):
        changed = False
        for subspace in range(num_subspaces):
            present = codes[subspace][:, None]
            table = along[subspace]
            rest = total - table.gather(1, present)[:, 0]
            torch.addcmul(cost[subspace], table, (2 * stiffness * rest)[:, None], out=buffer)
            best_cost, best = buffer.min(dim=1)
            better = best_cost < buffer.gather(1, present)[:, 0]
            if bool(better.any()):
                changed = True
                codes[subspace] = torch.where(better, best, present[:, 0])
                total = rest + table.gather(1, codes[subspace][:, None])[:, 0]
        if not changed:
            break
    return codes.T
