"""Metrics of a process that follows the catalogue, named by process."""

from prometheus_client import REGISTRY, CollectorRegistry

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
