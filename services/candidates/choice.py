"""Which algorithm answers a search that names none: the first loaded one that is done in time, by measured cost.

Loaded algorithms stand in order of preference, exact before cheap. A search may take a tenth of what its deadline
leaves when its batch begins: on an idle machine large catalogues are answered exactly, and while searches wait for
one another, cheaply; the answer says which.

Where a search wants a gap proven, the first one is that with the least cost over its chance of a proof, as measured on
such searches, and half of what the deadline leaves may be used: `exact` proves every gap, and comes last at the latest.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import inf

from services.algorithms.indexes.by_name import Algorithm, parse_algorithm

_SHARE = 0.1
# A cost that is not measured any more, as its algorithm is not chosen, halves in this time until it is tried again; not
# where trying would take more than half of what the deadline leaves.
_HALF_LIFE_S, _TRIED_SHARE = 30.0, 0.5
_WEIGHT = 0.2
# Gaps within one class are proven about as often as each other.
_GAPS = (0.003, 0.01, 0.03, 0.1, 0.3)
_LEAST_CHANCE = 0.01
_LARGE, _VERY_LARGE = 100_000, 3_000_000


def algorithms_for(text: str, *, num_items: int, num_pairs: int) -> list[Algorithm]:
    """What a setting names; "auto": `exact`, and beside it the codes' where the catalogue is large.

    Raises: ValueError naming the value and what is allowed.
    """
    if text != "auto":
        return [parse_algorithm(word) for word in text.split()]
    exact = [parse_algorithm("exact")]
    if num_items < _LARGE:
        return exact
    if num_pairs == 1:
        # Exact as well, from integer codes.
        return [parse_algorithm("quantized(200)"), *exact]
    pool_size = 4000 if num_items >= _VERY_LARGE else 2000
    return [*exact, parse_algorithm(f"quantized_tangents({pool_size})")]


class Choice:
    """Names of algorithms, the preferred one first, and what a search by each costs; for one thread."""

    def __init__(self, algorithms: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Seconds per search, and when they were measured; nothing: 0, it is tried.
        self._costs = {name: (0.0, clock()) for name in algorithms}
        # The share of searches that proved the gap that they were asked for, by algorithm and class of gaps.
        self._proofs: dict[tuple[str, int], float] = {}

    def took(self, algorithm: str, seconds: float) -> None:
        """A search by it took so long."""
        cost, _ = self._costs[algorithm]
        self._costs[algorithm] = (cost + _WEIGHT * (seconds - cost) if cost else seconds, self._clock())

    def proved(self, algorithm: str, max_gap: float, is_proven: bool) -> None:
        """A search by it proved the gap that it was asked for, or did not."""
        kind = (algorithm, bisect_right(_GAPS, max_gap))
        chance = self._proofs.get(kind, 1.0)
        self._proofs[kind] = chance + _WEIGHT * (is_proven - chance)

    def proving(
        self, max_gap: float, deadline: float | None, num_searches: int, tried: Sequence[str] = ()
    ) -> str | None:
        """What should prove the gap, of those that were not tried, for `num_searches` together until `deadline`; None:
        there is no time for any."""
        left = inf if deadline is None else max(0.0, deadline - self._clock()) / num_searches
        gaps = bisect_right(_GAPS, max_gap)
        costs = {
            name: cost / max(_LEAST_CHANCE, self._proofs.get((name, gaps), 1.0))
            for name, (cost, _) in self._costs.items()
            if name not in tried and cost <= _TRIED_SHARE * left
        }
        return min(costs, key=costs.__getitem__, default=None)

    def of(self, deadline: float | None, num_searches: int) -> str:
        """The first of them that `num_searches` together can have within their share of the time until `deadline` (on
        the clock), or the one that costs least; the first one without a deadline."""
        now, cheapest = self._clock(), ("", float("inf"))
        for name, (cost, measured) in self._costs.items():
            if deadline is None:
                return name
            left = max(0.0, deadline - now) / num_searches
            expected = cost * 0.5 ** ((now - measured) / _HALF_LIFE_S)
            if expected <= _SHARE * left and cost <= _TRIED_SHARE * left:
                return name
            cheapest = min(cheapest, (name, cost), key=lambda one: one[1])
        return cheapest[0]
