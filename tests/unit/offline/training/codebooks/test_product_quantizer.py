"""Product codebooks under the score-aware loss: each step against a naive solution, and bad input by name."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from embedding_scene import clustered
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.offline.training.codebooks.codebook_solve import solve_codebooks
from services.offline.training.codebooks.k_means import product_k_means
from services.offline.training.codebooks.product_quantizer import (
    balancing_rotation,
    decode,
    encode,
    train_product_quantizer,
)
from services.offline.training.codebooks.score_aware import score_aware_loss
from services.offline.training.codebooks.targets import (
    Targets,
    relative_weights,
    root_mean_square_norm,
    score_aware_targets,
)


def targets_of(points: np.ndarray, threshold: float, centres: np.ndarray | None = None) -> Targets:
    return score_aware_targets(points, relative_weights(points, threshold=threshold, scale=1.0), centres=centres)


def loss_of(codebooks: Codebooks, points: np.ndarray, threshold: float) -> float:
    """Of the points' codes; threshold: in units of their root mean square norm."""
    return float(
        score_aware_loss(points, codebooks.coded(points).decoded(), threshold * root_mean_square_norm(points)).sum()
    )


def total_loss(targets: Targets, codes: torch.Tensor, codebooks: torch.Tensor) -> float:
    return float(targets.losses(decode(codes, codebooks)).sum())


