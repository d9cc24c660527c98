"""Training's kernel: each build's scores and gradients against autograd in double precision."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_builds import native_builds
from torch.nn import functional

from services.algorithms.ops.mol_gradients import GroupScores

NETWORK = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
INPUTS = ("query", "query_gate", "items", "item_gate", *NETWORK)
# R, K, M, P_q, P_x, d, G
SHAPES = [(37, 5, 11, 3, 2, 7, 7), (9, 64, 100, 1, 1, 3, 2), (70, 40, 30, 4, 2, 50, 64), (5, 300, 400, 8, 8, 17, 33)]


def group_of(shape: tuple[int, ...], **options: float) -> tuple[GroupScores, np.ndarray]:
    positions, negatives, items, query, item, width, hidden = shape
    rng, pairs = np.random.default_rng(sum(shape)), query * item

    def random(*size: int) -> np.ndarray:
        return rng.normal(size=size).astype(np.float32)

    def unit(*size: int) -> np.ndarray:
        vectors = random(*size)
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    group = GroupScores(
        query=unit(positions, query, width),
        query_gate=random(positions, pairs),
        items=unit(items, item, width),
        item_gate=random(items, pairs),
        chosen=rng.integers(0, items, negatives),
        hidden_weight=random(hidden, pairs),
        hidden_bias=random(hidden),
        out_weight=random(pairs, hidden),
        out_bias=random(pairs),
        **options,
    )
    return group, random(positions, negatives)


def gradients_of(group: GroupScores, d_scores: np.ndarray, **options) -> dict[str, np.ndarray]:
    """By input; those of the chosen items summed per item."""
    network = {name: np.zeros_like(getattr(group, name)) for name in NETWORK}
    query, query_gate, chosen_items, chosen_gate = group.add_gradients(d_scores, network, **options)
    items, item_gate = np.zeros_like(group.items), np.zeros_like(group.item_gate)
    np.add.at(items, group.chosen, chosen_items)
    np.add.at(item_gate, group.chosen, chosen_gate)
    return {"query": query, "query_gate": query_gate, "items": items, "item_gate": item_gate, **network}


def with_zeros(d_scores: np.ndarray, share: float) -> np.ndarray:
    """So many of the gradients are zero, and all of the first position's."""
    is_zero = np.random.default_rng(3).random(d_scores.shape) < share
    is_zero[0] |= share > 0
    return np.where(is_zero, np.float32(0), d_scores)


@pytest.mark.parametrize("build", native_builds("mol_gradients"))
@pytest.mark.parametrize("share", [0.0, 0.8], ids="{:.0%} zero".format)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_gradients_equal_autograds(shape: tuple[int, ...], share: float, build: str) -> None:
    group, d_scores = group_of(shape)
    d_scores = with_zeros(d_scores, share)
    kernels = native_builds("mol_gradients")[build]
    q, query_gate, items, item_gate, w1, b1, w2, b2 = tensors = [
        torch.from_numpy(getattr(group, name)).double().requires_grad_() for name in INPUTS
    ]
    chosen = torch.from_numpy(group.chosen)
    cosines = torch.einsum("rqd,kxd->rkqx", q, items[chosen]).flatten(2)
    network = functional.linear(functional.silu(functional.linear(cosines, w1, b1)), w2, b2)
    weights = functional.silu(query_gate.unsqueeze(1) * item_gate[chosen] + network).softmax(-1)
    scores = (weights * cosines).sum(-1)
    expected = torch.autograd.grad((scores * torch.from_numpy(d_scores)).sum(), tensors)

    np.testing.assert_allclose(group.scores(kernels=kernels), scores.detach().numpy(), atol=3e-6)
    for (name, found), wanted in zip(gradients_of(group, d_scores, kernels=kernels).items(), expected, strict=True):
        scale = max(float(wanted.abs().max()), 1e-6)  # of a single pair's weight, which is 1, the gradient is 0
        np.testing.assert_allclose(found / scale, wanted.numpy() / scale, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("build", native_builds("mol_gradients"))
@pytest.mark.parametrize("share", [0.0, 0.6], ids="{:.0%} zero".format)
@pytest.mark.parametrize("dropout", ["gate_dropout", "pair_dropout"])
def test_gradients_under_dropout_are_those_of_the_scores(dropout: str, share: float, build: str) -> None:
    """Both calls drop the same, so a step along a gradient changes the loss by the gradient's square."""
    kernels = native_builds("mol_gradients")[build]
    group, d_scores = group_of((13, 9, 20, 4, 2, 8, 16), **{dropout: 0.4}, seed=7)
    d_scores = with_zeros(d_scores, share)
    plain = replace(group, **{dropout: 0.0})
    assert np.abs(group.scores(kernels=kernels) - plain.scores(kernels=kernels)).max() > 0.01
    for name, gradient in gradients_of(group, d_scores, kernels=kernels).items():
        step = 1e-2 * gradient / np.linalg.norm(gradient)
        above, below = (
            replace(group, **{name: getattr(group, name) + sign * step}).scores(kernels=kernels) for sign in (1, -1)
        )
        change = float(((above.astype(np.float64) - below) * d_scores).sum()) / 2e-2
        assert change == pytest.approx(np.linalg.norm(gradient), rel=5e-3), name


def test_a_seed_drops_its_share_and_another_seed_drops_others() -> None:
    group, _ = group_of((400, 30, 40, 2, 2, 8, 4), gate_dropout=0.25, seed=1)
    first, again, other = group.scores(), group.scores(), replace(group, seed=2).scores()
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5
    # Where all four weights are dropped the score is zero: .25^4 of the pairs.
    assert (first == 0).mean() == pytest.approx(0.25**4, rel=0.3)


def test_threads_change_rounding_only_and_repeat_their_bits() -> None:
    one, d_scores = group_of((90, 40, 60, 4, 2, 20, 32))
    three = replace(one, threads=3)
    np.testing.assert_array_equal(one.scores(), three.scores())
    found, again, alone = (gradients_of(group, d_scores) for group in (three, three, one))
    for name in INPUTS:
        np.testing.assert_array_equal(found[name], again[name], err_msg=name)
        np.testing.assert_allclose(found[name], alone[name], atol=1e-3, rtol=1e-4, err_msg=name)


def test_the_networks_gradients_are_added() -> None:
    group, d_scores = group_of(SHAPES[0])
    fresh = gradients_of(group, d_scores)
    network = {name: np.ones_like(getattr(group, name)) for name in NETWORK}
    group.add_gradients(d_scores, network)
    for name in NETWORK:
        np.testing.assert_allclose(network[name], fresh[name] + 1, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused_by_name() -> None:
    group, d_scores = group_of(SHAPES[0])
    with pytest.raises(ValueError, match=r"item_gate is float32 \(10, 6\) allowed: contiguous float32 \(11, 6\)"):
        replace(group, item_gate=group.item_gate[1:]).scores()
    with pytest.raises(ValueError, match="query_gate is float64"):
        replace(group, query_gate=group.query_gate.astype(np.float64)).scores()
    with pytest.raises(ValueError, match="chosen holds 0 to 11 allowed: 0 to 10"):
        replace(group, chosen=np.array([0, 11])).scores()
    with pytest.raises(ValueError, match="d_scores is float32"):
        gradients_of(group, d_scores[:, :-1].copy())
