"""Choose the algorithm of a search that names none: the first, exact ones before cheap ones, whose measured cost is at
most a tenth of the time left. An idle machine answers large catalogues exactly, a busy one cheaply.

To prove a gap, the first attempt uses the algorithm with the least cost divided by its measured chance of a proof. It
may use half of the time left (decision 091).
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import inf

from services.algorithms.indexes.by_name import Algorithm, parse_algorithm

_SHARE = 0.1
# Only chosen algorithms are measured. Others are tried again, since expected costs halve in so many seconds, unless the
# last measured cost exceeds this share of the time left.
_HALF_LIFE_S, _TRIED_SHARE = 30.0, 0.5
_WEIGHT = 0.2
# Classes of gaps with similar chances of a proof.
_GAPS = (0.003, 0.01, 0.03, 0.1, 0.3)
_LEAST_CHANCE = 0.01
_LARGE, _VERY_LARGE = 100_000, 3_000_000


def algorithms_for(text: str, *, num_items: int, num_pairs: int) -> list[Algorithm]:
    """Return the configured algorithms; for "auto" `exact`, and for a large catalogue also one over codes.

    Raises: ValueError.
    """
    if text != "auto":
        return [parse_algorithm(word) for word in text.split()]
    exact = [parse_algorithm("exact")]
    if num_items < _LARGE:
        return exact
    if num_pairs == 1:
        # Exact too, from integer codes.
        return [parse_algorithm("quantized(200)"), *exact]
    pool_size = 4000 if num_items >= _VERY_LARGE else 2000
    return [*exact, parse_algorithm(f"quantized_tangents({pool_size})")]


class Choice:
    """Algorithms by preference, with costs per search. Not thread-safe."""

    def __init__(self, algorithms: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Seconds per search (0: not measured), and the time of the measurement.
        self._costs = {name: (0.0, clock()) for name in algorithms}
        # The share of searches that proved their gap, by algorithm and class.
        self._proofs: dict[tuple[str, int], float] = {}

    def took(self, algorithm: str, seconds: float) -> None:
        cost, _ = self._costs[algorithm]
        self._costs[algorithm] = (cost + _WEIGHT * (seconds - cost) if cost else seconds, self._clock())

    def proved(self, algorithm: str, max_gap: float, is_proven: bool) -> None:
        kind = (algorithm, bisect_right(_GAPS, max_gap))
        chance = self._proofs.get(kind, 1.0)
        self._proofs[kind] = chance + _WEIGHT * (is_proven - chance)

    def proving(
        self, max_gap: float, deadline: float | None, num_searches: int, tried: Sequence[str] = ()
    ) -> str | None:
        """Return the best algorithm, except those `tried`, to prove the gap for `num_searches` together until
        `deadline`; None if none is fast enough.
        """
        left = inf if deadline is None else max(0.0, deadline - self._clock()) / num_searches
        gaps = bisect_right(_GAPS, max_gap)
        costs = {
            name: cost / max(_LEAST_CHANCE, self._proofs.get((name, gaps), 1.0))
            for name, (cost, _) in self._costs.items()
            if name not in tried and cost <= _TRIED_SHARE * left
        }
        return min(costs, key=costs.__getitem__, default=None)

    def of(self, deadline: float | None, num_searches: int) -> str:
        """Return the first algorithm that answers `num_searches` together within `_SHARE` of the time until `deadline`,
        else the cheapest; without a deadline, the first.
        """
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
