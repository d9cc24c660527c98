"""Each loss over sampled negatives equals its formula, and its gradients equal autograd's."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.offline.training.loss import _FullSoftmax
from services.offline.training.sampled_objectives import Objective, corrected_softmax, sampled_softmax, thinned

X, K = 900, 5


def plain_softmax(positive: Tensor, negatives: Tensor) -> Tensor:
    return (torch.cat([positive.unsqueeze(1), negatives], dim=1).logsumexp(dim=1) - positive).sum()


def plain_corrected(positive: Tensor, negatives: Tensor) -> Tensor:
    return plain_softmax(positive, negatives + math.log((X - 1) / K))


@pytest.mark.parametrize(
    ("objective", "plain"),
    [
        (sampled_softmax, plain_softmax),
        (corrected_softmax(X, K), plain_corrected),
    ],
    ids=["sampled softmax", "corrected softmax"],
)
def test_loss_and_gradients_equal_the_formula(objective: Objective, plain) -> None:
    torch.manual_seed(0)
    positive = torch.randn(7, dtype=torch.float64) * 4
    negatives = torch.randn(7, K, dtype=torch.float64) * 4
    # A negative that is the position's own target counts nothing.
    negatives[2, 1] = negatives[5] = float("-inf")
    inputs = positive.clone().requires_grad_(), negatives.clone().requires_grad_()
    expected = plain(*inputs)
    of_positive, of_negatives = torch.autograd.grad(expected, inputs)
    loss, d_positive, d_negatives = objective(positive, negatives)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_positive, of_positive, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(d_negatives, of_negatives.nan_to_num(), rtol=1e-10, atol=1e-12)


def test_the_corrected_softmax_estimates_the_softmax_over_the_whole_catalogue() -> None:
    torch.manual_seed(0)
    logits, positive = torch.randn(X - 1, dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    whole = plain_softmax(positive, logits.unsqueeze(0)).item()
    drawn = logits[torch.randint(X - 1, (20_000, K))]
    estimate = corrected_softmax(X, K)(positive.expand(20_000), drawn.clone())[0].item() / 20_000
    uncorrected = sampled_softmax(positive.expand(20_000), drawn.clone())[0].item() / 20_000
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


def test_thinned_gradients_are_right_on_average_and_as_many_as_asked_for() -> None:
    torch.manual_seed(0)
    row = torch.randn(40).pow(3)
    row[5] = 0
    found = thinned(row.expand(40_000, 40).clone(), 8)
    probability = (8 * row.abs() / row.abs().sum()).clamp(max=1)
    assert (found != 0).sum(1).float().mean().item() == pytest.approx(probability.sum().item(), abs=0.01)
    assert set((found != 0).sum(1).tolist()) <= {int(probability.sum()), int(probability.sum()) + 1}
    # Within five standard errors of each entry's mean.
    error = 5 * (row.abs() * ((1 - probability) / probability.clamp(min=1e-9)).sqrt()) / 200
    assert ((found.mean(0) - row).abs() <= error + 1e-6).all()
    # What is kept of a row adds up to nearly what the row did.
    assert found.abs().sum(1).sub(row.abs().sum()).abs().max() <= row.abs().sum() / 8 + 1e-4


def test_few_gradients_are_all_kept_as_they_are() -> None:
    gradients = torch.tensor([[0.0, 1.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(thinned(gradients, 4), gradients)