def normal_equations(targets: Targets, codes: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Appendix 7.5 literally: B_i as 0/1 matrices, the (d k) x (d k) matrix inverted, B_i^T x_i in the last factor."""
    num_subspaces, num_codewords, sub_width = codebooks.shape
    size = codebooks.numel()
    matrix, wanted = np.zeros((size, size)), np.zeros(size)
    for row in range(len(targets)):
        pick = np.zeros((num_subspaces * sub_width, size))
        for subspace, code in enumerate(codes[row].tolist()):
            for axis in range(sub_width):
                column = (subspace * num_codewords + code) * sub_width + axis
                pick[subspace * sub_width + axis, column] = 1
        direction = targets.directions[row].double().numpy()
        metric = np.eye(len(direction)) + float(targets.stiffness[row]) * np.outer(direction, direction)
        weight = float(targets.weights[row])
        matrix += weight * pick.T @ metric @ pick
        wanted += weight * pick.T @ metric @ targets.vectors[row].double().numpy()
    return torch.from_numpy(np.linalg.lstsq(matrix, wanted, rcond=None)[0].reshape(codebooks.shape))


def test_the_targets_loss_is_the_score_aware_loss_up_to_one_factor() -> None:
    points = clustered(200, 12, 0)
    decoded = points + 0.2 * np.random.default_rng(1).normal(size=points.shape).astype(np.float32)
    found = targets_of(points, 0.3).losses(torch.from_numpy(decoded)).numpy()
    ratios = found / score_aware_loss(points, decoded, 0.3)
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-4)


def test_the_codebook_solve_reaches_the_solution_of_the_normal_equations() -> None:
    points = clustered(300, 8, 2)
    targets = targets_of(points, 0.3)
    generator = torch.Generator().manual_seed(3)
    codebooks = product_k_means(targets.vectors, 4, 16, generator)
    codes = encode(targets, codebooks)
    exact = normal_equations(targets, codes, codebooks)
    least = total_loss(targets, codes, exact)
    solved = solve_codebooks(targets, codes, codebooks, max_steps=200, tolerance=1e-8)
    assert total_loss(targets, codes, solved) == pytest.approx(least, rel=1e-5)
    # The bound could not hide a wrong right-hand side: the start is much worse.
    assert total_loss(targets, codes, codebooks) > 1.02 * least


@pytest.mark.parametrize("max_steps", [1, 2, 5])
def test_every_number_of_solver_steps_lowers_the_loss(max_steps: int) -> None:
    targets = targets_of(clustered(400, 16, 4), 0.3)
    codebooks = product_k_means(targets.vectors, 8, 16, torch.Generator().manual_seed(0))
    codes = encode(targets, codebooks)
    solved = solve_codebooks(targets, codes, codebooks, max_steps=max_steps)
    assert total_loss(targets, codes, solved) < total_loss(targets, codes, codebooks)


def test_an_unused_codeword_survives_the_solve() -> None:
    targets = targets_of(clustered(100, 8, 5), 0.3)
    codebooks = product_k_means(targets.vectors, 2, 16, torch.Generator().manual_seed(0))
    codes = encode(targets, codebooks)
    codes[codes == 3] = 4
    solved = solve_codebooks(targets, codes, codebooks)
    torch.testing.assert_close(solved[:, 3], codebooks[:, 3])
    assert bool(torch.isfinite(solved).all())


def test_encoding_ends_where_no_single_codeword_can_be_changed_for_the_better() -> None:
    targets = targets_of(clustered(150, 12, 6), 0.3)
    codebooks = product_k_means(targets.vectors, 3, 16, torch.Generator().manual_seed(0))
    codes = encode(targets, codebooks)
    present = targets.losses(decode(codes, codebooks))
    for subspace, codeword in itertools.product(range(3), range(16)):
        other = codes.clone()
        other[:, subspace] = codeword
        # float32 tables against float64 losses
        assert bool((targets.losses(decode(other, codebooks)) >= present * (1 - 1e-4) - 1e-9).all())


def test_coordinate_descent_comes_close_to_the_best_of_all_codes() -> None:
    targets = targets_of(clustered(300, 12, 7), 0.3)
    codebooks = product_k_means(targets.vectors, 3, 16, torch.Generator().manual_seed(0))
    found = targets.losses(decode(encode(targets, codebooks), codebooks))
    best = torch.full_like(found, torch.inf)
    for choice in itertools.product(range(16), repeat=3):
        best = torch.minimum(best, targets.losses(decode(torch.tensor(choice).expand(300, 3), codebooks)))
    assert float(found.sum()) < 1.02 * float(best.sum())
    assert float((found <= best * (1 + 1e-4)).double().mean()) > 0.85


def test_encoding_from_a_start_never_loses() -> None:
    targets = targets_of(clustered(200, 12, 8), 0.3)
    codebooks = product_k_means(targets.vectors, 4, 16, torch.Generator().manual_seed(0))
    start = torch.randint(16, (200, 4), generator=torch.Generator().manual_seed(1))
    before = targets.losses(decode(start, codebooks))
    after = targets.losses(decode(encode(targets, codebooks, start), codebooks))
    assert bool((after <= before * (1 + 1e-5)).all())


def test_without_a_threshold_encoding_is_the_nearest_codeword() -> None:
    points = clustered(200, 12, 9)
    targets = targets_of(points, 0.0)
    codebooks = product_k_means(targets.vectors, 4, 16, torch.Generator().manual_seed(0))
    nearest = torch.cdist(torch.from_numpy(points).view(-1, 4, 3).transpose(0, 1), codebooks).argmin(dim=2).T
    torch.testing.assert_close(encode(targets, codebooks), nearest)


@given(
    seed=st.integers(0, 1_000),
    num_subspaces=st.sampled_from([1, 2, 4, 8]),
    threshold=st.floats(0, 0.55),
    num_points=st.integers(16, 400),
)
@settings(deadline=None, max_examples=25)
def test_no_step_of_training_raises_the_loss(seed: int, num_subspaces: int, threshold: float, num_points: int) -> None:
    steps: list[tuple[str, float]] = []
    train_product_quantizer(
        clustered(num_points, 16, seed),
        num_subspaces=num_subspaces,
        code_bits=4,
        threshold=threshold,
        seed=seed,
        on_step=lambda name, loss: steps.append((name, loss)),
    )
    losses = [loss for _, loss in steps]
    assert len(losses) >= 1
    assert all(after <= before * (1 + 1e-5) + 1e-12 for before, after in itertools.pairwise(losses)), steps


@pytest.mark.parametrize(("num_subspaces", "code_bits"), [(8, 4), (4, 8)])
def test_score_aware_training_beats_l2_training_at_its_own_loss(num_subspaces: int, code_bits: int) -> None:
    points = clustered(3_000, 16, 10)
    losses = {}
    for threshold in (0.0, 0.3):
        codebooks = train_product_quantizer(
            points, num_subspaces=num_subspaces, code_bits=code_bits, threshold=threshold, seed=0
        )
        assert codebooks.coded(points).codes.shape == (3_000, num_subspaces)
        losses[threshold] = loss_of(codebooks, points, 0.3)
    assert losses[0.3] < 0.9 * losses[0.0]


def test_equal_seeds_give_equal_codebooks_and_other_seeds_others() -> None:
    points = clustered(500, 8, 11)
    first, again, other = (
        train_product_quantizer(points, num_subspaces=4, code_bits=4, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.codebooks, again.codebooks)
    assert not np.array_equal(first.codebooks, other.codebooks)


def test_short_and_zero_points_are_encoded_by_plain_l2() -> None:
    points = clustered(600, 8, 13)
    codebooks = train_product_quantizer(points, num_subspaces=4, code_bits=4, threshold=0.4, seed=0)
    length = 0.3 * root_mean_square_norm(points)
    short = length * points[:50] / np.linalg.norm(points[:50], axis=1, keepdims=True)
    short[0] = 0
    plain = replace(codebooks, shortest=np.zeros(1))
    np.testing.assert_array_equal(codebooks.coded(short).codes, plain.coded(short).codes)
    assert (codebooks.coded(points).codes != plain.coded(points).codes).any()


def test_a_catalogue_with_zero_vectors_trains_as_if_they_were_absent() -> None:
    points = clustered(600, 8, 14)
    points[::7] = 0
    codebooks = train_product_quantizer(points, num_subspaces=4, code_bits=4, seed=0)
    kept = points[np.linalg.norm(points, axis=1) > 0]
    zero = score_aware_loss(kept, np.zeros_like(kept), 0.2 * root_mean_square_norm(kept))
    assert loss_of(codebooks, kept, 0.2) < 0.3 * zero.sum()


def test_the_parallel_direction_of_a_residual_is_the_datapoints_own() -> None:
    points = clustered(2_000, 32, 16)
    threshold = 0.5
    cells = product_k_means(torch.from_numpy(points), 1, 20, torch.Generator().manual_seed(0))[0].numpy()
    nearest = cells[np.linalg.norm(points[:, None] - cells[None], axis=2).argmin(axis=1)]
    residuals = np.ascontiguousarray(points - nearest)
    shared = {"num_subspaces": 8, "code_bits": 4, "threshold": threshold, "seed": 0}
    own = train_product_quantizer(points, centres=cells, **shared)  # type: ignore[arg-type]
    wrong = train_product_quantizer(residuals, **shared)  # type: ignore[arg-type]
    shortest = threshold * root_mean_square_norm(points)
    of_wrong = score_aware_loss(points, nearest + wrong.coded(residuals).decoded(), shortest).sum()
    assert loss_of(own, points, threshold) < 0.8 * of_wrong


def test_a_rotation_shares_the_variance_and_changes_no_inner_product() -> None:
    rng = np.random.default_rng(21)
    # Four wide axes side by side: without a rotation one subspace has nearly all the variance.
    points = (rng.normal(size=(1_000, 16)) * ([4.0] * 4 + [0.5] * 12)).astype(np.float32)
    rotation = balancing_rotation(torch.from_numpy(points), 4).numpy()
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(16), atol=1e-5)
    variances = (points @ rotation).var(axis=0).reshape(4, 4)
    assert np.ptp(np.log(variances).sum(axis=1)) < 0.3
    assert np.ptp(np.log(points.var(axis=0)).reshape(4, 4).sum(axis=1)) > 10
    turned, plain = (
        train_product_quantizer(points, num_subspaces=4, code_bits=4, seed=0, rotate=rotate) for rotate in (True, False)
    )
    assert plain.rotation is None
    assert loss_of(turned, points, 0.2) < 0.7 * loss_of(plain, points, 0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_subspaces": 3}, "num_subspaces is 3; it must divide the points' width 8"),
        ({"num_subspaces": 0}, "num_subspaces is 0"),
        ({"code_bits": 6}, "code_bits is 6"),
        ({"code_bits": 8}, "100 points cannot train 256 codewords"),
        ({"threshold": -0.5}, "threshold is -0.5"),
        ({"threshold": 5.0}, "threshold is 5.0 and the longest point"),
        ({"points": np.zeros((100, 8), dtype=np.float32)}, "every point is the zero vector"),
        ({"points": np.full((100, 8), np.nan, dtype=np.float32)}, "points holds NaN"),
        ({"points": np.ones(100, dtype=np.float32)}, r"points has shape \(100,\)"),
        ({"points": np.ones((100, 1), dtype=np.float32), "num_subspaces": 1}, "width is 1"),
        ({"centres": np.ones((3, 6), dtype=np.float32)}, r"centres has shape \(3, 6\); expected \(C, 8\)"),
    ],
)
def test_bad_training_input_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"points": clustered(100, 8, 19), "num_subspaces": 4, "code_bits": 4, **change}
    points = arguments.pop("points")
    with pytest.raises(ValueError, match=message):
        train_product_quantizer(points, **arguments)  # type: ignore[arg-type]
