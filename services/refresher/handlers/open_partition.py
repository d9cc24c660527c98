"""Opens partitions, from the newest valid checkpoint or from the beginning of the log, and saves their checkpoints.

Checkpoints are saved one at a time, and each partition's at an interval. A checkpoint is rejected if it is torn or
altered, if its rules differ, or if the topic does not reach its position or was created again. After a rejection for
the rules or the topic, everything that the checkpoint lists as published is published again or dropped.
"""

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

import structlog

from services.contracts.topics.attributions import ATTRIBUTIONS
from services.platform.errors import Conflict, FreshetError, PreconditionFailed
from services.platform.stream.kafka import partition_for
from services.refresher.checkpoint import CheckpointError
from services.refresher.domain.partition import Partition, PartitionRegistry
from services.refresher.domain.rules import Rules
from services.refresher.handlers.checkpoints import OtherRulesError, Snapshot, Versions, restore, snapshot, versions
from services.refresher.handlers.publish import ContentStates, Publication
from services.refresher.metrics import RefresherMetrics
from services.refresher.ports import Checkpoints, Log

logger = structlog.get_logger()

_HOMES_LOOKED_AT = 64


@cache
def home_of(item_id: str, num_partitions: int) -> int:
    """The partition of `attributions` that an item's records go to."""
    return partition_for(item_id.encode(), num_partitions)


@dataclass(kw_only=True, eq=False)
class OpenPartition:
    """Opens, saves and rebuilds partitions. `withdrawn` tells for each listed item whether it is withdrawn."""

    rules: Rules
    log: Log
    checkpoints: Checkpoints
    withdrawn: Mapping[str, bool]
    content: ContentStates | None = None
    on_rebuild: Callable[[str], None] = lambda reason: None
    # Per partition, the state whose parts are stored, and their versions.
    _saved: dict[int, tuple[Partition, Versions]] = field(default_factory=dict, init=False)

    def open(self, number: int, bounds: tuple[int, int], num_partitions: int) -> Partition:
        """Return the partition's state. `bounds` are the log's first offset and one past its last.

        Raises: DependencyUnavailable for unreachable checkpoints; PreconditionFailed if partitions were added.
        """
        first, end = bounds
        state, reason = self._restored(number, first, end)
        self._check_homes(state, num_partitions)
        if state.folded_offset + 1 < first:
            # Retention deleted unfolded records; the rest is folded.
            logger.error("attributions_lost", partition=number, folded=state.folded_offset, first=first)
            state.folded_offset = first - 1
        if not reason and self._lacks_listed(state, num_partitions):
            state, reason = self.rebuilt(state), "pending interactions had been turned away"
        if reason:
            self.on_rebuild(reason)
            logger.info("partition_rebuilt", partition=number, reason=reason, records=end - first)
        # Items may have been listed or withdrawn since; publication decides whether they changed.
        for item_id in state.sums:
            if item_id not in state.outgoing.published or self.withdrawn.get(item_id, False):
                state.outgoing.dirty_items.setdefault(item_id, False)
        if self.content is not None:
            for item_id in self.withdrawn:
                if item_id in self.content and home_of(item_id, num_partitions) == number:
                    state.outgoing.dirty_items.setdefault(item_id, False)
        state.outgoing.quiet_until = end - 1
        return state

    def snapshot(self, state: Partition) -> Snapshot:
        """Capture a checkpoint. This is fast; call it under the lock."""
        saved = self._saved.get(state.number)
        return snapshot(state, saved[1] if saved is not None and saved[0] is state else {})

    def keep(self, state: Partition, taken: Snapshot) -> None:
        """Save a snapshot. Slow; call it without the lock. Raises: as `Checkpoints.save`."""
        try:
            self.checkpoints.save(state.number, taken.values, taken.parts())
        except Conflict:
            self._saved.pop(state.number, None)
            raise
        self._saved[state.number] = (state, taken.versions)

    def rebuilt(self, old: Partition) -> Partition:
        """An empty state in place of `old`, with everything published marked as changed."""
        state = Partition(old.number, self.rules, self.withdrawn)
        state.outgoing.dirty_items = dict.fromkeys((*old.outgoing.published, *old.outgoing.dirty_items), True)
        state.outgoing.dirty_entries = {*old.remembered.visible, *old.outgoing.dirty_entries}
        state.outgoing.dropped = old.outgoing.dropped
        state.outgoing.quiet_until = old.folded_offset
        return state

    def scratch(self, number: int) -> Partition:
        return Partition(number, self.rules, self.withdrawn)

    def _restored(self, number: int, first: int, end: int) -> tuple[Partition, str]:
        fresh = Partition(number, self.rules, self.withdrawn)
        reason = "no checkpoint"
        self._saved.pop(number, None)
        for checkpoint in self.checkpoints.load(number):
            name = checkpoint.name
            try:
                values, parts = checkpoint.read()
                state = restore(values, parts, number, self.rules, self.withdrawn)
            except OtherRulesError as exc:
                logger.warning("checkpoint_of_other_rules", name=name, reason=str(exc))
                fresh.outgoing.dirty_items = dict.fromkeys(exc.items, True)
                fresh.outgoing.dirty_entries = set(exc.entries)
                return fresh, "other rules"
            except CheckpointError as exc:
                logger.error("checkpoint_refused", name=name, reason=str(exc))
                reason = "torn checkpoint"
                continue
            if state.folded_offset < end and self._is_log_of(state, first):
                logger.info("checkpoint_loaded", name=name, partition=number, folded=state.folded_offset)
                if checkpoint.is_base:
                    self._saved[number] = (state, versions(state))
                return state, ""
            logger.error("checkpoint_of_other_topic", name=name, folded=state.folded_offset, end=end)
            return self.rebuilt(state), "other topic"
        return fresh, reason

    def _is_log_of(self, state: Partition, first: int) -> bool:
        """Return whether the log has the state's last interaction, which a recreated topic lacks."""
        if state.mark is None or state.mark[0] < first:
            return True
        offset, source_position = state.mark
        try:
            return self.log.read_again(state.number, [offset])[offset].source_position == source_position
        except PreconditionFailed:
            return False

    def _lacks_listed(self, state: Partition, num_partitions: int) -> bool:
        return state.pending.evicted_from is not None and any(
            state.pending.may_lack(item_id)
            and item_id not in state.sums
            and self.rules.items.row(item_id) < 0
            and home_of(item_id, num_partitions) == state.number
            for item_id in self.withdrawn
        )

    def _check_homes(self, state: Partition, num_partitions: int) -> None:
        """Check the partition of a few items, because adding partitions changes it for at least half of all items."""
        for item_id in islice(state.sums, _HOMES_LOOKED_AT):
            home = home_of(item_id, num_partitions)
            if home != state.number:
                raise PreconditionFailed(
                    f"partition {state.number} of {ATTRIBUTIONS!r} has sums of item {item_id!r}, whose records go to "
                    f"partition {home} now: partitions were added (there are {num_partitions}). Delete the topic "
                    "and `refresher-checkpoints`, create both again, and run `freshet backfill-attributions`"
                )


