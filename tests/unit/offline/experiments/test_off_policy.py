"""Estimates of a policy that did not run: unbiased by exact enumeration, intervals that cover, refusals."""

import itertools

import numpy as np
import pytest

from services.offline.experiments.off_policy import NoSupport, PolicyValue, doubly_robust, ips, snips

# Two contexts, three items: a small world whose every log can be enumerated.
CONTEXT = np.array([0.4, 0.6])
LOGGED = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
TARGET = np.array([[0.1, 0.1, 0.8], [0.7, 0.3, 0.0]])
REWARD = np.array([[0.1, 0.5, 0.9], [0.8, 0.2, 0.3]])
MODEL = np.array([[0.2, 0.4, 0.8], [0.9, 0.0, 0.1]])
TRUTH = float((CONTEXT[:, None] * TARGET * REWARD).sum())


def test_ips_and_doubly_robust_are_exactly_unbiased() -> None:
    expected = {"ips": 0.0, "doubly robust": 0.0}
    outcomes = list(itertools.product(range(2), range(3), (0.0, 1.0)))
    for log in itertools.product(outcomes, repeat=2):
        contexts, items = np.array([one[0] for one in log]), np.array([one[1] for one in log])
        rewards = np.array([one[2] for one in log])
        chance = float(
            np.prod([CONTEXT[c] * LOGGED[c, i] * (REWARD[c, i] if r else 1 - REWARD[c, i]) for c, i, r in log])
        )
        given = rewards, LOGGED[contexts, items], TARGET[contexts, items], np.arange(2)
        expected["ips"] += chance * ips(*given).mean
        model, of_target = MODEL[contexts, items], (TARGET * MODEL).sum(1)[contexts]
        expected["doubly robust"] += chance * doubly_robust(*given, predicted=model, expected=of_target).mean
    assert expected["ips"] == pytest.approx(TRUTH, abs=1e-12)
    assert expected["doubly robust"] == pytest.approx(TRUTH, abs=1e-12)


def test_slates_add_up_their_positions_exactly() -> None:
    """Two positions drawn without replacement; rewards depend on item and position alone."""
    reward = np.array([[0.9, 0.5, 0.1], [0.3, 0.2, 0.6]])  # position, item
    slates = list(itertools.permutations(range(3), 2))
    logged = np.array([0.3, 0.1, 0.2, 0.1, 0.2, 0.1])
    target = np.array([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])

    def marginal(chances: np.ndarray, position: int, item: int) -> float:
        return float(sum(p for slate, p in zip(slates, chances, strict=True) if slate[position] == item))

    truth = sum(p * reward[k, slate[k]] for slate, p in zip(slates, target, strict=True) for k in range(2))
    expected = 0.0
    for (slate, p), clicks in itertools.product(
        zip(slates, logged, strict=True), itertools.product((0.0, 1.0), repeat=2)
    ):
        chance = p * np.prod([reward[k, slate[k]] if clicks[k] else 1 - reward[k, slate[k]] for k in range(2)])
        ratios = [[marginal(chances, k, slate[k]) for k in range(2)] for chances in (logged, target)]
        expected += (
            chance * ips(np.array([clicks]), np.array([ratios[0]]), np.array([ratios[1]]), np.zeros(1, int)).mean
        )
    assert expected == pytest.approx(truth, abs=1e-12)


def simulated(rng: np.random.Generator, exposures: int = 2_000) -> dict[str, PolicyValue]:
    users = rng.integers(0, 500, exposures)
    contexts = np.where(rng.random(500) < CONTEXT[0], 0, 1)[users]
    items = np.array([rng.choice(3, p=LOGGED[context]) for context in contexts])
    rewards = (rng.random(exposures) < REWARD[contexts, items]).astype(float)
    given = rewards, LOGGED[contexts, items], TARGET[contexts, items], users
    model, of_target = MODEL[contexts, items], (TARGET * MODEL).sum(1)[contexts]
    return {
        "ips": ips(*given),
        "snips": snips(*given),
        "doubly robust": doubly_robust(*given, predicted=model, expected=of_target),
    }


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    runs = [simulated(rng) for _ in range(200)]
    for name in runs[0]:
        covered = np.mean([one[name].low <= TRUTH <= one[name].high for one in runs])
        assert 0.9 <= covered <= 0.99, name
        assert abs(np.mean([one[name].mean for one in runs]) - TRUTH) < 0.01, name
    widths = {name: np.mean([one[name].high - one[name].low for one in runs]) for name in runs[0]}
    assert widths["doubly robust"] < widths["ips"]


def test_the_log_of_the_target_itself_is_worth_all_of_its_users() -> None:
    rewards, chances = np.array([1.0, 0.0, 1.0, 1.0]), np.array([0.5, 0.5, 0.25, 0.5])
    found = ips(rewards, chances, chances, np.arange(4))
    assert (found.mean, found.effective_users) == (0.75, 4.0)
    assert snips(rewards, chances, chances, np.arange(4)).mean == 0.75


def test_what_the_log_cannot_answer_is_refused() -> None:
    ones, users = np.ones(3), np.arange(3)
    with pytest.raises(NoSupport, match="without chance"):
        ips(ones, ones, np.array([1.0, 0.0, 1.0]), users)
    with pytest.raises(NoSupport, match="propensity 0"):
        ips(ones, np.array([0.0, 1.0, 1.0]), ones, users)
    with pytest.raises(NoSupport, match="no exposure"):
        ips(np.empty(0), np.empty(0), np.empty(0), np.empty(0, int))
    with pytest.raises(ValueError, match=r"target holds 1.5; allowed: 0 to 1"):
        ips(ones, ones / 2, ones * 1.5, users)
    with pytest.raises(ValueError, match="one shape"):
        ips(ones, ones[:2], ones, users)
