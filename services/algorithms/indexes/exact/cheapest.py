"""Exact top-K by the cheapest strategy, which is found by timing the searches themselves.

Requests are grouped by batch size, K and allowed gap. A group's first searches try each strategy in turn; then the
cheapest per query is used. Bounds are cheapest with sharp gates; scoring all items is cheapest in a small catalogue.
"""

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import TypeVar

import numpy as np

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.exact.two_pass import ExactLowPrecision
from services.algorithms.indexes.mutable.index import Build
from services.algorithms.indexes.protocol import Index, Mask, Pass, Pool, TopK
from services.algorithms.indexes.scored_index import ScoredIndex
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates

# A strategy's cost is the median of its last turns, because the cost of bounds varies widely between queries. It is CPU
# time of the thread, because wall-clock time under sixfold load chose a strategy 1.7 times as expensive.
_TURNS, _LAST = 3, 5
# Three searches in 200 try another strategy whose cost was at most 4 times as large, in case its turns were disturbed.
_LOOK_AGAIN_EVERY, _WORTH_LOOKING_AT = 200, 4.0

# Allowed gaps between two of these cost about the same; smaller ones cost nearly as much as gap 0.
_GAPS = (0.003, 0.03, 0.3)

_Kind = tuple[int, int, int]
_Found = TypeVar("_Found")


class Exact(ScoredIndex):
    """The cheapest exact strategy. Certificate: exact, or within a search's allowed gap.

    An answer's first pass names the strategy: "strategy:<name>", 0 seconds. Memory is that of exact_low_precision.
    Bounds need a softmax gate.
    """

    name = "exact"

    def __init__(
        self,
        items: MolScorer,
        *,
        pool_size: int | None = None,
    ) -> None:
        """Prepare like `ScoredIndex`, with `pool_size` for `ExactLowPrecision`."""
        super().__init__(items)
        self._coded = ExactLowPrecision(self.scorer, pool_size=pool_size)
        self.strategies = (self._coded, BruteForce(self.scorer))
        self._lock = threading.Lock()
        # Seconds per query of each strategy's turns.
        self._measured: dict[_Kind, list[list[float]]] = defaultdict(lambda: [[] for _ in self.strategies])
        self._started: dict[_Kind, int] = defaultdict(int)

    @property
    def nbytes(self) -> int:
        return self._coded.nbytes

    def chosen(self, *, batch: int, k: int) -> str | None:
        """The chosen strategy's name; None until each strategy has three turns."""
        with self._lock:
            measured = self._measured[_kind(batch, k)]
        if any(len(turns) < _TURNS for turns in measured):
            return None
        return self.strategies[_cheapest(measured)].name

    def carry_over_from(self, earlier: "Exact") -> None:
        """Copy the timings of `earlier`, an index over nearly the same items."""
        with earlier._lock:
            measured = {kind: [list(turns) for turns in found] for kind, found in earlier._measured.items()}
            started = dict(earlier._started)
        with self._lock:
            self._measured.update(measured)
            self._started.update(started)

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None, max_gap: float = 0.0) -> TopK:
        self.check(queries, k, allowed)
        answer, strategy = self._by_turn(
            queries, k, lambda strategy: strategy.search(queries, k, allowed, max_gap), max_gap
        )
        return replace(answer, passes=(strategy, *answer.passes))

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """See `ExactLowPrecision.first_stage`."""
        self.check(queries, size, allowed)
        pool, strategy = self._by_turn(queries, size, lambda strategy: strategy.first_stage(queries, size, allowed))
        return replace(pool, passes=(strategy, *pool.passes))

    def _by_turn(
        self, queries: QueryStates, k: int, ask: Callable[[Index], _Found], max_gap: float = 0.0
    ) -> tuple[_Found, Pass]:
        kind = _kind(len(queries), k, max_gap)
        number = self._turn(kind)
        started = time.thread_time()
        found = ask(self.strategies[number])
        seconds = (time.thread_time() - started) / max(1, len(queries))
        with self._lock:
            turns = self._measured[kind][number]
            turns[:] = [*turns, seconds][-_LAST:]
        nothing = np.zeros(len(queries), dtype=np.int64)
        return found, Pass(f"strategy:{self.strategies[number].name}", 0.0, nothing)

    def _turn(self, kind: _Kind) -> int:
        with self._lock:
            started = self._started[kind]
            self._started[kind] += 1
            measured = self._measured[kind]
            if started < _TURNS * len(self.strategies) or not all(measured):
                return started % len(self.strategies)
            cheapest = _cheapest(measured)
            if started % _LOOK_AGAIN_EVERY >= _TURNS:
                return cheapest
            limit = _WORTH_LOOKING_AT * median(measured[cheapest])
            others = [number for number, turns in enumerate(measured) if number != cheapest and median(turns) <= limit]
            return others[started // _LOOK_AGAIN_EVERY % len(others)] if others else cheapest


def carry_over(build: Build) -> Build:
    """A build whose exact indexes copy the timings of the previous index of the same name and similar size.

    Timings of a delta block do not apply to the main segment, nor the reverse.
    """
    before: dict[str, Exact] = {}

    def built(items: MolScorer) -> Mapping[str, Index]:
        indexes = build(items)
        exact = {name: index for name, index in indexes.items() if isinstance(index, Exact)}
        for name, index in exact.items():
            earlier = before.get(name)
            if earlier is not None and 2 * index.num_items < earlier.num_items:
                continue
            if earlier is not None and index.num_items <= 2 * earlier.num_items:
                index.carry_over_from(earlier)
            before[name] = index
        return indexes

    return built


def _cheapest(measured: list[list[float]]) -> int:
    return int(np.argmin([median(turns) for turns in measured]))


def _kind(batch: int, k: int, max_gap: float = 0.0) -> _Kind:
    """Group requests of similar cost: batch sizes by powers of 4, K by powers of 10."""
    return ((max(1, batch) - 1).bit_length() // 2, len(str(k)), bisect_right(_GAPS, max_gap))
