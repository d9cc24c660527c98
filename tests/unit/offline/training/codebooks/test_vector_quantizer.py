"""Whole-width centres under the score-aware loss: Theorem 4.2 as its proof has it."""

import itertools

import numpy as np
import pytest
import torch
from embedding_scene import clustered
from hypothesis import given, settings
from hypothesis import strategies as st

from services.offline.training.codebooks.inverted_file import train_inverted_file
from services.offline.training.codebooks.score_aware import residual_parts, score_aware_loss, threshold_weights
from services.offline.training.codebooks.targets import relative_weights, score_aware_targets
from services.offline.training.codebooks.vector_quantizer import train_vector_quantizer, updated_centres


@pytest.mark.parametrize("num_points", [5, 200], ids=["fewer points than axes", "more points than axes"])
def test_the_centre_update_is_theorem_4_2_with_the_weight_along_in_its_last_sum(num_points: int) -> None:
    points = clustered(num_points, 12, 0)
    norms = np.linalg.norm(points, axis=1)
    weights = threshold_weights(norms, 12, 0.3)
    along, across = weights.along, weights.across
    pull = points * ((along - across) / norms**2)[:, None]
    matrix = np.eye(12) * across.sum() + pull.T @ points
    as_proven = np.linalg.solve(matrix, along @ points)
    as_printed = np.linalg.solve(matrix, across @ points)
    targets = score_aware_targets(points, relative_weights(points, threshold=0.3, scale=1.0))
    found = updated_centres(targets, torch.zeros(num_points, dtype=torch.long), torch.zeros((1, 12)))[0].numpy()
    np.testing.assert_allclose(found, as_proven, atol=1e-4)

    def loss(centre: np.ndarray) -> float:
        return float(score_aware_loss(points, np.broadcast_to(centre, points.shape), 0.3).sum())

    assert loss(found) < 0.99 * loss(as_printed)
    rng = np.random.default_rng(1)
    assert all(loss(found) <= loss(found + 0.05 * rng.normal(size=12)) for _ in range(20))


def test_a_point_goes_to_the_centre_of_least_loss() -> None:
    points = clustered(500, 12, 2)
    quantizer = train_vector_quantizer(points, num_centres=20, threshold=0.3, seed=0)
    cells = quantizer.assign(points)
    weights = threshold_weights(np.linalg.norm(points, axis=1) / quantizer.scale, 12, 0.3)
    costs = np.empty((500, 20))
    for centre in range(20):
        along, across = residual_parts(points, np.broadcast_to(quantizer.centres[centre], points.shape))
        costs[:, centre] = weights.ratio * along + across
    assert (costs[np.arange(500), cells] <= costs.min(axis=1) * (1 + 1e-4) + 1e-6).all()
    assert (cells != np.linalg.norm(points[:, None] - quantizer.centres[None], axis=2).argmin(axis=1)).any()


@given(seed=st.integers(0, 1_000), num_centres=st.integers(1, 40), threshold=st.floats(0.05, 0.55))
@settings(deadline=None, max_examples=15)
def test_no_step_raises_the_loss(seed: int, num_centres: int, threshold: float) -> None:
    steps: list[tuple[str, float]] = []
    train_vector_quantizer(
        clustered(200, 8, seed),
        num_centres=num_centres,
        threshold=threshold,
        seed=seed,
        on_step=lambda name, loss: steps.append((name, loss)),
    )
    losses = [loss for _, loss in steps]
    assert all(after <= before * (1 + 1e-5) + 1e-12 for before, after in itertools.pairwise(losses)), steps


def test_every_point_can_be_a_centre_of_its_own() -> None:
    points = clustered(30, 8, 3)
    quantizer = train_vector_quantizer(points, num_centres=30, threshold=0.2, seed=0)
    np.testing.assert_allclose(quantizer.centres[quantizer.assign(points)], points, atol=1e-4)


def test_zero_vectors_have_a_cell() -> None:
    points = clustered(100, 8, 4)
    points[:10] = 0
    quantizer = train_vector_quantizer(points, num_centres=5, threshold=0.2, seed=0)
    cells = quantizer.assign(points[:10])
    assert (cells == np.linalg.norm(quantizer.centres, axis=1).argmin()).all()
    assert quantizer.assign(np.empty((0, 8), dtype=np.float32)).shape == (0,)


@pytest.mark.parametrize("num_centres", [0, 101])
def test_an_impossible_number_of_centres_is_refused(num_centres: int) -> None:
    with pytest.raises(ValueError, match=f"num_centres is {num_centres}"):
        train_vector_quantizer(clustered(100, 8, 5), num_centres=num_centres, threshold=0.2)


def test_an_inverted_file_stands_for_its_points_better_than_its_cells_alone() -> None:
    points = clustered(1_500, 16, 6)
    codebooks = train_inverted_file(points, num_cells=12, num_subspaces=4, code_bits=4, threshold=0.3, seed=0)
    codes, shortest = codebooks.coded(points), float(codebooks.shortest[0])
    with_codes = score_aware_loss(points, codes.decoded(), shortest).sum()
    assert with_codes < 0.7 * score_aware_loss(points, codes.centres[codes.cells], shortest).sum()
