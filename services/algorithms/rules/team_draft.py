"""Interleave two rankings, so that one user compares them in one answer.

Each ranking names its best item not yet in the answer. An item that both name belongs to both and does not count.
Otherwise both items are added, in an order that a coin decides. So coins do not decide which items are added, except
for a single last position, and a user who chooses by position prefers neither ranking.

Source: Radlinski, Kurup and Joachims, "How does clickthrough data reflect retrieval quality?", CIKM 2008, section 3.2;
there a coin gives an item that both name to one ranking.
"""

from collections.abc import Sequence
from random import Random

BOTH = 2


def team_draft(first: Sequence[str], second: Sequence[str], k: int, rng: Random) -> tuple[list[str], list[int]]:
    """At most k items and their teams: 0 for the first ranking, 1 for the second, or `BOTH`.

    When one ranking ends, the other's items belong to both.
    """
    rankings, at = (first, second), [0, 0]
    items: list[str] = []
    teams: list[int] = []
    taken: set[str] = set()
    while len(items) < k:
        best: list[str] = []
        for team, ranking in enumerate(rankings):
            while at[team] < len(ranking) and ranking[at[team]] in taken:
                at[team] += 1
            best += ranking[at[team] : at[team] + 1]
        if not best:
            break
        picks = [(item, team) for team, item in enumerate(best)] if len({*best}) == 2 else [(best[0], BOTH)]
        if rng.getrandbits(1):
            picks.reverse()
        for item, team in picks[: k - len(items)]:
            items.append(item)
            teams.append(team)
            taken.add(item)
    return items, teams
