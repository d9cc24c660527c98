"""Save partitions' checkpoints one at a time, each at an interval."""

import time
from collections.abc import Collection
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for

import structlog

from services.platform.errors import FreshetError
from services.refresher.domain.partition import Partition
from services.refresher.handlers.checkpoints import Snapshot
from services.refresher.handlers.describe import PartitionRegistry
from services.refresher.handlers.open_partition import OpenPartition
from services.refresher.handlers.publication import Publication
from services.refresher.metrics import RefresherMetrics

log = structlog.get_logger()


class WriteCheckpoints:
    """Saves checkpoints. keeper: saves them in the background; None: folding waits."""

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
        """Add a partition. part: of the interval until its first checkpoint; different parts spread the work."""
        self._at[number] = time.monotonic() + self._every_s * part

    def forget(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)

    def look(self) -> None:
        """Save one due checkpoint, unless one is being saved."""
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
            # The next checkpoint has the changes.
            bug = None if isinstance(exc, FreshetError) else exc
            log.error("checkpoint_failed", partition=state.number, reason=str(exc), exc_info=bug)
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
        log.info("checkpoint_saved", partition=state.number, folded=taken.folded_offset, seconds=round(seconds, 2))
