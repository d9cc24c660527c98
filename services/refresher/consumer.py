"""The thread that keeps the index fresh: take over partitions, poll, fold, publish, keep checkpoints.

It runs apart from the event loop, and holds the lock of what is held while it changes it, so that the gRPC side sees
whole states only. What a record does is `handlers/fold.py`'s, what readers are told `handlers/publish.py`'s; this
module only knows when.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

import structlog

from services.contracts.topics.attributions import ATTRIBUTIONS
from services.platform.errors import FreshetError, PreconditionFailed
from services.platform.leases import Leases
from services.platform.stream.follower import Follower
from services.platform.stream.kafka import partition_for
from services.platform.stream.record import DeadLetter, SourceRecord
from services.platform.tracing import OFF, Tracing
from services.platform.turn_clock import TurnClock
from services.refresher.domain.partition import Partition
from services.refresher.domain.records import Entry, Interaction, Listing
from services.refresher.domain.rules import Rules
from services.refresher.handlers.checkpoints import Snapshot
from services.refresher.handlers.describe import PartitionRegistry
from services.refresher.handlers.fold import FoldRecords
from services.refresher.handlers.hold import HoldPartition
from services.refresher.handlers.publish import Batch, Publisher
from services.refresher.metrics import RefresherMetrics
from services.refresher.ports import Checkpoints, Log, Outbox

log = structlog.get_logger()

# Batches of one holder are numbered within this many; a later holder's numbers are higher.
_BATCHES_PER_TERM = 1 << 32
_MAX_WAITING = 10_000
# The longest wait between two slices of what goes on beside the stream: forgotten users, sweeps.
_SLICE_MS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class RefresherLimits:
    """Sizes and times of the loop."""

    publish_s: float = 0.2
    checkpoint_s: float = 30.0
    sweep_s: float = 30.0
    snapshot_s: float = 3600.0
    # Records end a wait at once. What else turns do (leases) waits for the next one.
    poll_ms: int = 500
    # Changes per publication, all partitions together.
    max_changes: int = 2_000
    # A publication may take at most this share of the time while more waits to be folded.
    publish_share: float = 0.2
    house_s: float = 1.0
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class Refresher(Follower):
    """Folds and publishes until stopped; ready when log, leases and outbox were all reached.

    A bug may leave half a change behind: all partitions go back to what their checkpoints say, and are then folded
    record by record up to where it was. `services.platform.stream.poison` says what becomes of one that fails alone; it
    and its neighbours are tried in an empty partition.
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
        """`withdrawn` is filled here from topic `items`; `publisher` reads the same one. keeper: saves checkpoints
        beside the folding; None: the folding waits."""
        super().__init__(
            "attributions-consumer",
            on_ready=on_ready,
            on_stall=on_stall,
            backoff_s=limits.backoff_s,
            max_backoff_s=limits.max_backoff_s,
            lag_every_s=limits.house_s,
            turns=turns,
        )
        self._log, self._outbox, self._leases, self._checkpoints = log, outbox, leases, checkpoints
        self._keeper, self._keeping = keeper, Future[None]()
        self._keeping.set_result(None)
        self._publisher, self._metrics, self._limits = publisher, metrics, limits
        self._items = rules.items
        self._withdrawn, self._registry = withdrawn, registry
        metrics.watch_turns(self.turns)
        self._fold = FoldRecords(log)
        self._hold = HoldPartition(
            rules=rules,
            log=log,
            checkpoints=checkpoints,
            withdrawn=withdrawn,
            content=publisher.content,
            on_rebuild=metrics.rebuilt,
        )
        self._num_partitions = 0
        self._terms: dict[int, int] = {}
        self._sequence = 0
        # False when what was polled and what was folded may differ, or other partitions are held: assign again.
        self._in_step = False
        # Partitions that went back to their beginning in this turn.
        self._rebuilding: set[int] = set()
        # Where a bug was met: how far to go one by one, and which records proved to be poison, with the reason.
        self._careful_to: dict[int, int] = {}
        self._poison: dict[tuple[int, int], str] = {}
        # How far records were counted as folded: what is folded again after a bug is not counted again.
        self._counted_to: dict[int, int] = {}
        self._unreadable: list[DeadLetter] = []
        # Of what was polled since the last publication.
        self._tracing, self._traceparents = tracing, list[str]()
        # When the broker took what was folded and is not published yet, by partition.
        self._waiting: dict[int, list[int]] = {}
        self._checkpoint_at: dict[int, float] = {}
        self._checkpointed: dict[int, tuple[int, int]] = {}
        self._publish_at = self._sweep_at = 0.0
        self._snapshot_at = time.monotonic() + limits.snapshot_s
        self._turn = 0

    def finish(self) -> None:
        """Publish what can be, keep checkpoints, give everything back."""
        try:
            self._let_go(list(self._registry.partitions))
        except FreshetError as exc:
            log.info("last_checkpoint_failed", reason=str(exc))
        self._leases.close()
        self._log.close()
        self._outbox.close()
        self._checkpoints.close()

    def turn(self) -> int:
        """Poll, fold, publish. Returns the number of records folded.

        Raises: what handlers and ports raise; the states are right for their positions, and the next turn reads on
        from there.
        """
        if not self._num_partitions:
            self._begin()
        self._follow_leases()
        if not self._in_step:
            self._log.assign({number: state.folded_offset + 1 for number, state in self._registry.partitions.items()})
            self._in_step = True
        polled = self._log.poll(self._wait_ms())
        self._in_step = False
        self._rebuilding.clear()
        if polled.traceparents and len(self._traceparents) < _MAX_WAITING:
            self._traceparents += polled.traceparents
        self._take_listings(polled.listings)
        folded = sum(self._fold_into(number, entries) for number, entries in polled.entries.items())
        for state in list(self._registry.partitions.values()):
            if (state.leaving or state.returning) and state.number not in self._rebuilding:
                self._go_on(state)
        self._in_step = not self._rebuilding
        self._keep_house(idle=not folded)
        self.ready()
        return folded

    def _wait_ms(self) -> int:
        """How long to wait for records: what is to be published waits no longer than it must."""
        if not self._has_news:
            goes_on = any(
                state.leaving or state.returning or state.to_sweep for state in self._registry.partitions.values()
            )
            return min(self._limits.poll_ms, _SLICE_MS) if goes_on else self._limits.poll_ms
        return int(max(0.0, min(self._limits.poll_ms, 1000 * (self._publish_at - time.monotonic()))))

    @property
    def _has_news(self) -> bool:
        """Whether something was folded, or changed otherwise, since everything was published."""
        return (
            bool(self._unreadable)
            or any(self._waiting.values())
            or any(
                not state.is_quiet and (state.dirty_items or state.dirty_entries)
                for state in self._registry.partitions.values()
            )
        )

    # Partitions.

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
            # The next term is ours again: nobody had the partition in between.
            if number not in holding.terms or holding.terms[number] > term + 1
        ]
        if lost:
            log.warning("partitions_lost", partitions=lost)
            self._give_up(lost)
        self._terms |= holding.terms
        new = sorted(holding.terms.keys() - self._registry.partitions.keys())
        if new:
            for number, bounds in sorted(self._log.bounds(new).items()):
                self._take_over(number, bounds)
        if holding.surplus:
            self._let_go(sorted(self._registry.partitions)[-holding.surplus :])

    def _take_over(self, number: int, bounds: tuple[int, int]) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        state = self._hold.open(number, bounds, self._num_partitions)
        with self._registry.lock:
            self._registry.partitions[number] = state
            self._registry.ends[number] = bounds[1]
            self._registry.checkpoints[number] = state.folded_offset
        # Spread, so that checkpoints do not all fall into one turn.
        part = (number + 1) / (self._num_partitions + 1)
        self._checkpoint_at[number] = time.monotonic() + self._limits.checkpoint_s * part
        self._in_step = False
        log.info(
            "partition_taken_over",
            partition=number,
            term=self._terms[number],
            folded=state.folded_offset,
            end=bounds[1],
            seconds=round(time.perf_counter() - started, 2),
            cpu_s=round(time.thread_time() - cpu, 2),
        )

    def _let_go(self, numbers: Collection[int]) -> None:
        """Publish and keep what is there, then let others take these."""
        self._publish(time.monotonic())
        for number in numbers:
            self._keep(self._registry.partitions[number])
        self._leases.release(numbers)
        self._give_up(numbers)

    def _give_up(self, numbers: Collection[int]) -> None:
        with self._registry.lock:
            for number in numbers:
                for table in (self._registry.partitions, self._registry.ends, self._registry.checkpoints):
                    table.pop(number, None)
        for number in numbers:
            self._terms.pop(number, None)
            self._waiting.pop(number, None)
            self._checkpointed.pop(number, None)
        self._in_step = False

    def _rebuild(self, state: Partition, reason: str) -> None:
        log.warning("partition_rebuilt", partition=state.number, reason=reason)
        self._metrics.rebuilt(reason)
        with self._registry.lock:
            self._registry.partitions[state.number] = self._hold.rebuilt(state)
        self._rebuilding.add(state.number)

    # Records.

    def _note(self, listings: Sequence[Listing]) -> None:
        self._withdrawn.update({listing.item_id: listing.withdrawn for listing in listings})
        if self._publisher.content is not None:
            for listing in listings:
                self._publisher.content.put(listing)

    def _take_listings(self, listings: Sequence[Listing]) -> None:
        has_text = self._publisher.content is not None
        for listing in listings:
            is_new = listing.item_id not in self._withdrawn and listing.item_id not in self._items.index
            self._note([listing])
            for state in list(self._registry.partitions.values()):
                speaks = has_text and self._belongs(listing.item_id, state)
                if speaks or listing.item_id in state.sums or listing.item_id in state.published:
                    with self._registry.lock:
                        state.dirty_items.setdefault(listing.item_id, False)
                if is_new and state.pending.may_lack(listing.item_id) and self._belongs(listing.item_id, state):
                    self._rebuild(state, "pending interactions had been turned away")
        if listings:
            for state in self._registry.partitions.values():
                with self._registry.lock:
                    self._fold.mend(state)

    def _belongs(self, item_id: str, state: Partition) -> bool:
        return partition_for(item_id.encode(), self._num_partitions) == state.number

    def _fold_into(self, number: int, entries: Sequence[Entry]) -> int:
        state = self._registry.partitions.get(number)
        if state is None or number in self._rebuilding:
            return 0
        started = time.perf_counter()
        before = Counter(state.counts)
        try:
            self._fold_parts(state, entries)
        except PreconditionFailed as exc:
            log.error("attributions_lost", partition=number, reason=str(exc))
            self._rebuild(state, "the log has lost records")
            return 0
        waiting = self._waiting.setdefault(number, [])
        room = max(0, _MAX_WAITING - len(waiting))
        waiting += [entry.recorded_ms for entry in entries if isinstance(entry, Interaction)][:room]
        counts = Counter(state.counts)
        counts.subtract(before)
        self._metrics.folded(len(entries), time.perf_counter() - started, counts)
        self.poison.applied([entry for entry in entries if entry.offset > self._counted_to.get(number, -1)])
        self._counted_to[number] = max(entries[-1].offset, self._counted_to.get(number, -1))
        return len(entries)

    def _go_on(self, state: Partition) -> None:
        try:
            with self._registry.lock:
                self._fold.go_on(state)
        except PreconditionFailed as exc:
            log.error("attributions_lost", partition=state.number, reason=str(exc))
            self._rebuild(state, "the log has lost records")

    def _fold_parts(self, state: Partition, entries: Sequence[Entry]) -> None:
        """Fold entries together, or one by one where a bug was met; poison becomes a dead letter next time."""
        number = state.number
        parts: list[Sequence[Entry]] = [entries]
        if entries[0].offset <= self._careful_to.get(number, -1):
            entries = [
                _dead_letter(number, entry, self._poison[number, entry.offset])
                if (number, entry.offset) in self._poison
                else entry
                for entry in entries
            ]
            parts = [[entry] for entry in entries]
        for at, part in enumerate(parts):
            try:
                with self._registry.lock:
                    self._unreadable += self._fold.fold(state, part)
            except FreshetError:
                raise
            except Exception as exc:
                self._careful_to[number] = max(entries[-1].offset, self._careful_to.get(number, -1))
                if len(parts) == len(entries) and self._is_poison(number, entries, at, exc):
                    self._poison[number, part[0].offset] = f"internal error: {type(exc).__name__}"
                raise

    def _is_poison(self, number: int, entries: Sequence[Entry], at: int, exc: Exception) -> bool:
        entry = entries[at]

        def rehearse(one: Entry) -> None:
            self._fold.fold(self._hold.scratch(number), [one])

        return self.poison.is_poison(
            (number, entry.offset), entry, exc, behind=entries[at + 1 :], applied=at, rehearse=rehearse
        )

    # What goes out, and what is kept.

    def _keep_house(self, *, idle: bool) -> None:
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + self._limits.sweep_s
            for state in self._registry.partitions.values():
                state.to_sweep = state.to_sweep or list(state.published)
        for state in self._registry.partitions.values():
            if state.to_sweep:
                with self._registry.lock:
                    self._publisher.sweep(state)
        if now >= self._snapshot_at:
            self._snapshot_at = now + self._limits.snapshot_s
            with self._registry.lock:
                for state in self._registry.partitions.values():
                    state.mark_everything()
        if now >= self._publish_at and self._has_news:
            left = self._publish(now)
            done = time.monotonic()
            pause = max(self._limits.publish_s, (done - now) * (1 / self._limits.publish_share - 1))
            self._publish_at = done if left and idle else done + pause
        due = [number for number in self._registry.partitions if now >= self._checkpoint_at[number]]
        if due and self._keeping.done():
            self._checkpoint_at[due[0]] = now + self._limits.checkpoint_s
            self._keep(self._registry.partitions[due[0]], waits=self._keeper is None)

    def _publish(self, now: float) -> bool:
        """Publish at most `max_changes`; returns whether some are left."""
        started = time.perf_counter()
        room = self._limits.max_changes
        batches: list[Batch] = []
        numbers = sorted(number for number, state in self._registry.partitions.items() if not state.is_quiet)
        self._turn += 1
        for step in range(len(numbers)):
            # Each one is first in turn, so that a large backlog of one keeps no other waiting.
            number = numbers[(step + self._turn) % len(numbers)]
            self._sequence += 1
            batch_number = self._terms.get(number, 0) * _BATCHES_PER_TERM + self._sequence
            with self._registry.lock:
                batch = self._publisher.batch(self._registry.partitions[number], batch_number, room)
            if batch is not None:
                batches.append(batch)
                room -= len(batch.items) + len(batch.entries)
        deltas = [delta for batch in batches for delta in batch.deltas]
        if deltas or self._unreadable:
            tombstones = [key for batch in batches for key in batch.tombstones]
            with self._tracing.batch("publish deltas", self._traceparents, deltas=len(deltas)):
                self._outbox.publish(deltas, self._unreadable, tombstones)
            self._unreadable, self._traceparents = [], []
            entries = sum(len(batch.entries) for batch in batches)
            self._metrics.published(len(deltas) - entries, entries, time.perf_counter() - started)
        with self._registry.lock:
            for batch in batches:
                batch.published()
        left = False
        done_ms = time.time_ns() // 1_000_000
        for number in numbers:
            state = self._registry.partitions[number]
            if state.dirty_items or state.dirty_entries:
                left = True
            else:
                waited = self._waiting.pop(number, [])
                self._metrics.fresh(max(0, done_ms - recorded_ms) / 1000 for recorded_ms in waited)
        return left

    def _keep(self, state: Partition, *, waits: bool = True) -> None:
        """Save a checkpoint if there is news since the last one; raises what that raises if it `waits` for it."""
        now = (state.folded_offset, len(state.dirty_items) + len(state.dirty_entries))
        if state.folded_offset < 0 or self._checkpointed.get(state.number) == now:
            return
        if self._unreadable:
            # A checkpoint never lies beyond a record whose dead letter is not written.
            self._outbox.publish([], self._unreadable)
            self._unreadable = []
        wait_for([self._keeping])
        started, cpu = time.perf_counter(), time.thread_time()
        with self._registry.lock:
            taken = self._hold.snapshot(state)
        pause_s, cpu_s = time.perf_counter() - started, time.thread_time() - cpu
        self._metrics.checkpoint_pause_seconds.observe(pause_s)
        log.info(
            "checkpoint_begun",
            partition=state.number,
            parts=len(taken.changed),
            pause_ms=round(1000 * pause_s, 1),
            cpu_ms=round(1000 * cpu_s, 1),
        )
        if waits or self._keeper is None:
            self._save(state, taken, now)
        else:
            self._keeping = self._keeper.submit(self._save_aside, state, taken, now)

    def _save_aside(self, state: Partition, taken: Snapshot, now: tuple[int, int]) -> None:
        try:
            self._save(state, taken, now)
        except Exception as exc:
            # Nothing is lost but time: what has changed since the last one is still known, and the next one holds it.
            bug = None if isinstance(exc, FreshetError) else exc
            log.error("checkpoint_failed", partition=state.number, reason=str(exc), exc_info=bug)
            self._metrics.failures.labels(type(exc).__name__).inc()

    def _save(self, state: Partition, taken: Snapshot, now: tuple[int, int]) -> None:
        started = time.perf_counter()
        self._hold.keep(state, taken)
        with self._registry.lock:
            if self._registry.partitions.get(state.number) is state:
                self._checkpointed[state.number] = now
                self._registry.checkpoints[state.number] = taken.folded_offset
        seconds = time.perf_counter() - started
        self._metrics.checkpoint_seconds.observe(seconds)
        log.info("checkpoint_kept", partition=state.number, folded=taken.folded_offset, seconds=round(seconds, 2))

    def report_lag(self, *, asks: bool) -> None:
        """What is held, and how far its partitions are behind."""
        states = self._registry.partitions
        ends = self._log.known_ends()
        if asks and states:
            ends = {number: end for number, (_, end) in self._log.bounds(sorted(states)).items()}
        with self._registry.lock:
            self._registry.ends.update({number: end for number, end in ends.items() if number in states})
            self._metrics.holds(states, self._registry.ends)

    def lost(self, exc: Exception) -> None:
        """The next turn assigns again; after a bug every partition goes back to its checkpoint."""
        self._in_step = False
        if not isinstance(exc, FreshetError):
            self._give_up(list(self._registry.partitions))
        self._metrics.failures.labels(type(exc).__name__).inc()


def _dead_letter(number: int, entry: Entry, reason: str) -> DeadLetter:
    """Where the record lies; it was readable, so its bytes are not kept."""
    return DeadLetter(SourceRecord(ATTRIBUTIONS, number, entry.offset, 0, None, None), reason)
