"""Intervals hold at every look, and are not needlessly wide."""

import math

import numpy as np
import pytest
from interleaving_users import needed, sums_of

from services.offline.experiments.differences import ArmSums, difference, differences, preference
from services.offline.experiments.sequential import ALPHA, MIN_USERS, estimate


def test_golden_values_of_the_paper_s_equations() -> None:
    # rho^2 of equation 12 for alpha .05 after 10,000 users: (5.99146 + log 6.99146) / 10,000 = 7.9361e-4.
    time = 10_000 * (5.991464547 + math.log(6.991464547)) / 10_000
    half = 0.01 * math.sqrt((time + 1) / time * math.log((time + 1) / 0.0025))
    found = estimate(0.05, 0.01, 10_000)
    assert found.low == pytest.approx(0.05 - half, abs=1e-9)
    assert found.high == pytest.approx(0.05 + half, abs=1e-9)


def test_the_p_value_is_the_level_at_which_the_interval_touches_zero() -> None:
    for mean in (0.01, 0.031, 0.04):
        found = estimate(mean, 0.01, 5_000)
        assert (found.p_value < ALPHA) == (found.low > 0)
    touching = estimate(0.0, 0.01, 5_000).high
    assert estimate(touching, 0.01, 5_000).p_value == pytest.approx(ALPHA)


@pytest.mark.parametrize(
    ("error", "users", "alpha"), [(-1.0, 10, 0.05), (math.nan, 10, 0.05), (1.0, 0, 0.05), (1.0, 10, 1.0)]
)
def test_bad_input_is_named(error: float, users: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="allowed"):
        estimate(0.0, error, users, alpha=alpha)


def looked_at(
    rng: np.random.Generator, experiments: int, lift: float, looks: int = 100, every: int = 100
) -> tuple[float, float, float]:
    """Shares of simulated experiments that ever raise an alarm, that cover `lift` at all looks, and that do so with
    intervals of a fixed size. Users take a Poisson number of items, with rates of their own (gamma), as clicks do."""
    alarms = covered = fixed = 0
    for _ in range(experiments):
        num = looks * every
        rates = rng.gamma(0.5, 2.0, num)
        in_arm = rng.random(num) < 0.5
        values = rng.poisson(rates) + np.where(in_arm, rng.poisson(lift, num) if lift else 0, 0)
        sums = [
            np.cumsum(np.where(in_arm == side, one, 0.0))[every - 1 :: every]
            for side in (False, True)
            for one in (1.0, values, values**2)
        ]
        n0, y0, yy0, n1, y1, yy1 = sums
        alarm, all_covered, all_fixed = False, True, True
        for look in range(looks):
            found = difference(
                ArmSums(users=int(n0[look]), y=y0[look], yy=yy0[look]),
                ArmSums(users=int(n1[look]), y=y1[look], yy=yy1[look]),
            )
            if found is None:
                continue
            interval = found.estimate
            alarm |= not interval.low <= 0 <= interval.high
            all_covered &= interval.low <= lift <= interval.high
            var = [
                (yy - y * y / n) / (n - 1) / n
                for n, y, yy in ((n0[look], y0[look], yy0[look]), (n1[look], y1[look], yy1[look]))
            ]
            all_fixed &= abs(interval.mean - lift) <= 1.96 * math.sqrt(sum(var))
        alarms += alarm
        covered += all_covered
        fixed += all_fixed
    return alarms / experiments, covered / experiments, fixed / experiments


def test_peeking_a_hundred_times_raises_few_false_alarms_where_fixed_intervals_raise_many() -> None:
    alarms, covered, fixed = looked_at(np.random.default_rng(1), 400, lift=0.0)
    assert alarms <= 0.05
    assert covered >= 0.95
    assert fixed < 0.75


def test_a_known_lift_is_covered_at_all_looks() -> None:
    alarms, covered, _ = looked_at(np.random.default_rng(2), 200, lift=0.2)
    assert covered >= 0.94
    assert alarms > 0.95


