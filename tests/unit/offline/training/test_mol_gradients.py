"""Training's kernel: each build's loss and gradients against autograd in double precision."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from native_builds import native_builds

from services.offline.training import mol_gradients
from services.offline.training.mol_gradients import INPUTS, SampledSoftmax
from services.offline.training.mol_sampled_softmax import GateWeights, Negatives, States, mol_sampled_softmax

BUILDS = native_builds(Path(mol_gradients.__file__).parent)

# N, R, K, M, P_q, P_x, d, G
SHAPES = [
    (37, 8, 5, 11, 3, 2, 7, 7),
    (9, 9, 64, 100, 1, 1, 3, 2),
    (70, 64, 40, 30, 4, 2, 50, 64),
    (5, 2, 300, 400, 8, 8, 17, 33),
]


def softmax_of(shape: tuple[int, ...], **options: float) -> SampledSoftmax:
    positions, group_size, negatives, items, query, item, width, hidden = shape
    rng, pairs = np.random.default_rng(sum(shape)), query * item

    def random(*size: int) -> np.ndarray:
        return rng.normal(size=size).astype(np.float32)

    def unit(*size: int) -> np.ndarray:
        vectors = random(*size)
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    found = SampledSoftmax(
        positive=0.3 * random(positions),
        query=unit(positions, query, width),
        query_gate=random(positions, pairs),
        items=unit(items, item, width),
        item_gate=random(items, pairs),
        hidden_weight=random(hidden, pairs),
        hidden_bias=random(hidden),
        out_weight=random(pairs, hidden),
        out_bias=random(pairs),
        rows=rng.integers(0, items, (-(-positions // group_size), negatives)),
        targets=rng.integers(0, items, positions),
        uniforms=rng.random(positions, dtype=np.float32),
        group_size=group_size,
        tau=0.3,
        correction=1.5,
    )
    return replace(found, **options)


def by_autograd(softmax: SampledSoftmax) -> tuple[float, dict[str, np.ndarray]]:
    """In double precision, where no kernel is used."""
    tensors = [torch.from_numpy(getattr(softmax, name)).double().requires_grad_() for name in INPUTS]
    negatives = Negatives(torch.from_numpy(softmax.rows), torch.from_numpy(softmax.targets), softmax.group_size)
    states, gate = (States(*tensors[1:3]), States(*tensors[3:5])), GateWeights(*tensors[5:])
    loss = mol_sampled_softmax(tensors[0], *states, gate, negatives, tau=softmax.tau, correction=softmax.correction)
    gradients = torch.autograd.grad(loss, tensors)
    return loss.item(), {name: gradient.numpy() for name, gradient in zip(INPUTS, gradients, strict=True)}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_equal_autograds(shape: tuple[int, ...], build: str) -> None:
    softmax = softmax_of(shape)
    loss, found = softmax.loss_and_gradients(kernels=BUILDS[build])
    wanted_loss, expected = by_autograd(softmax)
    assert loss == pytest.approx(wanted_loss, rel=3e-6)
    for name, wanted in expected.items():
        scale = max(float(np.abs(wanted).max()), 1e-6)  # of a single pair's weight, which is 1, the gradient is 0
        np.testing.assert_allclose(found[name] / scale, wanted / scale, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("build", BUILDS)
def test_chosen_negatives_count_what_stands_for_all(build: str) -> None:
    """With one pair and d = 1, a score is the item, and its gradient is the score's."""
    kernels, groups, kept = BUILDS[build], 20_000, 8
    rng = np.random.default_rng(0)
    row = rng.normal(size=40).astype(np.float32)
    row[:3] = 9  # so likely that they are always chosen
    ones = np.ones((groups, 1), np.float32)
    softmax = SampledSoftmax(
        positive=np.full(groups, 9.5, np.float32),
        query=ones[:, :, None],
        query_gate=ones,
        items=np.tile(row, groups)[:, None, None],
        item_gate=np.ones((40 * groups, 1), np.float32),
        **{name: np.ones((1, 1), np.float32) for name in ("hidden_weight", "out_weight")},
        **{name: np.ones(1, np.float32) for name in ("hidden_bias", "out_bias")},
        rows=np.arange(40 * groups).reshape(groups, 40),
        targets=np.where(np.arange(groups) % 2, -1, np.arange(groups) * 40 + 5),  # the sixth is its own target, or not
        uniforms=rng.random(groups, dtype=np.float32),
        group_size=1,
        tau=2.0,
        backward_negatives=kept,
    )
    found = softmax.loss_and_gradients(kernels=kernels)[1]["items"].reshape(groups, 40)
    assert not found[::2, 5].any()
    found = found[1::2]
    every = (
        replace(softmax, backward_negatives=0).loss_and_gradients(kernels=kernels)[1]["items"].reshape(groups, 40)[1]
    )
    probability = np.minimum(1, kept * every / every.sum())
    assert set((found != 0).sum(1)) <= {int(probability.sum()), int(probability.sum()) + 1}
    assert (found != 0).sum(1).mean() == pytest.approx(probability.sum(), abs=0.02)
    np.testing.assert_allclose(found[:, :3], np.tile(every[:3], (len(found), 1)), rtol=1e-5)
    # Within five standard errors of each entry's mean.
    error = 5 * every * np.sqrt((1 - probability) / probability / len(found))
    assert (np.abs(found.mean(0, dtype=np.float64) - every) <= error + 1e-6).all()
    # What is chosen of a row adds up to nearly what the row did.
    assert np.abs(found.sum(1) - every.sum()).max() <= every.sum() / kept + 1e-4


