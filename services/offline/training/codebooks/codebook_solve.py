"""Solve for all codewords of all subspaces at once, with fixed codes (arXiv:1908.10396, appendix 7.5).

With B_i the 0/1 matrix that picks point i's codewords out of the stacked codebooks c (d k numbers), minimise

    sum_i w_i (|x_i - B_i c|^2 + s_i <x_i - B_i c, u_i>^2),

a convex quadratic. The paper inverts its (d k) x (d k) matrix (9.7e9 entries at d = 384, k = 256) and prints B_i x_i in
the last factor instead of B_i^T x_i. Conjugate gradients apply only B_i and B_i^T, O(X d) per step. They start
from the current codebooks, so any number of steps lowers the loss.

Letters: X points, d width, m subspaces, k codewords each.
"""

import torch
from torch import Tensor

from services.offline.training.codebooks.targets import Targets

_BLOCK_POINTS = 8_192


def solve_codebooks(
    targets: Targets, codes: Tensor, codebooks: Tensor, *, max_steps: int = 3, tolerance: float = 1e-3
) -> Tensor:
    """Return codebooks (m, k, d / m) float32 of least loss for codes (X, m), starting from `codebooks`.

    It stops after `max_steps`, or when the preconditioned gradient has `tolerance` times its initial length. A codeword
    without weighted points does not change.
    """
    num_subspaces, num_codewords, sub_width = codebooks.shape
    flat_codes = codes + torch.arange(num_subspaces) * num_codewords
    weight_sums = torch.zeros(num_subspaces * num_codewords, dtype=torch.float64)
    weight_sums.index_add_(0, flat_codes.reshape(-1), targets.weights.double().repeat_interleave(num_subspaces))
    weight_sums = weight_sums[:, None]

    def gathered(point_terms: Tensor, rows: slice) -> Tensor:
        """sum_i B_i^T t_i for terms t (n, d): (m k, d / m)."""
        result = torch.zeros((num_subspaces * num_codewords, sub_width), dtype=torch.float64)
        return result.index_add_(0, flat_codes[rows].reshape(-1), point_terms.reshape(-1, sub_width))

    def applied(stacked: Tensor) -> Tensor:
        """The quadratic's matrix times `stacked` (m k, d / m)."""
        result = weight_sums * stacked
        for rows in _blocks(len(targets)):
            part = targets[rows]
            along = (stacked[flat_codes[rows]].flatten(1) * part.directions).sum(dim=1)
            result += gathered(part.directions * (part.weights * part.stiffness * along)[:, None], rows)
        return result

    def gradient(stacked: Tensor) -> Tensor:
        """Half the descent direction at `stacked`: sum_i B_i^T w_i (r_i + s_i <r_i, u_i> u_i)."""
        result = torch.zeros_like(stacked)
        for rows in _blocks(len(targets)):
            part = targets[rows]
            residual = part.vectors - stacked[flat_codes[rows]].flatten(1)
            along = (residual * part.directions).sum(dim=1)
            pull = residual + part.directions * (part.stiffness * along)[:, None]
            result += gathered(pull * part.weights[:, None].double(), rows)
        return result

    solution = codebooks.double().reshape(-1, sub_width)
    scaling = torch.where(weight_sums > 0, 1 / weight_sums, torch.zeros_like(weight_sums))
    residual = gradient(solution)
    descent = scaling * residual
    direction = descent
    power = first_power = (residual * descent).sum()
    for _ in range(max_steps):
        if power <= tolerance**2 * first_power:
            break
        image = applied(direction)
        step = power / (direction * image).sum()
        solution = solution + step * direction
        residual = residual - step * image
        descent = scaling * residual
        power, previous = (residual * descent).sum(), power
        direction = descent + (power / previous) * direction
    return solution.reshape(codebooks.shape).float()


def _blocks(num_points: int) -> list[slice]:
    return [slice(first, first + _BLOCK_POINTS) for first in range(0, num_points, _BLOCK_POINTS)]
