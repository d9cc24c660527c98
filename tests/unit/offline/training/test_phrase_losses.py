"""The phrase model's losses: exact where they say so, unbiased where they say so."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.offline.training.phrases.losses import (
    LossSettings,
    Sampling,
    log_partition,
    log_sampled_partition,
    phrase_losses,
)


def drawn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 5), st.integers(1, 17), st.integers(1, 20), st.integers(0, 1000), st.sampled_from([0.1, 30.0]))
@settings(max_examples=25, deadline=None)
def test_the_chunked_partition_sum_is_the_dense_one_with_its_gradients(rows, vocabulary, chunk, seed, scale):
    x, weights = drawn(rows, 4, seed=seed, scale=scale), drawn(vocabulary, 4, seed=seed + 1)
    upstream = drawn(rows, seed=seed + 2)
    found, expected = [], []
    for answers, compute in (
        (found, lambda a, b: log_partition(a, b, chunk=chunk)),
        (expected, lambda a, b: torch.logsumexp(a @ b.T, dim=1)),
    ):
        a, b = x.clone().requires_grad_(), weights.clone().requires_grad_()
        total = compute(a, b)
        (total * upstream).sum().backward()
        answers += [total.detach(), a.grad, b.grad]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_half_precision_changes_the_sum_by_its_rounding_alone():
    x, weights = drawn(6, 16, seed=0).float(), drawn(50, 16, seed=1).float()
    exact = log_partition(x, weights)
    torch.testing.assert_close(log_partition(x, weights, half=True), exact, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("x", "weights"), [((3, 4), (5, 3)), ((3, 4), (0, 4)), ((4,), (5, 4))])
def test_shapes_that_do_not_fit_are_refused(x, weights):
    with pytest.raises(ValueError, match="expected"):
        log_partition(torch.zeros(x), torch.zeros(weights))


def test_the_losses_are_those_of_the_paper_written_out():
    x, weights = drawn(3, 5, 6, seed=3), drawn(9, 6, seed=4)
    targets = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [8, 7, 6, 5]])
    found = phrase_losses(x, weights, targets, LossSettings(chunk=2))
    l1 = l2 = l3 = 0.0
    for query in range(3):
        for place in range(4):
            token = int(targets[query, place])
            shares = torch.softmax(x[query, 1 + place] @ weights.T, dim=0)
            l1 -= float(torch.log(shares[token]))
            l3 += float(torch.logsumexp(x[query, 1 + place] @ weights.T, dim=0)) ** 2
            if token:
                l2 -= float(torch.log(torch.softmax(x[query, 0] @ weights.T, dim=0)[token]))
    assert float(found.positions) == pytest.approx(l1 / 12)
    assert float(found.shortlist) == pytest.approx(l2 / 12)
    assert float(found.normalisation) == pytest.approx(l3 / 12)
    assert float(found.total) == pytest.approx((l1 + 0.25 * l2 + l3) / 12)


def test_the_sampled_partition_sum_is_right_in_the_mean_over_every_draw():
    x, weights = drawn(2, 4, seed=5), drawn(6, 4, seed=6)
    targets = torch.tensor([1, 4])
    logits = (x * weights[targets]).sum(dim=1)
    chances = torch.tensor([0.1, 0.3, 0.05, 0.25, 0.2, 0.1], dtype=torch.float64)
    mean = torch.zeros(2, dtype=torch.float64)
    for first in range(6):
        for second in range(6):
            sampling = Sampling(tokens=torch.tensor([first, second]), chances=chances, rows=torch.tensor([0]))
            estimate = log_sampled_partition(x, weights, targets, logits, sampling)
            mean += chances[first] * chances[second] * estimate.exp()
    torch.testing.assert_close(mean, (x @ weights.T).exp().sum(dim=1))


def test_normalisation_on_drawn_rows_is_unbiased_with_its_gradient():
    x, weights = drawn(2, 3, 4, seed=7), drawn(7, 4, seed=8)
    targets = torch.tensor([[1, 2], [3, 0]])

    def loss_and_gradient(sampling):
        each = weights.clone().requires_grad_()
        # l1 and l2 are left out of the gradient: sampled ones are biased, by their logarithm.
        chosen = LossSettings(shortlist_weight=0.0, normalisation_weight=1.0)
        losses = phrase_losses(x, each, targets, chosen, sampling)
        without = phrase_losses(x, each, targets, LossSettings(shortlist_weight=0, normalisation_weight=0), sampling)
        (losses.total - without.total).backward()
        return losses.normalisation, each.grad

    exact = loss_and_gradient(None)
    draws = [
        loss_and_gradient(
            Sampling(tokens=torch.tensor([0]), chances=torch.full((7,), 1 / 7).double(), rows=torch.tensor(rows))
        )
        for rows in combinations(range(4), 2)
    ]
    for place in (0, 1):
        mean = torch.stack([draw[place] for draw in draws]).mean(dim=0)
        torch.testing.assert_close(mean, exact[place])


def test_targets_of_another_number_of_positions_are_refused():
    with pytest.raises(ValueError, match=r"expected \(2, 4, D\)"):
        phrase_losses(torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 3, dtype=torch.int64), LossSettings())
