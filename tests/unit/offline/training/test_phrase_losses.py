"""The phrase model's losses are the paper's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.offline.training.phrases.losses import log_partition, phrase_losses


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
    found = phrase_losses(x, weights, targets)
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


def test_targets_of_another_number_of_positions_are_refused():
    with pytest.raises(ValueError, match=r"expected \(2, 4, D\)"):
        phrase_losses(torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 3, dtype=torch.int64))
