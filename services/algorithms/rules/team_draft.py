"""Interleave two rankings, so that one user compares them in one answer.

Team draft: for each pair of slots a coin decides which ranking picks first, and each picks its best item that is not in
the answer yet. A user's choices from a team's slots count for its ranking.

Source: Radlinski, Kurup and Joachims, "How does clickthrough data reflect retrieval quality?", CIKM 2008, section 3.2.
"""

from collections.abc import Sequence
from random import Random


def team_draft(first: Sequence[str], second: Sequence[str], k: int, rng: Random) -> tuple[list[str], list[int]]:
    """Return at most k items and the team of each: 0 the first ranking, 1 the second. A ranking without items leaves
    its picks to the other.
    """
    rankings, at = (first, second), [0, 0]
    items: list[str] = []
    teams: list[int] = []
    taken: set[str] = set()
    while len(items) < k:
        before = len(items)
        starts = rng.getrandbits(1)
        for team in (starts, 1 - starts):
            ranking = rankings[team]
            while at[team] < len(ranking) and ranking[at[team]] in taken:
                at[team] += 1
            if at[team] < len(ranking) and len(items) < k:
                items.append(ranking[at[team]])
                teams.append(team)
                taken.add(ranking[at[team]])
        if len(items) == before:
            break
    return items, teams
