"""The refresher's own figures beside those of the gRPC kit: records by outcome, lag, freshness, bytes, publications."""

from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from services.common.metrics import BATCH_BUCKETS, LATENCY_BUCKETS_S
from services.common.turn_clock import TurnClock
from services.refresher.domain.partition import COUNTS

_LARGE_BATCH_BUCKETS = (*BATCH_BUCKETS, 1024, 2048, 4096, 8192)


class RefresherMetrics:
    """Label values are few and known beforehand; the partition is the only number among them."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        records = Counter(
            "freshet_refresher_records",
            "Records of the attributions topic by what became of them.",
            ("outcome",),
            registry=registry,
        )
        self._records = {outcome: records.labels(outcome) for outcome in COUNTS}
        self._freshness = Histogram(
            "freshet_refresher_event_to_delta_seconds",
            "Seconds from the broker's acknowledgement of an interaction to its index deltas being acknowledged.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._batch = Histogram(
            "freshet_refresher_batch_records", "Records per fold.", buckets=_LARGE_BATCH_BUCKETS, registry=registry
        )
        self._fold_seconds = Histogram(
            "freshet_refresher_fold_seconds", "Seconds per fold.", buckets=LATENCY_BUCKETS_S, registry=registry
        )
        self._publish_seconds = Histogram(
            "freshet_refresher_publish_seconds",
            "Seconds to make and publish a batch of deltas.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        deltas = Counter("freshet_refresher_deltas", "Index deltas published.", ("kind",), registry=registry)
        self._item_deltas, self._memory_deltas = deltas.labels("item"), deltas.labels("memory")
        self._checkpoint_seconds = Histogram(
            "freshet_refresher_checkpoint_seconds",
            "Seconds to write a partition's checkpoint.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._folded = Gauge("freshet_refresher_folded", "Last folded offset.", ("partition",), registry=registry)
        self._lag = Gauge("freshet_refresher_lag_records", "Records not yet folded.", ("partition",), registry=registry)
        self._turn_age = Gauge(
            "freshet_refresher_turn_age_seconds",
            "Seconds since the loop last worked, by the clock: it grows while folding stalls.",
            registry=registry,
        )
        self._held = Gauge("freshet_refresher_partitions", "Partitions held.", registry=registry)
        self._items = Gauge("freshet_refresher_items", "Items with sums.", registry=registry)
        self._remembered = Gauge("freshet_refresher_remembered", "Remembered queries.", registry=registry)
        self._bytes = Gauge("freshet_refresher_bytes", "Bytes of all that is held.", registry=registry)
        self._per_item = Gauge("freshet_refresher_bytes_per_item", "Bytes of one item's sums.", registry=registry)
        self._per_entry = Gauge(
            "freshet_refresher_bytes_per_remembered", "Bytes of one remembered query.", registry=registry
        )
        self._failures = Counter(
            "freshet_refresher_failures", "Failed attempts, by error class.", ("error",), registry=registry
        )
        self._anew = Counter(
            "freshet_refresher_folded_anew",
            "Partitions folded anew from the beginning of their log, by why.",
            ("reason",),
            registry=registry,
        )

    def folded(self, records: int, seconds: float, counts: Mapping[str, int]) -> None:
        """Records of one poll were folded."""
        self._batch.observe(records)
        self._fold_seconds.observe(seconds)
        for outcome, count in counts.items():
            self._records[outcome].inc(count)

    def published(self, items: int, entries: int, seconds: float) -> None:
        """A publication was acknowledged."""
        self._item_deltas.inc(items)
        self._memory_deltas.inc(entries)
        self._publish_seconds.observe(seconds)

    def fresh(self, lags_seconds: Iterable[float]) -> None:
        """Interactions are in the index's topic, so many seconds after the broker had them."""
        for lag in lags_seconds:
            self._freshness.observe(lag)

    def checkpointed(self, seconds: float) -> None:
        """A checkpoint was written."""
        self._checkpoint_seconds.observe(seconds)

    def holds(
        self,
        folded: Mapping[int, int],
        ends: Mapping[int, int],
        *,
        items: int,
        remembered: int,
        nbytes: int,
        per_item: float,
        per_entry: float,
    ) -> None:
        """What is held now. ends: one past each partition's last record, as far as known."""
        self._held.set(len(folded))
        self._folded.clear()
        self._lag.clear()
        for partition, offset in folded.items():
            self._folded.labels(str(partition)).set(offset)
            self._lag.labels(str(partition)).set(max(0, ends.get(partition, 0) - offset - 1))
        self._items.set(items)
        self._remembered.set(remembered)
        self._bytes.set(nbytes)
        self._per_item.set(per_item)
        self._per_entry.set(per_entry)

    def watch_turns(self, turns: TurnClock) -> None:
        """Export the age of the loop's last good turn as it is when somebody scrapes."""
        self._turn_age.set_function(lambda: turns.age_s)

    def failure(self, error: str) -> None:
        """An attempt failed with an error of this class."""
        self._failures.labels(error).inc()

    def anew(self, reason: str) -> None:
        """A partition is folded from the beginning: "no checkpoint", "torn", "other rules", "other topic", ..."""
        self._anew.labels(reason).inc()
