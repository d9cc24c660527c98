"""Estimates of a policy that did not run: unbiased by exact enumeration, intervals that cover, refusals."""

import numpy as np
import pytest
from off_policy_tables import bias, coverage

from services.offline.experiments.off_policy import NoSupport, ips, snips


def test_ips_and_doubly_robust_are_exactly_unbiased() -> None:
    for exposures in (1, 3):
        for name, by in bias(exposures).items():
            assert by == pytest.approx(0.0, abs=1e-12) or "self-normalised" in name, name


def test_the_bias_of_self_normalised_estimates_falls_with_the_log() -> None:
    short, longer = bias(1), bias(3)
    for name in ("self-normalised IPS", "slates, self-normalised IPS"):
        assert 0.05 < abs(longer[name]) < abs(short[name]) / 2


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    found = coverage(300)
    for name, (covered, _) in found.items():
        assert 0.91 <= covered <= 0.98, name
    assert found["doubly robust"][1] < found["self-normalised IPS"][1] < found["IPS"][1]


def test_the_log_of_the_target_itself_is_worth_all_of_its_users() -> None:
    rewards, chances = np.array([[1.0], [0.0], [1.0], [1.0]]), np.array([[0.5], [0.5], [0.25], [0.5]])
    found = ips(rewards, chances, chances, np.arange(4))
    assert (found.mean, found.effective_users) == (0.75, 4.0)
    assert snips(rewards, chances, chances, np.arange(4)).mean == 0.75


def test_what_the_log_cannot_answer_is_refused() -> None:
    ones, users = np.ones((3, 1)), np.arange(3)
    with pytest.raises(NoSupport, match="without chance"):
        ips(ones, ones, np.array([[1.0], [0.0], [1.0]]), users)
    with pytest.raises(NoSupport, match="propensity 0"):
        ips(ones, np.array([[0.0], [1.0], [1.0]]), ones, users)
    with pytest.raises(NoSupport, match="no exposure"):
        ips(*[np.empty((0, 1))] * 3, np.empty(0, int))
    with pytest.raises(ValueError, match=r"target holds 1.5; allowed: 0 to 1"):
        ips(ones, ones / 2, ones * 1.5, users)
    with pytest.raises(ValueError, match="one shape"):
        ips(ones, ones[:2], ones, users)