def test_the_past_narrows_the_interval_and_moves_no_difference() -> None:
    rng = np.random.default_rng(4)
    past = rng.gamma(2.0, 1.0, 20_000)
    values = rng.poisson(past).astype(float)
    arm = rng.random(20_000) < 0.5
    values[arm] += rng.poisson(0.1, int(arm.sum()))
    without = difference(sums_of(values[~arm]), sums_of(values[arm]))
    adjusted = difference(sums_of(values[~arm], past[~arm]), sums_of(values[arm], past[arm]))
    assert without is not None
    assert adjusted is not None
    widths = [one.estimate.high - one.estimate.low for one in (without, adjusted)]
    share = np.corrcoef(past, values)[0, 1] ** 2
    assert widths[1] / widths[0] == pytest.approx(math.sqrt(1 - share), rel=0.02)
    assert adjusted.variance_kept == pytest.approx(1 - share, rel=0.03)
    assert adjusted.estimate.low <= 0.1 <= adjusted.estimate.high


def test_sums_are_those_of_the_values_whoever_adds_them_up() -> None:
    rng = np.random.default_rng(5)
    values, past = rng.normal(3, 2, 500), rng.normal(1, 1, 500)
    var_y, var_x, cov = sums_of(values, past).moments()
    expected = np.cov(values, past)
    assert (var_y, var_x, cov) == pytest.approx((expected[0, 0], expected[1, 1], expected[0, 1]))


def test_several_metrics_are_one_family() -> None:
    rng = np.random.default_rng(6)
    metrics = {
        name: {arm: sums_of(rng.normal(mean, 1, 2_000)) for arm, mean in (("a", 0.0), ("b", lift))}
        for name, lift in (("clicks", 0.25), ("hides", 0.0), ("value", 0.01))
    }
    found = differences(metrics, "a")
    alone = difference(metrics["clicks"]["a"], metrics["clicks"]["b"])
    one = found["clicks", "b"]
    assert alone is not None
    assert one.estimate.high - one.estimate.low > alone.estimate.high - alone.estimate.low
    assert one.adjusted == pytest.approx(min(1.0, 3 * one.estimate.p_value))
    assert one.adjusted < 0.05 < min(found["hides", "b"].adjusted, found["value", "b"].adjusted)


def test_nothing_is_said_of_few_users() -> None:
    few, many = sums_of(np.ones(MIN_USERS - 1)), sums_of(np.ones(MIN_USERS))
    assert difference(few, many) is None
    assert preference(np.ones(MIN_USERS - 1), np.ones(MIN_USERS - 1)) is None
    same = difference(many, many)
    assert same is not None
    assert (same.estimate.mean, same.estimate.low, same.estimate.high, same.estimate.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_a_preference_is_that_of_the_takes_and_a_script_decides_nothing() -> None:
    rng = np.random.default_rng(7)
    takes = rng.geometric(0.3, 2_000).astype(float)
    second = rng.binomial(takes.astype(int), 0.6)
    credit = 2.0 * second - takes
    found = preference(credit, takes)
    loud = preference(np.append(credit, -5_000.0), np.append(takes, 5_000.0))
    assert found is not None
    assert loud is not None
    assert found.low < 0.2 < found.high
    assert found.mean == pytest.approx(credit.sum() / takes.sum(), abs=0.01)
    assert min(found.low, loud.low) > 0


def test_interleaving_two_versions_of_a_model_needs_a_tenth_of_the_users() -> None:
    lift, share = needed(1, 1_000, (0.5, 0.55), 0.9)
    assert lift == pytest.approx(0.045, abs=0.01)
    assert share < 0.1


def test_a_preference_of_nobody_raises_few_alarms_however_often_one_looks() -> None:
    rng = np.random.default_rng(8)
    alarms = 0
    for _ in range(300):
        takes = rng.poisson(rng.gamma(0.5, 4.0, 3_000)) + 1.0
        credit = 2.0 * rng.binomial(takes.astype(int), 0.5) - takes
        looks = (preference(credit[:users], takes[:users]) for users in range(100, 3_001, 100))
        alarms += any(not one.low <= 0 <= one.high for one in looks if one is not None)
    assert alarms <= 15
