"""The losses of the phrase model (arXiv:2406.06739, section 4.2): l1 + lambda2 l2 + lambda3 l3.

l1 is the cross entropy at each position, l2 that of the same tokens from x_0, l3 = log^2 of the partition sum, which
lets serving omit the sum. Each is the paper's sum divided by B s, so that learning rates do not depend on them. Targets
are padded with [PAD] = 0. l1 counts every position, as decoding does; l2 counts only real tokens, since every
shortlist has [PAD].

Letters: B queries, s positions, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1024  # vocabulary rows at a time; 2,304 x 1,024 logits stay near the cores' caches


def log_partition(x: Tensor, weights: Tensor, *, chunk: int = CHUNK, half: bool = False) -> Tensor:
    """Return log sum over v of exp(x_i . w_v): x (N, D), weights (V, D) -> (N,), differentiable once in both.

    half: multiply in bfloat16, faster with vector units for it. Raises: ValueError for different widths or no weights.
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


PAD = 0
# The paper's lambda2 and lambda3.
_SHORTLIST_WEIGHT, _NORMALISATION_WEIGHT = 0.25, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """The losses. `total` has gradients; the three terms are detached and not weighted."""

    total: Tensor
    positions: Tensor
    shortlist: Tensor
    normalisation: Tensor


def phrase_losses(x: Tensor, weights: Tensor, targets: Tensor, *, half: bool = False) -> Losses:
    """Return the losses of x (B, 1+s, D), weights (V, D), targets (B, s), [PAD] after the identifier's end.

    half: see `log_partition`. Raises: ValueError if the shapes do not fit.
    """
    batch, positions = targets.shape
    if x.shape[:2] != (batch, positions + 1):
        raise ValueError(f"x has shape {tuple(x.shape)}; expected ({batch}, {positions + 1}, D) for these targets")
    wanted = weights[targets]
    at_positions = (x[:, 1:] * wanted).sum(dim=2)
    at_shortlist = (x[:, :1] * wanted).sum(dim=2)
    real = (targets != PAD).to(x.dtype)
    every = log_partition(x.flatten(0, 1), weights, half=half)
    every = every.view(batch, positions + 1)
    log_sums, log_shortlist_sum = every[:, 1:], every[:, :1].expand(-1, positions)
    l1 = (log_sums - at_positions).mean()
    l2 = ((log_shortlist_sum - at_shortlist) * real).mean()
    l3 = log_sums.flatten().square().mean()
    total = l1 + _SHORTLIST_WEIGHT * l2 + _NORMALISATION_WEIGHT * l3
    return Losses(total=total, positions=l1.detach(), shortlist=l2.detach(), normalisation=l3.detach())
