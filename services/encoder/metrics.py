"""The encoder's metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.algorithms.encoding.incremental_encoding import CacheCounts
from services.encoder.handlers.apply_records import Applied
from services.platform.metrics import LARGE_BATCH_BUCKETS, Figures
from services.platform.stream.follower import TurnClock
from services.user_state.layout import COUNT_FIELDS

_MAX_TYPES, OTHER_TYPES = 20, "(others)"


class _CacheCollector(Collector):
    def __init__(self, counts: Callable[[], CacheCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the counts of hits and misses, and of reused and encoded events."""
        counts = self._counts()
        for name, text, outcomes in (
            (
                "sequences",
                "Sequences encoded with a cache key, by hit or miss.",
                {"hit": counts.hits, "miss": counts.misses},
            ),
            (
                "events",
                "Events of those sequences, reused or encoded.",
                {"reused": counts.reused_events, "encoded": counts.events - counts.reused_events},
            ),
        ):
            family = CounterMetricFamily(f"freshet_encoder_cache_{name}", text, labels=["outcome"])
            for outcome, count in outcomes.items():
                family.add_metric([outcome], count)
            yield family
        yield GaugeMetricFamily("freshet_encoder_cache_bytes", "Bytes of keys and values kept.", counts.bytes)


class EncoderMetrics:
    """Metrics whose labels have few fixed values, except partitions and the first event types unknown to the schema."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._figures = figures = Figures(registry)
        text = "Records of the interactions topic by outcome (those after dead_lettered are also applied)."
        records = figures.counter("freshet_encoder_records", text, "outcome")
        self._records = {outcome: records.labels(outcome) for outcome in COUNT_FIELDS}
        self._unknown_types = figures.counter(
            "freshet_encoder_unknown_types", "Events of types that the event schema does not name, by type.", "type"
        )
        self._named_types: set[str] = set()
        self.restored = figures.counter("freshet_encoder_restored_users", "Lost users that were restored.")
        self.store_memory = figures.gauge(
            "freshet_encoder_store_memory_share", "Share of the state store's memory limit in use; 0 without a limit."
        )
        self.kept = figures.counter("freshet_encoder_kept_histories", "Records of users written to `histories`.")
        self._freshness = figures.histogram(
            "freshet_encoder_event_to_state_seconds",
            "Seconds from the broker's acknowledgement of an event to its state being readable.",
        )
        self._batch_records = figures.histogram(
            "freshet_encoder_batch_records", "Records per poll.", buckets=LARGE_BATCH_BUCKETS
        )
        self._batch_users = figures.histogram(
            "freshet_encoder_batch_users", "Users written per poll.", buckets=LARGE_BATCH_BUCKETS
        )
        self._batch_seconds = figures.histogram("freshet_encoder_batch_seconds", "Seconds to apply a poll.")
        encode = figures.histogram(
            "freshet_encoder_encode_seconds", "Seconds in the inference server, by who asked.", "source"
        )
        self._encode_stream, self.encode_request = encode.labels("stream"), encode.labels("request")
        self._watermark = figures.gauge("freshet_encoder_watermark", "Last applied offset.", "partition")
        self._lag = figures.gauge("freshet_encoder_lag_records", "Records not yet applied.", "partition")
        self._held = figures.gauge("freshet_encoder_partitions", "Partitions that this process applies.")
        self.failures = figures.counter("freshet_encoder_stream_failures", "Failed attempts, by error class.", "error")
        self.other_model_failures = figures.counter(
            "freshet_encoder_other_model_failures", "Batches that a model beside the process's own failed in."
        )
        self.forgets = figures.counter("freshet_encoder_forgets", "Records of the forgets topic applied.")
        self.tails_lost = figures.counter(
            "freshet_encoder_log_tails_lost", "Times a log had lost its end, so that histories were rebuilt."
        )
        self.rewinds = figures.counter("freshet_encoder_rewinds", "Times the stream was read again from the beginning.")

    def batch(self, records: int, seconds: float, applied: Applied, freshness_seconds: Iterable[float]) -> None:
        self._batch_records.observe(records)
        self._batch_users.observe(applied.users)
        self._batch_seconds.observe(seconds)
        if applied.encode_seconds:
            self._encode_stream.observe(applied.encode_seconds)
        for outcome, count in applied.counts.items():
            self._records[outcome].inc(count)
        for name, count in applied.unknown_types.items():
            if len(self._named_types) < _MAX_TYPES:
                self._named_types.add(name)
            self._unknown_types.labels(name if name in self._named_types else OTHER_TYPES).inc(count)
        for wait in freshness_seconds:
            self._freshness.observe(wait)

    def watch_cache(self, counts: Callable[[], CacheCounts]) -> None:
        """Export a model adapter's cache counts."""
        self._figures.registry.register(_CacheCollector(counts))

    def watch_turns(self, turns: TurnClock) -> None:
        self._figures.turn_age("freshet_encoder_turn_age_seconds", turns)

    def progress(self, watermarks: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Set this process's watermarks and lag. ends: one past each partition's last known record."""
        self._held.set(len(watermarks))
        self._watermark.clear()
        self._lag.clear()
        for partition, watermark in watermarks.items():
            self._watermark.labels(str(partition)).set(watermark)
            self._lag.labels(str(partition)).set(max(0, ends.get(partition, 0) - watermark - 1))
