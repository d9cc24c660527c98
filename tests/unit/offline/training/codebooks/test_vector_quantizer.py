"""Theorem 4.2 as its proof has it, and the cells of an inverted file."""

import numpy as np
import pytest
from embedding_scene import clustered

from services.offline.training.codebooks.inverted_file import train_inverted_file
from services.offline.training.codebooks.score_aware import score_aware_loss, threshold_weights


def test_theorem_4_2_needs_the_weight_along_in_its_last_sum() -> None:
    points = clustered(200, 12, 0)
    norms = np.linalg.norm(points, axis=1)
    weights = threshold_weights(norms, 12, 0.3)
    along, across = weights.along, weights.across
    pull = points * ((along - across) / norms**2)[:, None]
    matrix = np.eye(12) * across.sum() + pull.T @ points
    as_proven = np.linalg.solve(matrix, along @ points)
    as_printed = np.linalg.solve(matrix, across @ points)

    def loss(centre: np.ndarray) -> float:
        return float(score_aware_loss(points, np.broadcast_to(centre, points.shape), 0.3).sum())

    assert loss(as_proven) < 0.99 * loss(as_printed)
    rng = np.random.default_rng(1)
    assert all(loss(as_proven) <= loss(as_proven + 0.05 * rng.normal(size=12)) for _ in range(20))


def test_zero_vectors_have_the_cell_nearest_to_zero() -> None:
    points = clustered(300, 8, 4)
    points[:10] = 0
    codes = train_inverted_file(points, num_cells=5, num_subspaces=4, code_bits=4).coded(points)
    assert (codes.cells[:10] == np.linalg.norm(codes.centres, axis=1).argmin()).all()


@pytest.mark.parametrize("num_cells", [0, 101])
def test_an_impossible_number_of_cells_is_refused(num_cells: int) -> None:
    with pytest.raises(ValueError, match=f"num_cells is {num_cells}"):
        train_inverted_file(clustered(100, 8, 5), num_cells=num_cells, num_subspaces=4, code_bits=4)


def test_an_inverted_file_stands_for_its_points_better_than_its_cells_alone() -> None:
    points = clustered(1_500, 16, 6)
    codebooks = train_inverted_file(points, num_cells=12, num_subspaces=4, code_bits=4, threshold=0.3, seed=0)
    codes, shortest = codebooks.coded(points), float(codebooks.shortest[0])
    with_codes = score_aware_loss(points, codes.decoded(), shortest).sum()
    assert with_codes < 0.7 * score_aware_loss(points, codes.centres[codes.cells], shortest).sum()
