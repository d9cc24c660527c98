"""Fold the whole log from offset zero, to verify a live state or to start a new model. No running process is needed.

The rebuild reads up to the end that the log had at the start and publishes nothing. It returns digests that can be
compared with those of a running refresher. A refresher with the same bundle and policy continues from saved
checkpoints.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.platform.errors import DependencyUnavailable
from services.refresher.domain.partition import Partition
from services.refresher.domain.rules import Rules
from services.refresher.handlers.checkpoints import snapshot
from services.refresher.handlers.fold import FoldRecords
from services.refresher.ports import Checkpoints, Log

# Called with records folded so far, and total.
Progressed = Callable[[int, int], None]
_SILENCE_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RebuiltPartition:
    """A partition folded up to `folded_offset` (-1 if it is empty)."""

    partition: int
    folded_offset: int
    digest: str
    num_items: int
    num_remembered: int
    counts: Mapping[str, int]
    other_models: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RebuildReport:
    """Result of a rebuild."""

    model_version: str
    policy: str
    records: int
    seconds: float
    partitions: list[RebuiltPartition]

    @property
    def counts(self) -> Counter[str]:
        """Return the number of records by outcome."""
        return sum((Counter(one.counts) for one in self.partitions), Counter())


class Rebuild:
    """Folds the log in one pass."""

    def __init__(self, *, log: Log, rules: Rules, progress: Progressed = lambda done, total: None) -> None:
        self._log, self._rules, self._progress = log, rules, progress

    def run(self, checkpoints: Checkpoints | None = None) -> RebuildReport:
        """Fold the whole log, and save the states to `checkpoints`, if given.

        Raises: DependencyUnavailable, also if no record arrives for 20 seconds before the end; PreconditionFailed.
        """
        began = time.monotonic()
        withdrawn = {listing.item_id: listing.withdrawn for listing in self._log.listings()}
        bounds = self._log.bounds(self._log.partitions())
        states = {number: Partition(number, self._rules, withdrawn) for number in bounds}
        for number, (first, _) in bounds.items():
            states[number].folded_offset = first - 1
        self._fold(states, bounds)
        if checkpoints is not None:
            for state in states.values():
                if state.folded_offset >= 0:
                    whole = snapshot(state, {})
                    checkpoints.save(state.number, whole.values, whole.parts())
        return RebuildReport(
            model_version=self._rules.items.model_version,
            policy=self._rules.text,
            records=sum(end - first for first, end in bounds.values()),
            seconds=time.monotonic() - began,
            partitions=[_rebuilt(state) for _, state in sorted(states.items())],
        )

    def _fold(self, states: Mapping[int, Partition], bounds: Mapping[int, tuple[int, int]]) -> None:
        fold = FoldRecords(self._log)
        total = sum(end - first for first, end in bounds.values())
        done = 0
        self._log.assign({number: first for number, (first, end) in bounds.items() if first < end})
        heard = time.monotonic()
        while done < total:
            self._progress(done, total)
            for number, entries in self._log.poll(200).entries.items():
                wanted = [entry for entry in entries if entry.offset < bounds[number][1]]
                before = states[number].folded_offset
                fold.fold(states[number], wanted)
                done += states[number].folded_offset - before
                heard = time.monotonic()
            if time.monotonic() - heard > _SILENCE_S:
                raise DependencyUnavailable(f"no record for {_SILENCE_S:.0f} s after {done} of {total} records")
        for state in states.values():
            while state.leaving or state.returning:
                fold.go_on(state)
        self._progress(total, total)


def _rebuilt(state: Partition) -> RebuiltPartition:
    return RebuiltPartition(
        partition=state.number,
        folded_offset=state.folded_offset,
        digest=state.digest(),
        num_items=len(state.sums),
        num_remembered=len(state.remembered.memory),
        counts=dict(state.counts),
        other_models=dict(state.other_models),
    )
