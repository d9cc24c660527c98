"""Apply the stream's changes in candidates and the reranker, and count them in metrics named after the process.

The follower's thread applies changes while searches continue. A change beyond the memory limit waits and is reported;
meanwhile, answers name the last applied position.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.index import IndexFullError
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.catalogue.follower import age_seconds
from services.contracts.topics.index_deltas import Batch, ItemDelta, MemoryDelta
from services.contracts.topics.items import CatalogueItem
from services.platform.metrics import Figures
from services.platform.stream.follower import TurnClock


class CatalogueMetrics:
    """Metrics of one process's catalogue."""

    def __init__(self, process: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._figures = figures = Figures(registry)
        self._prefix = prefix = f"freshet_{process}_"
        text = "Seconds from the broker's taking the newest interaction of a batch to the batch being served here."
        self.lag = figures.histogram(prefix + "index_lag_seconds", text)
        self.apply = figures.histogram(
            prefix + "apply_seconds", "Seconds to apply one batch; searches go on meanwhile."
        )
        self.position = figures.gauge(
            prefix + "deltas_offset", "The last applied record of index-deltas; -1 before any."
        )
        self.position.set(-1)
        self.full = figures.gauge(
            prefix + "index_full",
            "1 while changes wait because the memory limit leaves no room for them; the index serves what it has.",
        )
        self.merge_failed = figures.gauge(
            prefix + "merge_failed",
            "1 while the last background merge failed: the index goes on, slower with each change, until one succeeds.",
        )
        self._changes = figures.counter(
            prefix + "changes",
            "Changes by what became of them: item, dropped_item, remembered, forgotten, described, misfit, "
            "other_model, unreadable_delta, unreadable_item, poison_item.",
            "kind",
        )

    def watch_turns(self, turns: TurnClock) -> None:
        self._figures.turn_age(self._prefix + "turn_age_seconds", turns)

    def counted(self, kind: str, changes: int) -> None:
        if changes:
            self._changes.labels(kind).inc(changes)


log = structlog.get_logger()


class Remembered(Protocol):
    """The store of remembered interactions."""

    def apply(self, changes: Sequence[MemoryDelta]) -> int:
        """Apply changes; return how many do not fit the model."""

    def clear(self) -> None:
        """Empty the store."""


class MergeReports:
    """Logs once that a background merge fails, and its recovery. Callers run `look` after each change."""

    def __init__(self, merges: Sequence[BackgroundMerge]) -> None:
        self._merges = tuple(merges)
        self._failing: set[BackgroundMerge] = set()

    @property
    def is_failing(self) -> bool:
        """Whether the last run of any merge failed; thread-safe."""
        return any(merge.error is not None for merge in self._merges)

    def look(self) -> None:
        """Log failures and recoveries since the last call."""
        for merge in self._merges:
            error = merge.error
            if error is not None and merge not in self._failing:
                self._failing.add(merge)
                log.error("merge_failed", reason=str(error), exc_info=error)
            elif error is None and merge in self._failing:
                self._failing.discard(merge)
                log.info("merge_recovered")


class CatalogueChanges:
    """A `Listener` of the catalogue's follower.

    merges: background merges whose failures are reported. on_change: called after each change. holds: whether an item
    is served here; other items are ignored.
    """

    def __init__(
        self,
        items: LiveCatalogue,
        metrics: CatalogueMetrics,
        *,
        remembered: Remembered | None = None,
        merges: Sequence[BackgroundMerge] = (),
        on_change: Callable[[], None] = lambda: None,
        holds: Callable[[str], bool] = lambda item_id: True,
    ) -> None:
        self._holds = holds
        self._items, self._remembered, self._metrics = items, remembered, metrics
        self._merges, self._on_change = MergeReports(merges), on_change
        self._is_full = False
        metrics.merge_failed.set_function(lambda: self._merges.is_failing)

    def apply(self, batch: Batch, *, is_live: bool) -> bool:
        started = time.perf_counter()
        changes = [delta.change for delta in batch.deltas]
        items = [one for one in changes if isinstance(one, ItemDelta) and self._holds(one.item_id)]
        remembered = [one for one in changes if isinstance(one, MemoryDelta)]
        lag_s = age_seconds(batch.newest_recorded_ms)
        misfits = 0
        try:
            if self._remembered is not None:
                misfits += self._remembered.apply(remembered)
            ids = self._items.apply(
                batch.offset, items, mark=batch.mark, newest_recorded_ms=batch.newest_recorded_ms, lag_s=lag_s
            )
        except IndexFullError as exc:
            self._say_full(str(exc), waits_at=batch.offset)
            return False
        misfits += len(ids)
        if misfits:
            log.error("states_do_not_fit", num_states=misfits, item_ids=list(ids[:10]), offset=batch.offset)
        self._say_room()
        self._count(items, remembered, misfits)
        self._metrics.position.set(batch.offset)
        seconds = time.perf_counter() - started
        self._metrics.apply.observe(seconds)
        if is_live and lag_s is not None:
            self._metrics.lag.observe(lag_s + seconds)
        self._done()
        return True

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Apply descriptions. An item that returns but does not fit into memory stays withdrawn until a new record."""
        items = [one for one in items if self._holds(one.item_id)]
        try:
            self._items.describe(items)
        except IndexFullError as exc:
            self._say_full(str(exc), waits_at=None)
        self._metrics.counted("described", len(items))
        self._done()

    def reset(self) -> None:
        """Return the items to the bundle's content and clear the remembered interactions."""
        self._items.reset()
        if self._remembered is not None:
            self._remembered.clear()
        self._metrics.position.set(-1)
        self._done()

    def counted(self, kind: str, records: int) -> None:
        self._metrics.counted(kind, records)

    def _count(self, items: Sequence[ItemDelta], remembered: Sequence[MemoryDelta], misfits: int) -> None:
        self._metrics.counted("item", sum(not one.dropped for one in items))
        self._metrics.counted("dropped_item", sum(one.dropped for one in items))
        if self._remembered is not None:
            self._metrics.counted("remembered", sum(not one.dropped for one in remembered))
            self._metrics.counted("forgotten", sum(one.dropped for one in remembered))
        self._metrics.counted("misfit", misfits)

    def _done(self) -> None:
        self._merges.look()
        self._on_change()

    def _say_full(self, reason: str, *, waits_at: int | None) -> None:
        self._metrics.full.set(1)
        if not self._is_full:
            self._is_full = True
            log.error("index_full", reason=reason, waits_at=waits_at)

    def _say_room(self) -> None:
        if self._is_full:
            self._is_full = False
            self._metrics.full.set(0)
            log.info("index_has_room")
