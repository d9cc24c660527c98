"""Plain k-means in all subspaces at once, the start of anisotropic training.

k-means++ chooses seeds on a sample; Lloyd's steps with batched matrix products follow. Equal seeds give equal results.

Letters: X points, m subspaces, k codewords each.
"""

import torch
from torch import Tensor

_TABLE_BYTES = 64 << 20
_SEEDING_POINTS_PER_CODEWORD = 16
_LLOYD_STEPS = 12


def product_k_means(vectors: Tensor, num_subspaces: int, num_codewords: int, generator: torch.Generator) -> Tensor:
    """Return codebooks (m, k, d / m) of rows (X, d) by k-means in each subspace; X must be at least k."""
    parts = vectors.view(len(vectors), num_subspaces, -1).transpose(0, 1).contiguous()
    sample_size = min(len(vectors), _SEEDING_POINTS_PER_CODEWORD * num_codewords)
    sample = torch.randperm(len(vectors), generator=generator)[:sample_size]
    codebooks = _spread_seeds(parts[:, sample], num_codewords, generator)
    for _ in range(_LLOYD_STEPS):
        codes = nearest(parts, codebooks)
        codebooks = _means(parts, codes, codebooks, generator)
    return codebooks


def nearest(parts: Tensor, codebooks: Tensor) -> Tensor:
    """Return indices (m, X) of the codewords (m, k, s) nearest to the rows of parts (m, X, s)."""
    num_subspaces, num_codewords, _ = codebooks.shape
    codes = torch.empty(parts.shape[:2], dtype=torch.long)
    squares = codebooks.square().sum(dim=2)[:, None, :]
    block = max(1, _TABLE_BYTES // (4 * num_subspaces * num_codewords))
    for first in range(0, parts.shape[1], block):
        rows = parts[:, first : first + block]
        codes[:, first : first + block] = torch.baddbmm(squares, rows, codebooks.transpose(1, 2), alpha=-2).argmin(2)
    return codes


def _spread_seeds(parts: Tensor, num_codewords: int, generator: torch.Generator) -> Tensor:
    """Draw k-means++ seeds: a point's odds are its squared distance to the seeds so far."""
    num_subspaces, num_points, sub_width = parts.shape
    seeds = torch.empty((num_subspaces, num_codewords, sub_width))
    seeds[:, 0] = parts[:, int(torch.randint(num_points, (1,), generator=generator))]
    distance = torch.full((num_subspaces, num_points), torch.inf)
    for chosen in range(1, num_codewords):
        distance = torch.minimum(distance, (parts - seeds[:, chosen - 1, None]).square().sum(dim=2))
        # If every point equals a seed (constant pixels), any point is drawn again.
        odds = torch.where(distance.sum(dim=1, keepdim=True) > 0, distance, torch.ones_like(distance))
        picked = torch.multinomial(odds, 1, generator=generator)
        seeds[:, chosen] = parts.gather(1, picked[..., None].expand(-1, -1, sub_width))[:, 0]
    return seeds


def _means(parts: Tensor, codes: Tensor, codebooks: Tensor, generator: torch.Generator) -> Tensor:
    """Return the means of codewords' points; a codeword without points moves to a random point."""
    num_subspaces, num_codewords, sub_width = codebooks.shape
    flat = (codes + torch.arange(num_subspaces)[:, None] * num_codewords).reshape(-1)
    sums = torch.zeros((num_subspaces * num_codewords, sub_width)).index_add_(0, flat, parts.reshape(-1, sub_width))
    counts = torch.bincount(flat, minlength=num_subspaces * num_codewords)
    means = (sums / counts.clamp(min=1)[:, None]).view_as(codebooks)
    unused = (counts == 0).view(num_subspaces, num_codewords)
    if bool(unused.any()):
        subspace, _ = torch.nonzero(unused, as_tuple=True)
        rows = torch.randint(parts.shape[1], (len(subspace),), generator=generator)
        means[unused] = parts[subspace, rows]
    return means
