"""What a process that follows the catalogue's changes counts: positions, lag, merges, and what found no place.

The names are the process's own, the meaning is the same in candidates and the reranker.
"""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from services.common.metrics import LATENCY_BUCKETS_S
from services.common.turn_clock import TurnClock


class CatalogueMetrics:
    """Figures of one process's catalogue."""

    def __init__(self, process: str, registry: CollectorRegistry = REGISTRY) -> None:
        prefix = f"freshet_{process}_"
        self.lag = Histogram(
            prefix + "index_lag_seconds",
            "Seconds from the broker's taking the newest interaction of a batch to the batch being served here.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.apply = Histogram(
            prefix + "apply_seconds",
            "Seconds to apply one batch; searches go on meanwhile.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.position = Gauge(
            prefix + "deltas_offset", "The last applied record of index-deltas; -1 before any.", registry=registry
        )
        self.position.set(-1)
        self._turn_age = Gauge(
            prefix + "turn_age_seconds",
            "Seconds since the follower of the catalogue's topics last worked, by the clock: it grows while it stalls.",
            registry=registry,
        )
        self.full = Gauge(
            prefix + "index_full",
            "1 while changes wait because the memory limit leaves no room for them; the index serves what it has.",
            registry=registry,
        )
        self.merge_failed = Gauge(
            prefix + "merge_failed",
            "1 while the last background merge failed: the index goes on, slower with each change, until one succeeds.",
            registry=registry,
        )
        self._changes = Counter(
            prefix + "changes",
            "Changes by what became of them: item, dropped_item, remembered, forgotten, described, misfit, "
            "other_model, unreadable_delta, unreadable_item.",
            ("kind",),
            registry=registry,
        )

    def watch_turns(self, turns: TurnClock) -> None:
        """Export the age of the follower's last good turn as it is when somebody scrapes."""
        self._turn_age.set_function(lambda: turns.age_s)

    def counted(self, kind: str, changes: int) -> None:
        """Changes of one kind."""
        if changes:
            self._changes.labels(kind).inc(changes)
