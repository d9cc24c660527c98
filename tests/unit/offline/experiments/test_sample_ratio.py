"""A sample ratio that does not fit raises an alarm, and one that does rarely does, however often one looks."""

import numpy as np
import pytest
from scipy.special import gammaln

from services.offline.experiments.sample_ratio import ALARM, p_value


def test_golden_value_of_a_beta_binomial_mixture() -> None:
    def log_beta(a: float, b: float) -> float:
        return float(gammaln(a) + gammaln(b) - gammaln(a + b))

    log_factor = log_beta(500 + 700, 500 + 500) - log_beta(500, 500) - 1_200 * np.log(0.5)
    assert p_value({"a": 700, "b": 500}, {"a": 0.5, "b": 0.5}) == pytest.approx(np.exp(-log_factor))


def test_shares_need_not_add_up_to_one_and_an_even_split_is_no_alarm() -> None:
    assert p_value({"a": 0, "b": 0}, {"a": 0.1, "b": 0.1}) == 1.0
    assert p_value({"a": 5_000, "b": 5_010}, {"a": 0.1, "b": 0.1}) == 1.0
    assert p_value({"a": 5_000, "b": 5_600}, {"a": 0.1, "b": 0.1}) < ALARM


def test_few_false_alarms_at_any_of_a_hundred_looks_and_lost_users_are_found() -> None:
    rng = np.random.default_rng(0)
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}

    def alarms(lost: float, level: float, experiments: int) -> float:
        found = 0
        for _ in range(experiments):
            arms = rng.choice(3, 10_000, p=list(shares.values()))
            arms = arms[~((arms == 2) & (rng.random(10_000) < lost))]
            counts = np.stack([np.cumsum(arms == arm)[99::100] for arm in range(3)], axis=1)
            found += any(p_value(dict(zip(shares, row.tolist(), strict=True)), shares) <= level for row in counts)
        return found / experiments

    assert alarms(0.0, 0.05, 200) <= 0.05
    assert alarms(0.2, ALARM, 50) == 1.0


@pytest.mark.parametrize("shares", [{"a": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 0.5, "b": -0.5}])
def test_bad_shares_are_named(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        p_value({"a": 1, "b": 1}, shares)
