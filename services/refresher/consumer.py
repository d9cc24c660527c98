"""Runs the thread that acquires partitions, polls, folds, publishes and saves checkpoints.

The thread locks the registry during changes.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import structlog

from services.platform.errors import FreshetError, PreconditionFailed
from services.platform.request_context import OFF, Tracing
from services.platform.stream.follower import Due, Follower, TurnClock
from services.platform.stream.ports import Leases
from services.refresher.domain.partition import Partition, PartitionRegistry
from services.refresher.domain.records import Entry, Listing
from services.refresher.domain.rules import Rules
from services.refresher.handlers.fold import CarefulFold, FoldRecords
from services.refresher.handlers.open_partition import OpenPartition, WriteCheckpoints, home_of
from services.refresher.handlers.publish import Publication, Publisher
from services.refresher.metrics import RefresherMetrics
from services.refresher.ports import Checkpoints, Log, Outbox

log = structlog.get_logger()

# The longest wait between slices of a forget.
_SLICE_MS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class RefresherLimits:
    """Sizes and times of the loop."""

    publish_s: float = 0.2
    checkpoint_s: float = 30.0
    snapshot_s: float = 3600.0
    # The longest poll; other work waits for its end. A poll returns once records arrive.
    poll_ms: int = 500
    # The largest number of changes per publication, over all partitions.
    max_changes: int = 2_000
    # Largest share of time for publication while records wait.
    publish_share: float = 0.2
    house_s: float = 1.0
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class Refresher(Follower):
    """Folds and publishes; ready after log, leases and outbox were reached.

    An unexpected exception may leave a partly applied change. All partitions then return to their checkpoints, and
    `CarefulFold` folds record by record up to the failure.
    """

    def __init__(
        self,
        *,
        log: Log,
        outbox: Outbox,
        checkpoints: Checkpoints,
        leases: Leases,
        rules: Rules,
        publisher: Publisher,
        withdrawn: dict[str, bool],
        registry: PartitionRegistry,
        metrics: RefresherMetrics,
        limits: RefresherLimits,
        keeper: Executor | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_stall: Callable[[], None] = lambda: None,
        turns: TurnClock | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        """Assemble the refresher. It fills `withdrawn`, which `publisher` reads.

        `keeper` saves checkpoints in the background. If it is None, folding waits for each save.
        """
        super().__init__(
            "attributions-consumer",
            on_ready=on_ready,
            on_stall=on_stall,
            backoff_s=limits.backoff_s,
            max_backoff_s=limits.max_backoff_s,
            lag_every_s=limits.house_s,
            turns=turns,
        )
        metrics.watch_turns(self.turns)
        self._log, self._leases, self._registry, self._metrics, self._limits = log, leases, registry, metrics, limits
        self._items, self._withdrawn, self._publisher = rules.items, withdrawn, publisher
        self._opener = OpenPartition(
            rules=rules,
            log=log,
            checkpoints=checkpoints,
            withdrawn=withdrawn,
            content=publisher.content,
            on_rebuild=metrics.rebuilt,
        )
        self._publication = Publication(
            publisher,
            outbox,
            registry,
            metrics,
            max_changes=limits.max_changes,
            every_s=limits.publish_s,
            share=limits.publish_share,
            tracing=tracing,
        )
        self._checkpoints = WriteCheckpoints(
            self._opener, self._publication, registry, metrics, every_s=limits.checkpoint_s, keeper=keeper
        )
        self._records = FoldRecords(log)
        self._fold = CarefulFold(self._records, self._opener, registry, self._publication, self.poison)
        self._num_partitions = 0
        self._terms: dict[int, int] = {}
        # False if the partitions changed, or if some polled records may still be unfolded.
        self._is_assigned = False
        # Partitions reset to their beginning in this turn.
        self._rebuilding: set[int] = set()
        self._snapshot_due = Due(limits.snapshot_s, after_s=limits.snapshot_s)

    def finish(self) -> None:
        """Publish changes, save checkpoints, and release all partitions."""
        try:
            self._release(list(self._registry.partitions))
        except FreshetError as exc:
            log.info("last_checkpoint_failed", reason=str(exc))
        self._leases.close()
        self._log.close()
        self._publication.close()
        self._opener.checkpoints.close()

    def turn(self) -> int:
        """Poll, fold, publish. Return the number of records folded. Raises: as handlers and ports; states stay
        correct.
        """
        if not self._num_partitions:
            self._begin()
        self._follow_leases()
        if not self._is_assigned:
            self._log.assign({number: state.folded_offset + 1 for number, state in self._registry.partitions.items()})
            self._is_assigned = True
        polled = self._log.poll(self._wait_ms())
        self._is_assigned = False
        self._rebuilding.clear()
        self._publication.polled(polled.traceparents)
        self._take_listings(polled.listings)
        folded = sum(self._fold_into(number, entries) for number, entries in polled.entries.items())
        for state in list(self._registry.partitions.values()):
            if (state.leaving or state.returning) and state.number not in self._rebuilding:
                self._continue_forgets(state)
        self._is_assigned = not self._rebuilding
        self._maintain(idle=not folded)
        self.ready()
        return folded

    def _wait_ms(self) -> int:
        if not self._publication.has_news:
            goes_on = any(state.leaving or state.returning for state in self._registry.partitions.values())
            return min(self._limits.poll_ms, _SLICE_MS) if goes_on else self._limits.poll_ms
        return int(max(0.0, min(self._limits.poll_ms, 1000 * (self._publication.at_s - time.monotonic()))))

    def _begin(self) -> None:
        self._note(self._log.listings())
        partitions = self._log.partitions()
        self._leases.start(partitions)
        self._num_partitions = len(partitions)

    def _follow_leases(self) -> None:
        holding = self._leases.holding()
        lost = [
            number
            for number, term in self._terms.items()
            # If a term grew by one, no other process had the lease in between.
            if number not in holding.terms or holding.terms[number] > term + 1
        ]
        if lost:
            log.warning("partitions_lost", partitions=lost)
            self._drop(lost)
        self._terms |= holding.terms
        new = sorted(holding.terms.keys() - self._registry.partitions.keys())
        if new:
            for number, bounds in sorted(self._log.bounds(new).items()):
                self._take_over(number, bounds)
        if holding.surplus:
            self._release(sorted(self._registry.partitions)[-holding.surplus :])

    def _take_over(self, number: int, bounds: tuple[int, int]) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        state = self._opener.open(number, bounds, self._num_partitions)
        with self._registry.lock:
            self._registry.partitions[number] = state
            self._registry.ends[number] = bounds[1]
            self._registry.checkpoints[number] = state.folded_offset
        self._checkpoints.begin(number, (number + 1) / (self._num_partitions + 1))
        self._is_assigned = False
        log.info(
            "partition_taken_over",
            partition=number,
            term=self._terms[number],
            folded=state.folded_offset,
            end=bounds[1],
            seconds=round(time.perf_counter() - started, 2),
            cpu_s=round(time.thread_time() - cpu, 2),
        )

    def _release(self, numbers: Collection[int]) -> None:
        self._publication.publish(self._terms)
        for number in numbers:
            self._checkpoints.keep(self._registry.partitions[number])
        self._leases.release(numbers)
        self._drop(numbers)

    def _drop(self, numbers: Collection[int]) -> None:
        with self._registry.lock:
            for number in numbers:
                for table in (self._registry.partitions, self._registry.ends, self._registry.checkpoints):
                    table.pop(number, None)
        for number in numbers:
            self._terms.pop(number, None)
        self._publication.forget(numbers)
        self._checkpoints.forget(numbers)
        self._is_assigned = False

    def _rebuild(self, state: Partition, reason: str) -> None:
        log.warning("partition_rebuilt", partition=state.number, reason=reason)
        self._metrics.rebuilt(reason)
        with self._registry.lock:
            self._registry.partitions[state.number] = self._opener.rebuilt(state)
        self._rebuilding.add(state.number)

    def _note(self, listings: Sequence[Listing]) -> None:
        self._withdrawn.update({listing.item_id: listing.withdrawn for listing in listings})
        if self._publisher.content is not None:
            for listing in listings:
                self._publisher.content.put(listing)

    def _take_listings(self, listings: Sequence[Listing]) -> None:
        has_text = self._publisher.content is not None
        for listing in listings:
            is_new = listing.item_id not in self._withdrawn and self._items.row(listing.item_id) < 0
            self._note([listing])
            for state in list(self._registry.partitions.values()):
                speaks = has_text and home_of(listing.item_id, self._num_partitions) == state.number
                if speaks or listing.item_id in state.sums or listing.item_id in state.outgoing.published:
                    with self._registry.lock:
                        state.outgoing.dirty_items.setdefault(listing.item_id, False)
                may_lack = is_new and state.pending.may_lack(listing.item_id)
                if may_lack and home_of(listing.item_id, self._num_partitions) == state.number:
                    self._rebuild(state, "pending interactions had been evicted")
        if listings:
            for state in self._registry.partitions.values():
                with self._registry.lock:
                    self._records.mend(state)

    def _fold_into(self, number: int, entries: Sequence[Entry]) -> int:
        state = self._registry.partitions.get(number)
        if state is None or number in self._rebuilding:
            return 0
        started = time.perf_counter()
        before = Counter(state.counts)
        try:
            self._fold(state, entries)
        except PreconditionFailed as exc:
            log.error("attributions_lost", partition=number, reason=str(exc))
            self._rebuild(state, "the log has lost records")
            return 0
        self._publication.folded(number, entries)
        counts = Counter(state.counts)
        counts.subtract(before)
        self._metrics.folded(len(entries), time.perf_counter() - started, counts)
        self._fold.counted(number, entries)
        return len(entries)

    def _continue_forgets(self, state: Partition) -> None:
        try:
            with self._registry.lock:
                self._records.go_on(state)
        except PreconditionFailed as exc:
            log.error("attributions_lost", partition=state.number, reason=str(exc))
            self._rebuild(state, "the log has lost records")

    def _maintain(self, *, idle: bool) -> None:
        if self._snapshot_due(time.monotonic()):
            with self._registry.lock:
                for state in self._registry.partitions.values():
                    state.mark_everything()
        self._publication.look(self._terms, idle=idle)
        self._checkpoints.look()

    def report_lag(self, *, asks: bool) -> None:
        states = self._registry.partitions
        ends = self._log.known_ends()
        if asks and states:
            ends = {number: end for number, (_, end) in self._log.bounds(sorted(states)).items()}
        with self._registry.lock:
            self._registry.ends.update({number: end for number, end in ends.items() if number in states})
            self._metrics.holds(states, self._registry.ends)

    def lost(self, exc: Exception) -> None:
        """Assign again; after an unexpected exception, restart from the checkpoints."""
        self._is_assigned = False
        if not isinstance(exc, FreshetError):
            self._drop(list(self._registry.partitions))
        self._metrics.failures.labels(type(exc).__name__).inc()
