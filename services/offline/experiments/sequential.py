"""Confidence sequences: intervals and p-values that stay valid at any number of looks at an experiment (decision 095).

They rely on the central limit theorem, so nothing is reported below `MIN_USERS` per arm.

Source: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence
sequences", Annals of Statistics 52(6), 2024 (arXiv:2103.06476), Theorem 2.2 and equation 12.
"""

import math

from services.offline.evaluation.engine.intervals import Estimate

ALPHA = 0.05
MIN_USERS = 100
# At this number of users the interval is narrowest, relative to the interval of a test of fixed size. At level .05
# the ratio is 27 % larger at a tenth of the users, and 7 % larger at ten times as many.
TUNED_FOR_USERS = 10_000


def estimate(
    mean: float, standard_error: float, users: int, *, alpha: float = ALPHA, tuned_for: int = TUNED_FOR_USERS
) -> Estimate:
    """Return the interval around a mean, or a difference of means, of `users` independent users, at level 1 - alpha.

    Interval and p-value are valid at every look.
    Raises: ValueError for a negative or undefined standard error, fewer than one user, or an alpha outside (0, 1).
    """
    if not 0 <= standard_error < math.inf or users < 1 or not 0 < alpha < 1:
        raise ValueError(
            f"standard_error={standard_error}, users={users}, alpha={alpha}; allowed: >= 0, >= 1, in (0, 1)"
        )
    time = users * _rho_squared(alpha, tuned_for)
    half = standard_error * math.sqrt((time + 1) / time * math.log((time + 1) / alpha**2))
    return Estimate(mean=mean, low=mean - half, high=mean + half, p_value=_p_value(mean, standard_error, time))


def _rho_squared(alpha: float, tuned_for: int) -> float:
    """The mixture's variance that makes the interval narrowest after `tuned_for` users (equation 12)."""
    wanted = -2 * math.log(alpha)
    return (wanted + math.log(wanted + 1)) / tuned_for


def _p_value(mean: float, standard_error: float, time: float) -> float:
    """The smallest alpha whose interval excludes zero, with the mixture's variance unchanged."""
    if standard_error == 0:
        return 0.0 if mean else 1.0
    z_squared = (mean / standard_error) ** 2
    return min(1.0, math.sqrt(time + 1) * math.exp(max(-700.0, -z_squared / 2 * time / (time + 1))))
