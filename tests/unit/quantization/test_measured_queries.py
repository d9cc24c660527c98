"""The score-aware loss under logged queries: its definition, its weights, and where it meets the even sphere."""

import numpy as np
import pytest
from embedding_scene import clustered
from measured_queries import measured_loss, measured_weights

from services.algorithms.quantization.product_quantizer import train_product_quantizer
from services.algorithms.quantization.score_aware import residual_parts, score_aware_loss, threshold_weights


def even_queries(count: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width))


def test_the_measured_loss_is_a_quadratic_form_per_point() -> None:
    points, queries = clustered(40, 10, 0).astype(np.float64), clustered(300, 10, 1).astype(np.float64)
    decoded = points + 0.1 * np.random.default_rng(2).normal(size=points.shape)
    found = measured_loss(points, decoded, 3.0 * queries, 0.25)
    units = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    for row, point in enumerate(points):
        high = units[units @ point >= 0.25]
        matrix = high.T @ high / len(units)
        residual = point - decoded[row]
        assert found[row] == pytest.approx(residual @ matrix @ residual, rel=1e-9)


def test_queries_spread_evenly_give_the_exact_weights_and_loss() -> None:
    points, queries = clustered(20, 8, 3), even_queries(60_000, 8, 4)
    weights = measured_weights(points, queries, 0.2)
    exact = threshold_weights(np.linalg.norm(points, axis=1), 8, 0.2)
    np.testing.assert_allclose(weights.ratio, exact.ratio, rtol=0.03)
    np.testing.assert_allclose(weights.across, exact.across, rtol=0.03)
    decoded = points + 0.1 * np.random.default_rng(5).normal(size=points.shape)
    found = measured_loss(points, decoded, queries, 0.2)
    np.testing.assert_allclose(found, score_aware_loss(points, decoded, 0.2), rtol=0.08)


def test_points_that_queries_seek_weigh_more() -> None:
    points = clustered(600, 12, 6)
    queries = points[:20].repeat(10, axis=0) + 0.05 * np.random.default_rng(7).normal(size=(200, 12))
    weights = measured_weights(points, queries, 0.5)
    norms = np.linalg.norm(points, axis=1)
    reached = ((points @ (queries / np.linalg.norm(queries, axis=1, keepdims=True)).T) >= 0.5).mean(axis=1)
    busy, quiet = reached > 0.1, (reached == 0) & (norms > 0.5)
    assert busy.any()
    assert quiet.any()
    assert weights.along[busy].min() > weights.along[quiet].max()
    assert np.isfinite(weights.log_across[quiet]).all()
    np.testing.assert_array_equal(weights.empty, norms <= 0.5)


def test_training_under_logged_queries_lowers_the_loss_that_they_feel() -> None:
    points = clustered(2_000, 16, 8)
    log, held_out = clustered(4_000, 16, 8)[2_000:], clustered(6_000, 16, 8)[4_000:]
    unit = float(np.sqrt((points**2).sum(axis=1).mean()))
    weights = measured_weights(points, log, 0.5 * unit)
    plain = train_product_quantizer(points, num_subspaces=4, code_bits=4, threshold=0.0, seed=0, rotate=False)
    measured = train_product_quantizer(points, num_subspaces=4, code_bits=4, weights=weights, seed=0, rotate=False)
    decoded = measured.decode(measured.encode(points, weights=weights))
    ours = measured_loss(points, decoded, held_out, 0.5 * unit).sum()
    theirs = measured_loss(points, plain.decode(plain.encode(points)), held_out, 0.5 * unit).sum()
    assert ours < 0.8 * theirs
    assert residual_parts(points, decoded)[0].sum() > 0


def test_bad_queries_are_named() -> None:
    points = clustered(20, 8, 9)
    with pytest.raises(ValueError, match=r"queries has shape \(3, 9\)"):
        measured_weights(points, np.ones((3, 9)), 0.2)
    with pytest.raises(ValueError, match="M of at least 1"):
        measured_loss(points, points, np.ones((0, 8)), 0.2)
    with pytest.raises(ValueError, match="must have a direction"):
        measured_weights(points, np.zeros((3, 8)), 0.2)
    with pytest.raises(ValueError, match="no logged query"):
        measured_weights(points, -points[:1] * 100, 1.5)
    with pytest.raises(ValueError, match="decoded has shape"):
        measured_loss(points, points[:3], points, 0.2)
