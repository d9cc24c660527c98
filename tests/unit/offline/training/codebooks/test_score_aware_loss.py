"""The score-aware loss against its definition and the theorems (arXiv:1908.10396)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.offline.training.codebooks.score_aware import eta, residual_parts, score_aware_loss, threshold_weights

WIDTHS = (3, 5, 24, 25, 26, 100, 384, 784, 1024)
THRESHOLDS = (1e-6, 0.01, 0.1, 0.2, 0.5, 0.9, 0.99)


def eta_limit(threshold: float, width: int) -> float:
    """The paper's limit formula (equation 3)."""
    return (width - 1) * threshold**2 / (1 - threshold**2)


def simpson_eta(threshold: float, width: int) -> float:
    """eta by Simpson's rule on sin^d scaled by its largest value, which nothing here shares with the implementation."""
    widest = np.arccos(threshold)
    angle = np.linspace(0, widest, 40_001)
    with np.errstate(divide="ignore"):
        values = np.exp(width * (np.log(np.sin(angle)) - np.log(np.sin(widest))))
        edges = np.exp((width - 2) * (np.log(np.sin(angle)) - np.log(np.sin(widest))))
    rule = np.ones_like(angle)
    rule[1:-1:2], rule[2:-1:2] = 4, 2
    across = (rule * values).sum()
    # Theorem 3.2 as printed: (d - 1) times the integral of sin^(d-2) - sin^d, with the scale of the former put back.
    along = (width - 1) * ((rule * edges).sum() / np.sin(widest) ** 2 - across)
    return float(along / across)


@pytest.mark.parametrize("width", WIDTHS)
def test_eta_is_the_exact_integral_up_to_a_width_of_1024(width: int) -> None:
    for threshold in THRESHOLDS:
        assert eta(threshold, width) == pytest.approx(simpson_eta(threshold, width), rel=1e-6), (threshold, width)


def test_eta_in_the_plane_is_the_closed_form() -> None:
    for threshold in THRESHOLDS:
        angle = np.arccos(threshold)
        along, across = angle / 2 + np.sin(2 * angle) / 4, angle / 2 - np.sin(2 * angle) / 4
        assert eta(threshold, 2) == pytest.approx(along / across, rel=1e-9)


@given(threshold=st.floats(0, 0.999), width=st.integers(2, 2048))
@settings(deadline=None)
def test_an_error_along_never_weighs_less_than_one_across(threshold: float, width: int) -> None:
    found = eta(threshold, width)
    assert np.isfinite(found)
    assert found >= 1
    # Raising T only adds to the part along.
    assert eta(min(0.9995, threshold + 1e-3), width) >= found


def test_the_limit_formula_breaks_theorem_3_3_below_25_dimensions() -> None:
    assert all(eta_limit(0.2, width) < 1 for width in range(2, 25))
    assert eta_limit(0.2, 26) > 1
    assert all(eta(0.2, width) > 1.2 for width in range(2, 25))
    # The paper's example: d = 100, T = .2 is 4.125 by the limit and half as much again exactly.
    assert eta_limit(0.2, 100) == pytest.approx(4.125)
    assert eta(0.2, 100) == pytest.approx(5.953314, rel=1e-6)


def test_the_limit_is_reached_from_above_as_the_width_grows() -> None:
    ratios = [eta(0.2, width) / eta_limit(0.2, width) for width in (100, 1_000, 10_000)]
    assert ratios[0] > ratios[1] > ratios[2] > 1
    assert ratios[2] == pytest.approx(1, abs=0.01)


def test_without_a_threshold_both_parts_weigh_the_same() -> None:
    assert eta(0.0, 64) == 1
    weights = threshold_weights(np.array([1.0, 7.0]), 64, 0.0)
    # Half of the sphere scores above 0, and E[<q, e>^2] = 1 / d for any direction e.
    np.testing.assert_allclose(weights.along, 0.5 / 64, rtol=1e-12)
    np.testing.assert_allclose(weights.across, 0.5 / 64, rtol=1e-12)


