"""Intervals cover what varies, and no more."""

import numpy as np
import pytest

from services.offline.evaluation.engine.intervals import holm, paired_difference, spread


def hits(rng: np.random.Generator, rates: list[float], events: int = 2000) -> np.ndarray:
    return (rng.random((len(rates), events)) < np.array(rates)[:, None]).astype(float)


def test_equal_arms_differ_by_exactly_nothing() -> None:
    values = hits(np.random.default_rng(0), [0.2, 0.2, 0.2])
    found = paired_difference(values, values, replicates=200)
    assert found.mean == 0
    assert found.low <= 0 <= found.high
    assert not found.is_above_zero


def test_a_clear_difference_is_seen_and_its_sign_follows_the_order() -> None:
    rng = np.random.default_rng(0)
    one, other = hits(rng, [0.3] * 3), hits(rng, [0.2] * 3)
    found, reverse = paired_difference(one, other), paired_difference(other, one)
    assert found.is_above_zero
    assert reverse.high < 0
    assert found.mean == pytest.approx(one.mean() - other.mean())
    assert found.p_value < 0.01


def test_seeds_that_disagree_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    other = hits(rng, [0.2, 0.2, 0.2])
    agreeing = paired_difference(hits(rng, [0.24, 0.24, 0.24]), other)
    disagreeing = paired_difference(hits(rng, [0.14, 0.24, 0.34]), other)
    assert disagreeing.high - disagreeing.low > 2 * (agreeing.high - agreeing.low)
    assert not disagreeing.is_above_zero


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        one, other = hits(rng, [0.25] * 3, 400), hits(rng, [0.2] * 3, 400)
        found = paired_difference(one, other, replicates=200)
        covered += found.low <= 0.05 <= found.high
    assert covered >= 52


def test_events_of_one_user_are_drawn_together() -> None:
    rng = np.random.default_rng(4)
    users = np.repeat(np.arange(50), 40)
    gains = rng.normal(0, 1, 50)[users][None]  # all of a user's alike: 50 answers, not 2,000
    alone = paired_difference(gains, np.zeros_like(gains), replicates=300)
    together = paired_difference(gains, np.zeros_like(gains), users=users, replicates=300)
    assert together.mean == alone.mean
    assert together.high - together.low > 4 * (alone.high - alone.low)


def test_events_must_be_the_same() -> None:
    with pytest.raises(ValueError, match=r"\(1, 3\) and \(1, 4\)"):
        paired_difference(np.zeros((1, 3)), np.zeros((1, 4)))


def test_holm_is_the_textbooks() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == pytest.approx({"a": 1.0, "b": 1.0})


def test_one_seed_has_no_spread() -> None:
    assert spread([0.2]) is None
    assert spread([0.1, 0.3]) == pytest.approx(0.1414, abs=1e-4)
