"""Estimate another policy's reward from the log of the policy that ran (decision 098).

An estimate needs the propensity (the probability) of each shown item at its position, above zero for every item that
the other policy may show. A log without randomisation is rejected.

Letters: N exposures, K positions.

Sources: inverse propensity scoring (IPS), Horvitz and Thompson, 1952; self-normalised (SNIPS), Swaminathan and
Joachims, NeurIPS 2015; doubly robust, Dudik, Langford and Li, ICML 2011; the item-position model for slates, Li,
Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay and Wen, "Offline evaluation of ranking policies with click models", KDD
2018.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyValue:
    """A reward per exposure and its 95 % interval over users.

    effective_users: the number of users under the other policy that would give as much information.
    """

    mean: float
    low: float
    high: float
    effective_users: float


class NoSupport(ValueError):
    """The log cannot evaluate the target policy."""


def ips(rewards: Array, logged: Array, target: Array, users: npt.NDArray[np.integer]) -> PolicyValue:
    """Estimate by inverse propensity scoring: unbiased, of high variance.

    Shapes: rewards, logged and target are (N, K), users (N,); K = 1 for single items. In the item-position model a
    position's reward depends on its item and position alone. logged, target: the probability with which the log's and
    the other policy put this item there. Exposures of one user are one observation.
    Raises: NoSupport; ValueError for shapes that differ or probabilities outside [0, 1].
    """
    weights = _weights(rewards, logged, target, users)
    return _mean_over_users((weights * rewards).sum(1), users, _effective(weights, users))


def snips(rewards: Array, logged: Array, target: Array, users: npt.NDArray[np.integer]) -> PolicyValue:
    """Estimate by the weighted mean of rewards, for slates per position: slightly biased, but of lower variance.

    The interval follows from the delta method. Arguments: see `ips`.
    """
    weights = _weights(rewards, logged, target, users)
    gained, totals = weights * rewards, weights.sum(0)
    means = np.divide(gained.sum(0), totals, out=np.zeros_like(totals), where=totals > 0)
    scale = len(rewards) / np.where(totals > 0, totals, 1.0)
    residuals = ((gained - weights * means) * scale).sum(1)
    found = _mean_over_users(residuals, users, _effective(weights, users))
    value = float(means.sum())
    return PolicyValue(
        mean=value, low=value + found.low, high=value + found.high, effective_users=found.effective_users
    )


def doubly_robust(
    rewards: Array, logged: Array, target: Array, users: npt.NDArray[np.integer], *, predicted: Array, expected: Array
) -> PolicyValue:
    """Estimate by a reward model, corrected by the log: unbiased if the propensities are right.

    predicted, shaped as rewards: the model's reward of the logged item. expected (N,): the model's reward of the other
    policy in that context. The model must not be trained on these exposures. Other arguments: see `ips`.
    """
    weights = _weights(rewards, logged, target, users)
    values = expected + (weights * (rewards - predicted)).sum(1)
    return _mean_over_users(values, users, _effective(weights, users))


def _weights(rewards: Array, logged: Array, target: Array, users: npt.NDArray[np.integer]) -> Array:
    if not (rewards.shape == logged.shape == target.shape) or rewards.ndim != 2 or len(users) != len(rewards):
        raise ValueError(
            f"rewards {rewards.shape}, logged {logged.shape}, target {target.shape}, users {users.shape}; allowed: one "
            "shape (N, K), and users (N,)"
        )
    if not rewards.size:
        raise NoSupport("no exposure; allowed: one at least")
    for name, values in (("logged", logged), ("target", target)):
        if not np.all((values >= 0) & (values <= 1)):
            raise ValueError(f"{name} holds {values[~((values >= 0) & (values <= 1))][0]}; allowed: 0 to 1")
    if np.any(logged == 0):
        raise NoSupport("a logged item has propensity 0: it cannot have been shown; the propensities are wrong")
    if np.all(logged == 1) and np.any(target != logged):
        raise NoSupport(
            "every logged propensity is 1: the log was made without chance, and says nothing of what was not shown. "
            "Reserve positions, run arms at random, or interleave"
        )
    weights: Array = target / logged
    return weights


def _effective(weights: Array, users: npt.NDArray[np.integer]) -> float:
    """Return Kish's effective sample size, (sum w)^2 / sum w^2; w sums the mean weights of a user's exposures."""
    per_user = _by_user(weights.mean(1), users)[0]
    squares = float(per_user @ per_user)
    return float(per_user.sum()) ** 2 / squares if squares else 0.0


def _by_user(values: Array, users: npt.NDArray[np.integer]) -> tuple[Array, Array]:
    dense = np.unique(users, return_inverse=True)[1]
    return np.bincount(dense, weights=values).astype(np.float64), np.bincount(dense).astype(np.float64)


def _mean_over_users(values: Array, users: npt.NDArray[np.integer], effective: float) -> PolicyValue:
    """Return the mean per exposure; its standard error is that of a ratio of users' sums."""
    sums, counts = _by_user(values, users)
    mean = float(values.mean())
    num_users = len(sums)
    if num_users < 2:
        return PolicyValue(mean=mean, low=-math.inf, high=math.inf, effective_users=effective)
    residuals = sums - mean * counts
    error = math.sqrt(num_users / (num_users - 1) * float(residuals @ residuals)) / len(values)
    return PolicyValue(mean=mean, low=mean - _Z * error, high=mean + _Z * error, effective_users=effective)