def test_as_many_chosen_as_there_are_is_every_negative() -> None:
    softmax = softmax_of(SHAPES[0])
    loss, every = softmax.loss_and_gradients()
    chosen_loss, chosen = replace(softmax, backward_negatives=10**6).loss_and_gradients()
    assert chosen_loss == loss
    for name in INPUTS:
        np.testing.assert_array_equal(chosen[name], every[name], err_msg=name)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dropout", ["gate_dropout", "pair_dropout"])
def test_gradients_under_dropout_are_those_of_the_loss(dropout: str, build: str) -> None:
    """Every call drops the same, so a step along a gradient changes the loss by the gradient's square."""
    kernels = BUILDS[build]
    softmax = softmax_of((13, 5, 9, 20, 4, 2, 8, 16), **{dropout: 0.4}, seed=7)
    loss, gradients = softmax.loss_and_gradients(kernels=kernels)
    assert abs(loss - replace(softmax, **{dropout: 0.0}).loss_and_gradients(kernels=kernels)[0]) > 0.01
    for name, gradient in gradients.items():
        step = 1e-2 * gradient / np.linalg.norm(gradient)
        above, below = (
            replace(softmax, **{name: getattr(softmax, name) + sign * step}).loss_and_gradients(kernels=kernels)[0]
            for sign in (1, -1)
        )
        assert (above - below) / 2e-2 == pytest.approx(np.linalg.norm(gradient), rel=5e-3), name


def test_a_seed_drops_its_share_and_another_seed_drops_others() -> None:
    first = softmax_of((400, 100, 30, 40, 2, 2, 8, 4), gate_dropout=0.25, seed=1)
    one, again = (first.loss_and_gradients()[0] for _ in range(2))
    assert one == again != replace(first, seed=2).loss_and_gradients()[0]
    # With one negative, a position whose weights are all dropped has no gradient with respect to its query.
    alone = replace(first, rows=first.rows[:, :1].copy(), targets=np.full(400, -1))
    dropped = ~alone.loss_and_gradients()[1]["query"].any(axis=(1, 2))
    assert dropped.mean() == pytest.approx(0.25**4, abs=0.01)


@pytest.mark.parametrize("backward_negatives", [0, 8])
def test_threads_change_rounding_only_and_repeat_their_bits(backward_negatives: int) -> None:
    one = softmax_of((90, 16, 40, 60, 4, 2, 20, 32), backward_negatives=backward_negatives)
    three = replace(one, threads=3)
    (loss, found), (_, again), (alone_loss, alone) = (softmax.loss_and_gradients() for softmax in (three, three, one))
    assert loss == pytest.approx(alone_loss, rel=1e-12)
    for name in INPUTS:
        np.testing.assert_array_equal(found[name], again[name], err_msg=name)
        np.testing.assert_allclose(found[name], alone[name], atol=1e-3, rtol=1e-4, err_msg=name)


def test_a_smaller_call_after_a_larger_one_finds_nothing_of_it() -> None:
    small, large = softmax_of(SHAPES[0]), softmax_of(SHAPES[3])
    loss, gradients = small.loss_and_gradients()
    large.loss_and_gradients()
    loss_again, again = small.loss_and_gradients()
    assert loss_again == loss
    for name in INPUTS:
        np.testing.assert_array_equal(again[name], gradients[name], err_msg=name)


def test_what_does_not_fit_is_refused_by_name() -> None:
    softmax = softmax_of(SHAPES[0])
    for change, message in (
        ({"item_gate": softmax.item_gate[1:]}, r"item_gate is float32 \(10, 6\) allowed: contiguous float32 \(11, 6\)"),
        ({"query_gate": softmax.query_gate.astype(np.float64)}, "query_gate is float64"),
        ({"rows": softmax.rows + 1}, "rows holds 1 to 11 allowed: 0 to 10"),
        ({"rows": softmax.rows[:-1].copy()}, r"rows is int64 \(4, 5\) allowed: contiguous int64 \(5, 5\)"),
        ({"targets": softmax.targets.astype(np.int32)}, "targets is int32"),
        ({"uniforms": softmax.uniforms[1:]}, r"uniforms is float32 \(36,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(softmax, **change).loss_and_gradients()
