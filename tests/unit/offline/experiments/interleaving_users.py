"""Users that interleaving needs, as a share of those of an A/B test with CUPED for the same certainty, simulated.

    PYTHONPATH=.:stubs .venv/bin/python tests/unit/offline/experiments/interleaving_users.py

Users differ in how often they look and how readily they click (gamma). Each answer ranks 100 items with relevances of
its own. An arm's ranking is the relevance with noise: `quality` is the correlation, `shared` the share of the noise's
variance that both arms have in common, as two versions of one model do.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from services.algorithms.rules.team_draft import BOTH, team_draft
from services.offline.experiments.differences import ArmSums, difference, preference
from services.offline.experiments.sequential import estimate

ITEMS, K, LOOKS, CLICKS = 100, 10, 5.0, 0.15
VIEWED = 1 / np.log2(np.arange(K) + 2)
PAIRS = [(0.5, 0.52, 0.95), (0.5, 0.55, 0.9), (0.5, 0.55, 0.5), (0.5, 0.55, 0.0), (0.5, 0.6, 0.9), (0.5, 0.6, 0.5)]
PAIRS += [(0.5, 0.6, 0.0), (0.3, 0.6, 0.5), (0.3, 0.6, 0.0), (0.2, 0.9, 0.0)]


@dataclass
class User:
    """Expected and drawn values of a user: clicks under each arm, of the past, and by team in interleaved answers."""

    expected: np.ndarray
    clicks: np.ndarray
    past: int
    expected_teams: np.ndarray
    teams: np.ndarray


def sums_of(values: np.ndarray, past: np.ndarray | None = None) -> ArmSums:
    """Of users' values (U,) and pasts (U,)."""
    before = np.zeros_like(values) if past is None else past
    pairs = ((values, values), (before, before), (values, before))
    yy, xx, xy = (float(one @ other) for one, other in pairs)
    return ArmSums(len(values), float(values.sum()), yy, float(before.sum()), xx, xy)


def rankings(
    rng: np.random.Generator, relevance: np.ndarray, qualities: tuple[float, float], shared: float
) -> list[list[int]]:
    common, found = rng.normal(size=ITEMS), []
    for quality in qualities:
        noise = np.sqrt(shared) * common + np.sqrt(1 - shared) * rng.normal(size=ITEMS)
        found.append(np.argsort(-(quality * relevance + np.sqrt(1 - quality**2) * noise))[:K].tolist())
    return found


def people(rng: np.random.Generator, users: int, qualities: tuple[float, float], shared: float) -> Iterator[User]:
    coins = Random(int(rng.integers(2**32)))
    for ready in rng.gamma(0.5, 2.0, users) * CLICKS:
        one = User(np.zeros(2), np.zeros(2), rng.poisson(3 * LOOKS * ready), np.zeros(3), np.zeros(3))
        for _ in range(rng.geometric(1 / LOOKS)):
            relevance = rng.normal(size=ITEMS)
            chances = np.minimum(1.0, ready / (1 + np.exp(1 - 1.5 * relevance)))
            both = rankings(rng, relevance, qualities, shared)
            for arm, ranking in enumerate(both):
                seen = chances[ranking] * VIEWED
                one.expected[arm] += seen.sum()
                one.clicks[arm] += (rng.random(K) < seen).sum()
            items, teams = team_draft(*both, K, coins)
            seen = chances[items] * VIEWED
            np.add.at(one.expected_teams, teams, seen)
            np.add.at(one.teams, teams, rng.random(K) < seen)
        yield one


def needed(seed: int, users: int, qualities: tuple[float, float], shared: float) -> tuple[float, float]:
    """Return the lift of the second arm, and the share of the A/B test's users that interleaving needs."""
    found = list(people(np.random.default_rng(seed), users, qualities, shared))
    past = np.array([float(one.past) for one in found])
    arms = [sums_of(np.array([one.clicks[arm] for one in found]), past) for arm in range(2)]
    ab = difference(*arms)
    teams = np.array([one.teams for one in found])
    taken = teams[:, :BOTH].sum(1) > 0
    mixed = preference((teams[:, 1] - teams[:, 0])[taken], teams[taken, :BOTH].sum(1))
    assert ab is not None
    assert mixed is not None
    lift = float(np.sum([one.expected[1] - one.expected[0] for one in found]))
    by_team = np.sum([one.expected_teams for one in found], axis=0)
    shift = (by_team[1] - by_team[0]) / by_team[:BOTH].sum()
    # Of intervals of one shape, width / effect falls as the root of the users. Here each A/B arm has all users.
    ab_users = ((ab.estimate.high - ab.estimate.low) / (lift / users)) ** 2 * 2
    mixed_users = ((mixed.high - mixed.low) / shift) ** 2
    wider = interval_factor(2 * users) / interval_factor(int(taken.sum()))
    return lift / np.sum([one.expected[0] for one in found]), mixed_users * wider**2 / ab_users


def interval_factor(users: int) -> float:
    """Half the width of the interval at this number of users, in standard errors."""
    return estimate(0.0, 1.0, users).high


def main(users: int = 8_000) -> None:
    sys.stdout.write("quality of the arms | shared noise | lift | users needed\n")
    for *qualities, shared in PAIRS:
        lift, share = needed(1, users, tuple(qualities), shared)  # type: ignore[arg-type]
        sys.stdout.write(f"{qualities[0]:g}, {qualities[1]:g} | {shared:g} | {lift:+.1%} | 1/{1 / share:.1f}\n")


if __name__ == "__main__":
    main()
