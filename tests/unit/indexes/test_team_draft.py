"""Team draft: each ranking's best is in, teams are fair, and nothing stands twice."""

from random import Random

import pytest

from services.algorithms.rules.team_draft import team_draft


def test_each_pair_of_slots_has_one_pick_of_each_ranking() -> None:
    first, second = [f"a{n}" for n in range(10)], [f"b{n}" for n in range(10)]
    for seed in range(50):
        items, teams = team_draft(first, second, 10, Random(seed))
        assert [{teams[at], teams[at + 1]} for at in range(0, 10, 2)] == [{0, 1}] * 5
        assert [item for item, team in zip(items, teams, strict=True) if team == 0] == first[:5]
        assert [item for item, team in zip(items, teams, strict=True) if team == 1] == second[:5]


def test_an_item_of_both_is_credited_to_each_equally_often() -> None:
    drafts = [team_draft(["x", "a"], ["x", "b"], 3, Random(seed)) for seed in range(2_000)]
    assert all(items[0] == "x" and set(items) == {"x", "a", "b"} for items, _ in drafts)
    assert sum(teams[0] for _, teams in drafts) / 2_000 == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("seed", range(5))
def test_a_short_ranking_leaves_its_picks_to_the_other(seed: int) -> None:
    items, teams = team_draft(["a"], ["b", "c", "d"], 10, Random(seed))
    assert sorted(items) == ["a", "b", "c", "d"]
    assert sum(teams) == 3
    assert team_draft([], [], 10, Random(seed)) == ([], [])
    assert team_draft(["a", "b"], ["a", "b"], 1, Random(seed))[0] == ["a"]
