"""The sampled softmax of a positive logit and negatives' logits, with its gradients in closed form.
A negative of minus infinity (the position's own target) adds nothing.
Letters: R positions, K negatives, X items of the catalogue.
"""

import math

import torch
from torch import Tensor


def sampled_softmax(positive: Tensor, negatives: Tensor, correction: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of -log softmax of the positive among itself and the negatives, each plus `correction`, and its
    gradients.
    Shapes: positive (R,), negatives (R, K), overwritten -> (), (R,), (R, K). Source: arXiv:2407.15462, section 2.
    """
    negatives += correction
    total = torch.logaddexp(negatives.logsumexp(1), positive)
    return (total - positive).sum(), (positive - total).exp() - 1, (negatives - total.unsqueeze(1)).exp_()


def log_q_correction(num_items: int, num_negatives: int) -> float:
    """Return the correction with which K uniform negatives estimate the softmax over all X items.
    Each negative represents (X - 1) / K items (Bengio and Senecal, 2008, with a constant proposal distribution).
    """
    return math.log(max(num_items - 1, 1) / num_negatives)
