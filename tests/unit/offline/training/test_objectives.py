"""The losses equal their formulas, and their gradients equal autograd's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.offline.training.loss import _FullSoftmax
from services.offline.training.mol_sampled_softmax import log_q_correction, sampled_softmax

X, K = 900, 5


def plain_softmax(positive: Tensor, negatives: Tensor) -> Tensor:
    return (torch.cat([positive.unsqueeze(1), negatives], dim=1).logsumexp(dim=1) - positive).sum()


@pytest.mark.parametrize("correction", [0.0, log_q_correction(X, K)])
def test_loss_and_gradients_equal_the_formula(correction: float) -> None:
    torch.manual_seed(0)
    positive = torch.randn(7, dtype=torch.float64) * 4
    negatives = torch.randn(7, K, dtype=torch.float64) * 4
    # A negative that is the position's own target counts nothing.
    negatives[2, 1] = negatives[5] = float("-inf")
    inputs = positive.clone().requires_grad_(), negatives.clone().requires_grad_()
    expected = plain_softmax(inputs[0], inputs[1] + correction)
    of_positive, of_negatives = torch.autograd.grad(expected, inputs)
    loss, d_positive, d_negatives = sampled_softmax(positive, negatives, correction)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_positive, of_positive, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(d_negatives, of_negatives.nan_to_num(), rtol=1e-10, atol=1e-12)


def test_the_corrected_softmax_estimates_the_softmax_over_the_whole_catalogue() -> None:
    torch.manual_seed(0)
    logits, positive = torch.randn(X - 1, dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    whole = plain_softmax(positive, logits.unsqueeze(0)).item()
    drawn = logits[torch.randint(X - 1, (20_000, K))]
    estimate = sampled_softmax(positive.expand(20_000), drawn.clone(), log_q_correction(X, K))[0].item() / 20_000
    uncorrected = sampled_softmax(positive.expand(20_000), drawn.clone(), 0.0)[0].item() / 20_000
    assert estimate == pytest.approx(whole, rel=0.05)
    assert uncorrected < 0.5 * whole


def test_the_full_softmax_over_tiles_equals_cross_entropy() -> None:
    torch.manual_seed(0)
    # More items than one tile of 16 positions holds.
    num_items = (1 << 20) // 16 + 5
    query = functional.normalize(torch.randn(37, 3, dtype=torch.float64), dim=1).requires_grad_()
    items = functional.normalize(torch.randn(num_items, 3, dtype=torch.float64), dim=1).requires_grad_()
    targets = torch.randint(num_items, (37,))
    loss = _FullSoftmax.apply(query, items, targets, 0.05)
    expected = functional.cross_entropy(query @ items.t() / 0.05, targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(
        torch.autograd.grad(3 * loss, (query, items)), torch.autograd.grad(3 * expected, (query, items)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
