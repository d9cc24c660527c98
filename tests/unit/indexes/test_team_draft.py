"""Team draft: each ranking's best is in, chance decides the order alone, and a blind user prefers no ranking."""

import itertools
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from services.algorithms.rules.team_draft import BOTH, team_draft


class Coins(Random):
    """Coins that fall as given."""

    def __init__(self, given: tuple[int, ...]) -> None:
        super().__init__()
        self._given = list(given)

    def getrandbits(self, k: int) -> int:
        return self._given.pop(0)


def drafts(first: list[str], second: list[str], k: int) -> Iterator[tuple[list[str], list[int]]]:
    """The drafts of all coins: each is equally probable."""
    for coins in itertools.product((0, 1), repeat=k):
        yield team_draft(first, second, k, Coins(coins))


def test_each_pair_of_slots_has_one_pick_of_each_ranking() -> None:
    first, second = [f"a{n}" for n in range(10)], [f"b{n}" for n in range(10)]
    for seed in range(50):
        items, teams = team_draft(first, second, 10, Random(seed))
        assert [{teams[at], teams[at + 1]} for at in range(0, 10, 2)] == [{0, 1}] * 5
        assert [item for item, team in zip(items, teams, strict=True) if team == 0] == first[:5]
        assert [item for item, team in zip(items, teams, strict=True) if team == 1] == second[:5]


def test_an_item_that_both_name_next_belongs_to_both() -> None:
    found = {(tuple(items), tuple(teams)) for items, teams in drafts(["x", "a", "y"], ["x", "b", "y"], 4)}
    assert found == {(("x", "a", "b", "y"), (BOTH, 0, 1, BOTH)), (("x", "b", "a", "y"), (BOTH, 1, 0, BOTH))}


def test_who_chooses_by_position_alone_prefers_no_ranking() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        first, second = ([str(n) for n in rng.permutation(9)[: rng.integers(1, 9)]] for _ in range(2))
        k = int(rng.integers(1, 8))
        found = list(drafts(first, second, k))
        credits = [[{0: -1, 1: 1, BOTH: 0}[team] for team in teams] for _, teams in found]
        assert not np.sum(credits, axis=0).any()
        # An item's slot has the probability that the gateway logs: 1 if it belongs to both, else a half.
        for items, teams in found:
            for at, (item, team) in enumerate(zip(items, teams, strict=True)):
                share = np.mean([other[at] == item for other, _ in found])
                assert share == (1 if team == BOTH else 0.5)


@pytest.mark.parametrize("seed", range(5))
def test_a_short_ranking_leaves_its_picks_to_the_other_without_a_team(seed: int) -> None:
    items, teams = team_draft(["a"], ["b", "c", "d"], 10, Random(seed))
    assert sorted(items) == ["a", "b", "c", "d"]
    assert (sorted(teams[:2]), teams[2:]) == ([0, 1], [BOTH, BOTH])
    assert team_draft([], [], 10, Random(seed)) == ([], [])
    assert team_draft(["a", "b"], ["a", "b"], 1, Random(seed))[0] == ["a"]
