"""Arrivals: the asked rate, inside the run, reproducible."""

import numpy as np
import pytest

from loadtest.clock import arrivals


@pytest.mark.parametrize("kind", ["poisson", "uniform"])
def test_the_rate_is_met_inside_the_run(kind: str) -> None:
    due = arrivals(kind, rate_per_s=200, seconds=100, rng=np.random.default_rng(0))
    assert len(due) == pytest.approx(20_000, rel=0.03)
    assert due.min() >= 0
    assert due.max() < 100
    assert np.all(np.diff(due) >= 0)


def test_uniform_gaps_are_equal_and_poisson_gaps_are_exponential() -> None:
    rng = np.random.default_rng(0)
    even = np.diff(arrivals("uniform", rate_per_s=50, seconds=100, rng=rng))
    assert np.ptp(even) < 1e-9
    random = np.diff(arrivals("poisson", rate_per_s=50, seconds=400, rng=rng))
    # An exponential's deviation equals its mean.
    assert np.std(random) == pytest.approx(np.mean(random), rel=0.05)


def test_equal_seeds_give_equal_arrivals() -> None:
    first, second = (arrivals("poisson", rate_per_s=9, seconds=9, rng=np.random.default_rng(4)) for _ in range(2))
    assert first.tolist() == second.tolist()


def test_a_rate_of_zero_gives_no_arrivals() -> None:
    assert len(arrivals("poisson", rate_per_s=0, seconds=10, rng=np.random.default_rng(0))) == 0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="arrivals='bursty'; allowed: poisson, uniform"):
        arrivals("bursty", rate_per_s=1, seconds=1, rng=np.random.default_rng(0))
