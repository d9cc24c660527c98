"""The exact partition sum of a large output layer, in chunks of the vocabulary, with gradients.

log sum_v exp(x_i . w_v) for N rows at once needs (N, V) logits, and backward their softmax: at B = 256, s = 8 and
V = 500,000 that is 4 GB each. Here the logits live one chunk of V at a time and backward computes them again: memory
O(N chunk), one matrix product more. A sampled sum would be biased under the logarithm, hence exact (arXiv:2406.06739,
section 4.2, the loss l3). It knows no positions and no targets.

Letters: N rows, V vocabulary, D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1024  # vocabulary rows at a time; 2,304 x 1,024 logits stay near the cores' caches


def log_partition(x: Tensor, weights: Tensor, *, chunk: int = CHUNK, half: bool = False) -> Tensor:
    """log sum over v of exp(x_i . w_v): x (N, D), weights (V, D) -> (N,), differentiable once in both.

    half: products in bfloat16 (sums and exponentials stay in float32); the vector units that have it are several
    times faster. Raises: ValueError if the widths differ or there is no row of weights.
    """
    if x.ndim != 2 or weights.ndim != 2 or x.shape[1] != weights.shape[1] or not len(weights):
        raise ValueError(
            f"x {tuple(x.shape)} and weights {tuple(weights.shape)}; expected (N, D) and (V, D), V above 0"
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; allowed: 1 or more")
    total: Tensor = _LogPartition.apply(x, weights, chunk, half)
    return total


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, chunk: int, half: bool) -> Tensor:
        x_product, w_product = (x.bfloat16(), weights.bfloat16()) if half else (x, weights)
        total = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
        for start in range(0, len(weights), chunk):
            logits = (x_product @ w_product[start : start + chunk].T).to(x.dtype)
            total = torch.logaddexp(total, torch.logsumexp(logits, dim=1))
        ctx.save_for_backward(x_product, w_product, total)
        ctx.chunk, ctx.dtype = chunk, x.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weights, total = ctx.saved_tensors
        gradient = gradients[0]
        for_x = torch.zeros(x.shape, dtype=ctx.dtype, device=x.device)
        for_weights = torch.empty(weights.shape, dtype=ctx.dtype, device=x.device)
        for start in range(0, len(weights), ctx.chunk):
            part = weights[start : start + ctx.chunk]
            shares = (x @ part.T).to(ctx.dtype).sub_(total[:, None]).exp_().mul_(gradient[:, None]).to(x.dtype)
            for_x += (shares @ part).to(ctx.dtype)
            for_weights[start : start + ctx.chunk] = (shares.T @ x).to(ctx.dtype)
        return for_x, for_weights, None, None
