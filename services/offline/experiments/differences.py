"""Estimate differences between an experiment's arms, per user, from sums that a database computes.

Users are randomised, so a user is one observation, whatever the number of clicks. CUPED (Deng, Xu, Kohavi and Walker,
"Improving the sensitivity of online controlled experiments by utilizing pre-experiment data", WSDM 2013) subtracts from
each user's value the prediction by the user's past. Both arms have the same past on average, so the difference stays
unbiased and its interval becomes narrower.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.engine.intervals import Estimate, holm
from services.offline.experiments.sequential import ALPHA, MIN_USERS, TUNED_FOR_USERS, estimate

# Values above this quantile of all users count as the quantile: a script's 10,000 clicks must not decide.
CAPPED_ABOVE = 0.999


@dataclass(frozen=True, slots=True)
class ArmSums:
    """Sums over an arm's users. y: a user's value in the experiment; x: the user's value before it, or zero."""

    users: int
    y: float
    yy: float
    x: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def plus(self, other: "ArmSums") -> "ArmSums":
        """Return the sums over both groups of users."""
        return ArmSums(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def mean(self) -> float:
        return self.y / self.users

    def moments(self) -> tuple[float, float, float]:
        """Return the sample variance of y, of x, and their covariance."""
        free = max(1, self.users - 1)
        return (
            max(0.0, self.yy - self.y * self.y / self.users) / free,
            max(0.0, self.xx - self.x * self.x / self.users) / free,
            (self.xy - self.x * self.y / self.users) / free,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """An arm's mean value per user minus the control's.

    variance_kept: the share of the variance that CUPED left. adjusted: the p-value after Holm's correction.
    """

    estimate: Estimate
    control: float
    users: int
    variance_kept: float
    adjusted: float

    @property
    def relative(self) -> float | None:
        """Return the difference as a share of the control's mean; None if that is zero."""
        return self.estimate.mean / self.control if self.control else None


def difference(
    control: ArmSums, arm: ArmSums, *, alpha: float = ALPHA, tuned_for: int = TUNED_FOR_USERS
) -> Difference | None:
    """Return the arm minus the control, CUPED-adjusted; None before both have `MIN_USERS` users."""
    if min(control.users, arm.users) < MIN_USERS:
        return None
    var_y, var_x, cov = (
        (one * (control.users - 1) + other * (arm.users - 1)) / (control.users + arm.users - 2)
        for one, other in zip(control.moments(), arm.moments(), strict=True)
    )
    theta = cov / var_x if var_x > 0 else 0.0
    mean = arm.mean - control.mean - theta * (arm.x / arm.users - control.x / control.users)
    squared = sum(_adjusted_variance(one, theta) / one.users for one in (control, arm))
    users = control.users + arm.users
    return Difference(
        estimate=(found := estimate(mean, math.sqrt(squared), users, alpha=alpha, tuned_for=tuned_for)),
        control=control.mean,
        users=users,
        variance_kept=max(0.0, 1.0 - theta * cov / var_y) if var_y > 0 else 1.0,
        adjusted=found.p_value,
    )


def differences(
    metrics: Mapping[str, Mapping[str, ArmSums]], control: str, *, tuned_for: int = TUNED_FOR_USERS
) -> dict[tuple[str, str], Difference]:
    """Return (metric, arm) -> difference from the control; `metrics` is metric -> arm -> sums.

    All differences are one family: the intervals hold together (Bonferroni), and p-values have Holm's correction.
    """
    pairs = [(metric, arm) for metric, arms in metrics.items() for arm in arms if arm != control]
    level = ALPHA / max(1, len(pairs))
    found = {
        (metric, arm): one
        for metric, arm in pairs
        if (one := difference(metrics[metric][control], metrics[metric][arm], alpha=level, tuned_for=tuned_for))
        is not None
    }
    adjusted = holm({key: one.estimate.p_value for key, one in found.items()})
    return {key: replace(one, adjusted=adjusted[key]) for key, one in found.items()}


def preference(
    credit: npt.NDArray[np.float64], takes: npt.NDArray[np.float64], *, tuned_for: int = TUNED_FOR_USERS
) -> Estimate | None:
    """Estimate the preferred team of interleaving, in [-1, 1]; None before `MIN_USERS` users (decision 095).

    takes (U,): a user's takes of team slots, at least 1. credit (U,): takes of the second team's slots minus the
    first's. The estimate is the sum of credit over the sum of takes. If a user's takes exceed the quantile
    `CAPPED_ABOVE`, takes and credit are scaled down to it.
    """
    num_users = len(takes)
    if num_users < MIN_USERS:
        return None
    weights = np.minimum(1.0, np.quantile(takes, CAPPED_ABOVE) / takes)
    mean = float(weights @ credit / (weights @ takes))
    residuals = weights * (credit - mean * takes)
    error = math.sqrt(num_users / (num_users - 1) * float(residuals @ residuals)) / float(weights @ takes)
    return estimate(mean, error, num_users, tuned_for=tuned_for)


def _adjusted_variance(arm: ArmSums, theta: float) -> float:
    var_y, var_x, cov = arm.moments()
    return max(0.0, var_y - 2 * theta * cov + theta * theta * var_x)
