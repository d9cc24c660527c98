"""Bias and coverage of the off-policy estimators in a small world whose every log can be enumerated.

    PYTHONPATH=.:stubs .venv/bin/python tests/unit/offline/experiments/off_policy_tables.py

The reward model of the doubly robust estimator is wrong on purpose. Slates have two positions, and rewards that depend
on item and position alone.
"""

import itertools
import sys
from collections import Counter
from math import factorial, prod

import numpy as np

from services.offline.experiments.off_policy import PolicyValue, doubly_robust, ips, snips

# Two contexts, three items.
CONTEXT = np.array([0.4, 0.6])
LOGGED = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
TARGET = np.array([[0.1, 0.1, 0.8], [0.7, 0.3, 0.0]])
REWARD = np.array([[0.1, 0.5, 0.9], [0.8, 0.2, 0.3]])
MODEL = np.array([[0.2, 0.4, 0.8], [0.9, 0.0, 0.1]])
TRUTH = float((CONTEXT[:, None] * TARGET * REWARD).sum())
# Two positions of three items, drawn without replacement.
SLATES = np.array(list(itertools.permutations(range(3), 2)))
SLATE_LOGGED, SLATE_TARGET = np.array([0.3, 0.1, 0.2, 0.1, 0.2, 0.1]), np.array([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
SLATE_REWARD = np.array([[0.9, 0.5, 0.1], [0.3, 0.2, 0.6]])  # position, item
SLATE_TRUTH = float(SLATE_TARGET @ SLATE_REWARD[np.arange(2), SLATES].sum(1))


def of_items(contexts: np.ndarray, items: np.ndarray, rewards: np.ndarray, users: np.ndarray) -> dict[str, PolicyValue]:
    columns = rewards, LOGGED[contexts, items], TARGET[contexts, items]
    given = *(column[:, None] for column in columns), users
    model = {"predicted": MODEL[contexts, items][:, None], "expected": (TARGET * MODEL).sum(1)[contexts]}
    return {"IPS": ips(*given), "self-normalised IPS": snips(*given), "doubly robust": doubly_robust(*given, **model)}


def of_slates(slates: np.ndarray, rewards: np.ndarray, users: np.ndarray) -> dict[str, PolicyValue]:
    """slates: numbers of `SLATES`."""
    logged, target = (
        np.stack([((SLATES[:, at] == SLATES[slates, at, None]) * chances).sum(1) for at in range(2)], axis=1)
        for chances in (SLATE_LOGGED, SLATE_TARGET)
    )
    given = rewards, logged, target, users
    model = SLATE_REWARD[::-1]
    expected = np.full(len(slates), SLATE_TARGET @ model[np.arange(2), SLATES].sum(1))
    robust = doubly_robust(*given, predicted=model[np.arange(2), SLATES[slates]], expected=expected)
    return {"IPS": ips(*given), "self-normalised IPS": snips(*given), "doubly robust": robust}


def bias(exposures: int) -> dict[str, float]:
    """Return the exact bias over all logs of so many exposures."""
    found: Counter[str] = Counter()
    items = list(itertools.product(range(2), range(3), (0.0, 1.0)))
    for log in itertools.combinations_with_replacement(items, exposures):
        chances = [CONTEXT[c] * LOGGED[c, i] * (REWARD[c, i] if r else 1 - REWARD[c, i]) for c, i, r in log]
        columns = [np.array(column) for column in zip(*log, strict=True)]
        for name, one in of_items(*columns, np.arange(exposures)).items():
            found[name] += float(np.prod(chances)) * orders(log) * one.mean
    outcomes = list(itertools.product(range(len(SLATES)), itertools.product((0.0, 1.0), repeat=2)))
    for slate_log in itertools.combinations_with_replacement(outcomes, min(exposures, 3)):
        numbers, clicks = (np.array(column) for column in zip(*slate_log, strict=True))
        taken = SLATE_REWARD[np.arange(2), SLATES[numbers]]
        chance = np.prod(SLATE_LOGGED[numbers]) * np.prod(np.where(clicks == 1, taken, 1 - taken))
        for name, one in of_slates(numbers, clicks, np.arange(len(numbers))).items():
            found[f"slates, {name}"] += float(chance) * orders(slate_log) * one.mean
    return {name: value - (SLATE_TRUTH if "slates" in name else TRUTH) for name, value in found.items()}


def orders(log: tuple[object, ...]) -> int:
    """In how many orders the same exposures come."""
    return factorial(len(log)) // prod(factorial(n) for n in Counter(log).values())


def coverage(runs: int, exposures: int = 2_000, users: int = 500, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Return the share of simulated logs whose interval covers the truth, and the mean width of the intervals."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[tuple[bool, float]]] = {}
    for _ in range(runs):
        who = rng.integers(0, users, exposures)
        contexts = np.where(rng.random(users) < CONTEXT[0], 0, 1)[who]
        items = (rng.random(exposures)[:, None] > LOGGED.cumsum(1)[contexts]).sum(1)
        rewards = (rng.random(exposures) < REWARD[contexts, items]).astype(float)
        slates = rng.choice(len(SLATES), exposures, p=SLATE_LOGGED)
        clicks = (rng.random((exposures, 2)) < SLATE_REWARD[np.arange(2), SLATES[slates]]).astype(float)
        both = of_items(contexts, items, rewards, who)
        both |= {f"slates, {name}": one for name, one in of_slates(slates, clicks, who).items()}
        for name, one in both.items():
            truth = SLATE_TRUTH if "slates" in name else TRUTH
            found.setdefault(name, []).append((one.low <= truth <= one.high, one.high - one.low))
    return {
        name: (float(np.mean([c for c, _ in of])), float(np.mean([w for _, w in of]))) for name, of in found.items()
    }


def main() -> None:
    small, large, covered = bias(1), bias(4), coverage(2_000)
    sys.stdout.write("estimator | bias of 1 exposure | of 4 (slates: 3) | covered of 95 % | width\n")
    for name, (share, width) in covered.items():
        row = f"{name} | {small[name]:+.4f} | {large[name]:+.4f} | {share:.1%} | {width:.3f}\n"
        sys.stdout.write(row.replace("-0.0000", "+0.0000"))


if __name__ == "__main__":
    main()
