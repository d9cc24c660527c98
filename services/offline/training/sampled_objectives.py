"""Losses of a positive logit beside sampled negatives' logits, each with its gradients in closed form.

One tile of logits at a time: the dot head and the fused mixture both call these, so a loss is written once. A negative
of minus infinity (the position's own target, drawn by chance) adds nothing.

Letters: R positions, K negatives, X items of the catalogue.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# (R,) positive and (R, K) negative logits -> the summed loss and its gradients (R,), (R, K). May overwrite negatives.
Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def sampled_softmax(positive: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of -log softmax of the positive among itself and the negatives (arXiv:2407.15462, section 2)."""
    total = torch.logaddexp(negatives.logsumexp(1), positive)
    return (total - positive).sum(), (positive - total).exp() - 1, (negatives - total.unsqueeze(1)).exp_()


def corrected_softmax(num_items: int, num_negatives: int) -> Objective:
    """Sampled softmax with the log-Q correction of uniform negatives: an estimate of the softmax over all X items.

    Each negative stands for (X - 1) / K items (Bengio and Senecal, 2008, with a constant proposal distribution).
    """
    shift = math.log(max(num_items - 1, 1) / num_negatives)

    def objective(positive: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return sampled_softmax(positive, negatives.add_(shift))

    return objective


def thinned(gradients: Tensor, kept: int) -> Tensor:
    """An unbiased estimate of gradients (R, K) in which about `kept` of each row are not zero (global generator).

    Entry k of a row is kept with probability q_k = min(1, kept |g_k| / sum |g|), and divided by q_k. Systematic
    sampling takes one uniform number a row: an entry is kept where the running sum of q passes a whole number.
    """
    size = gradients.abs()
    marks = gradients.new_empty(len(gradients), 1 + gradients.shape[1])
    torch.rand(len(gradients), out=marks[:, 0])
    probability = torch.mul(size, kept / size.sum(1, keepdim=True).clamp_(min=1e-30), out=marks[:, 1:]).clamp_(max=1.0)
    passed = marks.cumsum(1).floor_()
    return torch.where(passed[:, 1:] > passed[:, :-1], gradients / probability, 0.0)
