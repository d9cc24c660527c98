"""The refresher's metrics."""

from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry

from services.platform.metrics import LARGE_BATCH_BUCKETS, Figures
from services.platform.stream.follower import TurnClock
from services.refresher.domain.partition import COUNTS, Partition


class RefresherMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._figures = figures = Figures(registry)
        records = figures.counter(
            "freshet_refresher_records", "Records of the attributions topic by outcome.", "outcome"
        )
        self._records = {outcome: records.labels(outcome) for outcome in COUNTS}
        self._freshness = figures.histogram(
            "freshet_refresher_event_to_delta_seconds",
            "Seconds from the broker's acknowledgement of an interaction to its index deltas being acknowledged.",
        )
        self._batch = figures.histogram(
            "freshet_refresher_batch_records", "Records per fold.", buckets=LARGE_BATCH_BUCKETS
        )
        self._fold_seconds = figures.histogram("freshet_refresher_fold_seconds", "Seconds per fold.")
        self._publish_seconds = figures.histogram(
            "freshet_refresher_publish_seconds", "Seconds to make and publish a batch of deltas."
        )
        deltas = figures.counter("freshet_refresher_deltas", "Index deltas published.", "kind")
        self._item_deltas, self._memory_deltas = deltas.labels("item"), deltas.labels("memory")
        self.checkpoint_seconds = figures.histogram(
            "freshet_refresher_checkpoint_seconds", "Seconds to write a partition's checkpoint in the background."
        )
        self.checkpoint_pause_seconds = figures.histogram(
            "freshet_refresher_checkpoint_pause_seconds", "Seconds that folding waits for a checkpoint's snapshot."
        )
        self._folded = figures.gauge("freshet_refresher_folded", "Last folded offset.", "partition")
        self._lag = figures.gauge("freshet_refresher_lag_records", "Records not yet folded.", "partition")
        self._held = figures.gauge("freshet_refresher_partitions", "Partitions that this process folds.")
        self._items = figures.gauge("freshet_refresher_items", "Items with sums.")
        self._remembered = figures.gauge("freshet_refresher_remembered", "Remembered queries.")
        self._bytes = figures.gauge("freshet_refresher_bytes", "Bytes of sums, memory and ledger.")
        self._per_item = figures.gauge("freshet_refresher_bytes_per_item", "Bytes of one item's sums.")
        self._per_entry = figures.gauge("freshet_refresher_bytes_per_remembered", "Bytes of one remembered query.")
        self.failures = figures.counter("freshet_refresher_failures", "Failed attempts, by error class.", "error")
        self._rebuilt = figures.counter(
            "freshet_refresher_folded_anew",
            "Partitions folded again from the beginning of their log, by reason.",
            "reason",
        )

    def folded(self, records: int, seconds: float, counts: Mapping[str, int]) -> None:
        self._batch.observe(records)
        self._fold_seconds.observe(seconds)
        for outcome, count in counts.items():
            self._records[outcome].inc(count)

    def published(self, items: int, entries: int, seconds: float) -> None:
        self._item_deltas.inc(items)
        self._memory_deltas.inc(entries)
        self._publish_seconds.observe(seconds)

    def fresh(self, lags_seconds: Iterable[float]) -> None:
        for lag in lags_seconds:
            self._freshness.observe(lag)

    def holds(self, states: Mapping[int, Partition], ends: Mapping[int, int]) -> None:
        """Set the state's gauges. ends: one past each partition's last known record."""
        self._held.set(len(states))
        self._folded.clear()
        self._lag.clear()
        for number, state in states.items():
            self._folded.labels(str(number)).set(state.folded_offset)
            self._lag.labels(str(number)).set(max(0, ends.get(number, 0) - state.folded_offset - 1))
        self._items.set(sum(len(state.sums) for state in states.values()))
        self._remembered.set(sum(len(state.remembered.memory) for state in states.values()))
        self._bytes.set(sum(state.nbytes for state in states.values()))
        first = next(iter(states.values()), None)
        self._per_item.set(0 if first is None else first.sums.bytes_per_item)
        self._per_entry.set(0 if first is None else first.remembered.memory.bytes_per_entry)

    def watch_turns(self, turns: TurnClock) -> None:
        self._figures.turn_age("freshet_refresher_turn_age_seconds", turns)

    def rebuilt(self, reason: str) -> None:
        self._rebuilt.labels(reason).inc()
