"""The sampled softmax equals the plain formula, loss and every gradient, at odd shapes too."""

import pytest
import torch
from torch import Tensor

from services.offline.training.mol_sampled_softmax import GateWeights, Negatives, States, mol_sampled_softmax
from tests.unit.offline.training.by_pytorch import mol_sampled_softmax_reference

Inputs = tuple[list[Tensor], Negatives]


def inputs_of(
    positions: int,
    group: int,
    negatives: int,
    items: int,
    query: int,
    item: int,
    hidden: int,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    pairs, normalize = query * item, torch.nn.functional.normalize

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    tensors = [
        random(positions) * 0.3,
        normalize(random(positions, query, 5), dim=-1),
        random(positions, pairs),
        normalize(random(items, item, 5), dim=-1),
        random(items, pairs),
        random(hidden, pairs),
        random(hidden),
        random(pairs, hidden) * 0.5,
        random(pairs),
    ]
    rows = torch.randint(items, (-(-positions // group), negatives))
    return [tensor.requires_grad_() for tensor in tensors], Negatives(rows, torch.randint(items, (positions,)), group)


def loss_of(function, inputs: Inputs, **options) -> Tensor:
    tensors, negatives = inputs
    states = States(*tensors[1:3]), States(*tensors[3:5])
    return function(tensors[0], *states, GateWeights(*tensors[5:]), negatives, tau=0.05, **options)


@pytest.mark.parametrize(
    "shape",
    [(37, 8, 5, 11, 3, 2, 7), (8, 8, 1, 2, 1, 1, 1), (1, 4, 6, 9, 4, 2, 64), (65, 64, 3, 4, 1, 4, 3)],
    ids=["ragged last group", "one pair", "one position", "few items, many collisions"],
)
def test_loss_and_gradients_equal_the_reference(shape: tuple[int, ...]) -> None:
    inputs = inputs_of(*shape)
    ours = loss_of(mol_sampled_softmax, inputs)
    theirs = loss_of(mol_sampled_softmax_reference, inputs).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # A factor other than one, so that the incoming gradient is seen to matter.
    for found, expected in zip(
        torch.autograd.grad(3 * ours, inputs[0]), torch.autograd.grad(3 * theirs, inputs[0]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(37, 8, 5, 11, 3, 2, 7), (65, 64, 3, 4, 1, 4, 3)], ids=str)
def test_the_kernel_in_float32_equals_the_reference(shape: tuple[int, ...]) -> None:
    inputs = inputs_of(*shape, dtype=torch.float32)
    ours = loss_of(mol_sampled_softmax, inputs)
    theirs = loss_of(mol_sampled_softmax_reference, inputs).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for found, expected in zip(
        torch.autograd.grad(3 * ours, inputs[0]), torch.autograd.grad(3 * theirs, inputs[0]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dropouts", [{"gate_dropout": 0.4}, {"pair_dropout": 0.4}], ids=["gate", "pair"])
def test_the_kernels_dropout_follows_the_global_generator(dropouts: dict[str, float]) -> None:
    inputs = inputs_of(37, 8, 5, 11, 3, 2, 7, dtype=torch.float32)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(loss_of(mol_sampled_softmax, inputs, **dropouts).item())
    assert losses[0] == losses[1] != losses[2]


def test_a_thinned_backward_pass_leaves_the_loss_and_the_mean_gradient() -> None:
    inputs = inputs_of(12, 6, 30, 40, 2, 2, 5, dtype=torch.float32)
    every = loss_of(mol_sampled_softmax, inputs)
    wanted = torch.autograd.grad(every, inputs[0])
    torch.manual_seed(0)
    found = []
    for _ in range(400):
        thinned = loss_of(mol_sampled_softmax, inputs, backward_negatives=6)
        assert thinned.item() == every.item()
        found.append(torch.autograd.grad(thinned, inputs[0]))
    for gradient, draws in zip(wanted, zip(*found, strict=True), strict=True):
        stacked = torch.stack(draws)
        standard_error = (stacked.var(0).sum() / len(found)).sqrt()
        assert (stacked.mean(0) - gradient).norm() <= 2 * standard_error + 1e-5 * gradient.norm()
        assert standard_error < 0.1 * gradient.norm()


def test_a_position_whose_every_negative_is_its_target_costs_nothing() -> None:
    inputs = inputs_of(4, 4, 3, 1, 2, 2, 3)
    loss = loss_of(mol_sampled_softmax, inputs)
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, inputs[0]))


def test_gate_dropout_is_unbiased_enough_to_train_and_seeded() -> None:
    inputs = inputs_of(200, 50, 20, 30, 4, 2, 8)
    torch.manual_seed(1)
    one = loss_of(mol_sampled_softmax, inputs, gate_dropout=0.3)
    torch.manual_seed(1)
    assert loss_of(mol_sampled_softmax, inputs, gate_dropout=0.3).item() == one.item()
    plain = loss_of(mol_sampled_softmax, inputs).item()
    assert one.item() != plain
    assert one.item() == pytest.approx(plain, rel=0.3)


@pytest.mark.parametrize("dropouts", [{"gate_dropout": 0.4}, {"pair_dropout": 0.4}], ids=["gate", "pair"])
def test_gradients_under_dropout_equal_finite_differences(dropouts: dict[str, float]) -> None:
    inputs = inputs_of(5, 3, 4, 6, 2, 2, 3)

    def seeded_loss() -> Tensor:
        torch.manual_seed(3)
        return loss_of(mol_sampled_softmax, inputs, **dropouts)

    assert seeded_loss().item() != loss_of(mol_sampled_softmax, inputs).item()
    gradients = torch.autograd.grad(seeded_loss(), inputs[0])
    step = 1e-6
    for tensor, gradient in zip(inputs[0], gradients, strict=True):
        place = tuple(int(torch.randint(size, ())) for size in tensor.shape)
        with torch.no_grad():
            tensor[place] += step
            above = seeded_loss().item()
            tensor[place] -= 2 * step
            below = seeded_loss().item()
            tensor[place] += step
        assert (above - below) / (2 * step) == pytest.approx(gradient[place].item(), rel=1e-4, abs=1e-5)


def test_groups_that_do_not_cover_the_positions_are_refused() -> None:
    tensors, negatives = inputs_of(9, 4, 2, 5, 2, 2, 3)
    with pytest.raises(ValueError, match="2 groups and 9 targets; expected 3 and 9"):
        loss_of(mol_sampled_softmax, (tensors, negatives._replace(rows=negatives.rows[:2])))