def test_the_loss_is_the_expectation_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    width, norms = 12, np.array([1.0, 0.6, 2.5])
    points = rng.normal(size=(3, width))
    points *= norms[:, None] / np.linalg.norm(points, axis=1, keepdims=True)
    decoded = points + 0.3 * rng.normal(size=points.shape)
    queries = rng.normal(size=(200_000, width))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    errors = (queries @ points.T >= 0.3) * (queries @ (points - decoded).T) ** 2
    stated = score_aware_loss(points, decoded, 0.3)
    deviations = errors.std(axis=0) / np.sqrt(len(queries))
    assert (np.abs(errors.mean(axis=0) - stated) < 4 * deviations).all()
    # The bound is tight enough to notice h_par and h_perp changed places.
    along, across = residual_parts(points, decoded)
    weights = threshold_weights(norms, width, 0.3)
    swapped = weights.across * along + weights.along * across
    assert (np.abs(errors.mean(axis=0) - swapped) > 4 * deviations).all()


def test_weights_vary_with_the_norm() -> None:
    weights = threshold_weights(np.array([0.5, 1.0, 2.0]), 64, 0.2)
    assert (np.diff(weights.log_across) > 0).all()
    assert (np.diff(weights.ratio) < 0).all()
    # Only T / |x| matters to the ratio.
    np.testing.assert_allclose(weights.ratio, [eta(0.4, 64), eta(0.2, 64), eta(0.1, 64)], rtol=1e-12)


def test_weights_that_no_double_holds_are_kept_as_logarithms() -> None:
    weights = threshold_weights(np.array([1.0, 1.001]), 1024, 0.9)
    assert (weights.log_across < -745).all()
    assert (weights.across == 0).all()
    assert weights.log_across[1] > weights.log_across[0]
    assert weights.ratio[0] == pytest.approx(1 + 1023 * 0.81 / 0.19, rel=0.01)


def test_a_point_no_longer_than_the_threshold_can_never_matter() -> None:
    weights = threshold_weights(np.array([0.0, 0.1, 0.2, 0.2001]), 16, 0.2)
    np.testing.assert_array_equal(weights.empty, [True, True, True, False])
    points = np.zeros((2, 16))
    points[0, 0] = 0.15
    np.testing.assert_array_equal(score_aware_loss(points, np.ones((2, 16)), 0.2), [0, 0])


def test_the_parts_of_a_residual_add_up_to_its_square() -> None:
    rng = np.random.default_rng(1)
    points, decoded = rng.normal(size=(50, 9)), rng.normal(size=(50, 9))
    points[0] = 0
    along, across = residual_parts(points, decoded)
    np.testing.assert_allclose(along + across, ((points - decoded) ** 2).sum(axis=1), rtol=1e-12)
    assert along[0] == 0
    scaled_along, scaled_across = residual_parts(points[1:], 0.7 * points[1:])
    np.testing.assert_allclose(scaled_along, 0.09 * (points[1:] ** 2).sum(axis=1), rtol=1e-9)
    np.testing.assert_allclose(scaled_across, 0, atol=1e-12)


@pytest.mark.parametrize(
    ("norms", "width", "threshold", "message"),
    [
        ([1.0], 16, -0.1, "threshold is -0.1"),
        ([1.0], 16, float("nan"), "threshold is nan"),
        ([1.0], 1, 0.2, "width is 1"),
        ([-1.0], 16, 0.2, "norms"),
        ([float("inf")], 16, 0.2, "norms"),
    ],
)
def test_bad_arguments_are_named(norms: list[float], width: int, threshold: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        threshold_weights(np.array(norms), width, threshold)


def test_a_threshold_that_a_unit_vector_cannot_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold is 1"):
        eta(1.0, 16)


def test_residuals_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="decoded has shape"):
        residual_parts(np.ones((2, 4)), np.ones((3, 4)))
