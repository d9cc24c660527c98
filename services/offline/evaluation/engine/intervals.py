"""Differences between arms, paired by event, with intervals over users and seeds.

The pigeonhole bootstrap (Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 1(2), 2007) draws users and
seeds independently, so an interval covers both. With a single seed it covers users alone.

Letters: S seeds, E events, R replicates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.engine.metrics import Ranks, gains

Values = npt.NDArray[np.float64]
Key = TypeVar("Key")
Interval = list[float]  # mean, low and high ends of its 95 % interval

REPLICATES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean or a difference of means, its interval (95 % by default), and the p-value of the mean being 0."""

    mean: float
    low: float
    high: float
    p_value: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    @property
    def is_above_zero(self) -> bool:
        return self.low > 0


def paired_difference(
    one: Values,
    other: Values,
    *,
    users: npt.NDArray[np.integer] | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Estimate:
    """Return how much higher `one` is than `other` on the same events.

    Shapes: one (S, E), other (S', E), a value per seed and event, such as a hit. users (E,): events of one user are
    drawn together; if None, each event is drawn separately.
    Raises: ValueError if the numbers of events differ or are 0.
    """
    if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1] or not one.size or not other.size:
        raise ValueError(f"values of shapes {one.shape} and {other.shape}; allowed: (S, E) and (S', E) with one E > 0")
    rng = np.random.default_rng(seed)
    group = np.arange(one.shape[1]) if users is None else np.unique(users, return_inverse=True)[1]
    num_groups = int(group.max()) + 1
    means = np.empty(replicates)
    for replicate in range(replicates):
        drawn = np.bincount(rng.integers(0, num_groups, num_groups), minlength=num_groups)[group]
        events = drawn / drawn.sum()
        means[replicate] = _mean(one, rng, events) - _mean(other, rng, events)
    low, high = interval(means)
    # No p-value is zero (Davison and Hinkley, 1997, equation 4.11).
    below, above = ((means <= 0).sum() + 1) / (replicates + 1), ((means >= 0).sum() + 1) / (replicates + 1)
    return Estimate(
        mean=float(one.mean() - other.mean()),
        low=low,
        high=high,
        p_value=float(min(1, 2 * min(below, above))),
    )


def interval(means: Values) -> tuple[float, float]:
    """Return the middle 95 % of replicates' means."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def drawn_means(
    values: Sequence[Values], groups: npt.NDArray[np.integer], *, replicates: int = REPLICATES, seed: int = 0
) -> list[Values]:
    """Return each array's means (R,) of values (E,), all over the same draws of groups (E,) of events."""
    present, dense = np.unique(groups, return_inverse=True)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(present), np.full(len(present), 1 / len(present)), size=replicates).astype(np.float64)
    events = drawn @ np.bincount(dense)
    return [drawn @ np.bincount(dense, weights=one) / events for one in values]


def estimates(
    ranks: Mapping[str, Ranks],
    groups: npt.NDArray[np.integer],
    metrics: Sequence[str],
    *,
    minus: str | None = None,
    seed: int = 0,
) -> dict[str, dict[str, Interval]]:
    """Return name -> metric -> [mean, low, high] over E events; {} without events.

    groups (E,): events of one group are drawn together. minus: the name whose values are subtracted, on the same draws.
    Ranks (E,) are 0-based.
    """
    if not len(groups):
        return {}
    values = {name: [gains(found, metric) for metric in metrics] for name, found in ranks.items()}
    draws = iter(drawn_means([one for found in values.values() for one in found], groups, seed=seed))
    rates = {name: [(float(one.mean()), next(draws)) for one in found] for name, found in values.items()}
    none = [(0.0, np.zeros(1))] * len(metrics)
    other = none if minus is None else rates.pop(minus)
    return {
        name: {
            metric: [round(one, 5) for one in (mean - base, *interval(drawn - base_drawn))]
            for metric, (mean, drawn), (base, base_drawn) in zip(metrics, found, other, strict=True)
        }
        for name, found in rates.items()
    }


def _mean(values: Values, rng: np.random.Generator, events: Values) -> float:
    seeds = rng.integers(0, len(values), len(values))
    return float((values[seeds] @ events).mean())


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Return key -> p-value adjusted by Holm's step-down correction (Holm, 1979)."""
    adjusted: dict[Key, float] = {}
    highest = 0.0
    for rank, (name, value) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        highest = max(highest, min(1.0, value * (len(p_values) - rank)))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds; None for fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