class WriteCheckpoints:
    """Saves checkpoints. `keeper` saves them in the background; if it is None, folding waits."""

    def __init__(
        self,
        opener: OpenPartition,
        publication: Publication,
        registry: PartitionRegistry,
        metrics: RefresherMetrics,
        *,
        every_s: float,
        keeper: Executor | None,
    ) -> None:
        self._opener, self._publication, self._registry, self._metrics = opener, publication, registry, metrics
        self._every_s, self._keeper = every_s, keeper
        self._keeping = Future[None]()
        self._keeping.set_result(None)
        self._at: dict[int, float] = {}
        # Position and number of unpublished changes in a partition's last checkpoint.
        self._kept: dict[int, tuple[int, int]] = {}

    def begin(self, number: int, part: float) -> None:
        """Add a partition. Its first checkpoint is due after the fraction `part` of the interval, to spread work."""
        self._at[number] = time.monotonic() + self._every_s * part

    def forget(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)

    def look(self) -> None:
        """Save one due checkpoint, unless another is being saved."""
        now = time.monotonic()
        due = [number for number in self._registry.partitions if now >= self._at[number]]
        if due and self._keeping.done():
            self._at[due[0]] = now + self._every_s
            self.keep(self._registry.partitions[due[0]], waits=self._keeper is None)

    def keep(self, state: Partition, *, waits: bool = True) -> None:
        """Save a checkpoint if anything changed. With `waits`, wait for it and raise its errors."""
        now = (state.folded_offset, state.outgoing.num_changes)
        if state.folded_offset < 0 or self._kept.get(state.number) == now:
            return
        self._publication.write_unreadable()
        wait_for([self._keeping])
        started, cpu = time.perf_counter(), time.thread_time()
        with self._registry.lock:
            taken = self._opener.snapshot(state)
        pause_s, cpu_s = time.perf_counter() - started, time.thread_time() - cpu
        self._metrics.checkpoint_pause_seconds.observe(pause_s)
        logger.info(
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
            # The next checkpoint has the changes.
            bug = None if isinstance(exc, FreshetError) else exc
            logger.error("checkpoint_failed", partition=state.number, reason=str(exc), exc_info=bug)
            self._metrics.failures.labels(type(exc).__name__).inc()

    def _save(self, state: Partition, taken: Snapshot, now: tuple[int, int]) -> None:
        started = time.perf_counter()
        self._opener.keep(state, taken)
        with self._registry.lock:
            if self._registry.partitions.get(state.number) is state:
                self._kept[state.number] = now
                self._registry.checkpoints[state.number] = taken.folded_offset
        seconds = time.perf_counter() - started
        self._metrics.checkpoint_seconds.observe(seconds)
        logger.info("checkpoint_saved", partition=state.number, folded=taken.folded_offset, seconds=round(seconds, 2))
