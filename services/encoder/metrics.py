"""The encoder's own figures beside those of the gRPC kit: records by outcome, lag, freshness, batches, encode time, and
what incremental encoding found kept."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.algorithms.incremental_encoding import CacheCounts
from services.common.metrics import BATCH_BUCKETS, LATENCY_BUCKETS_S
from services.common.turn_clock import TurnClock

_LARGE_BATCH_BUCKETS = (*BATCH_BUCKETS, 1024, 2048, 4096, 8192)
_OUTCOMES = ("applied", "duplicates", "dead_lettered", "unknown_items", "undone", "late", "forgotten")


class _CacheCollector(Collector):
    """The cache counts by itself; it is asked when somebody scrapes."""

    def __init__(self, counts: Callable[[], CacheCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Hit rate = hit / (hit + miss); work left = encoded / (reused + encoded)."""
        counts = self._counts()
        sequences = CounterMetricFamily(
            "freshet_encoder_cache_sequences", "Sequences encoded with a cache key, by hit or miss.", labels=["outcome"]
        )
        sequences.add_metric(["hit"], counts.hits)
        sequences.add_metric(["miss"], counts.misses)
        yield sequences
        events = CounterMetricFamily(
            "freshet_encoder_cache_events", "Events of those sequences, reused or encoded.", labels=["outcome"]
        )
        events.add_metric(["reused"], counts.reused_events)
        events.add_metric(["encoded"], counts.events - counts.reused_events)
        yield events
        yield GaugeMetricFamily("freshet_encoder_cache_bytes", "Bytes of keys and values kept.", counts.bytes)


class EncoderMetrics:
    """Label values are few and known beforehand; the partition is the only number among them."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        records = Counter(
            "freshet_encoder_records",
            "Records of the interactions topic by what became of them (those after dead_lettered are also applied).",
            ("outcome",),
            registry=registry,
        )
        self._records = {outcome: records.labels(outcome) for outcome in _OUTCOMES}
        self._freshness = Histogram(
            "freshet_encoder_event_to_state_seconds",
            "Seconds from the broker's acknowledgement of an event to its state being readable.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._batch_records = Histogram(
            "freshet_encoder_batch_records", "Records per poll.", buckets=_LARGE_BATCH_BUCKETS, registry=registry
        )
        self._batch_users = Histogram(
            "freshet_encoder_batch_users", "Users written per poll.", buckets=_LARGE_BATCH_BUCKETS, registry=registry
        )
        self._batch_seconds = Histogram(
            "freshet_encoder_batch_seconds", "Seconds to apply a poll.", buckets=LATENCY_BUCKETS_S, registry=registry
        )
        encode = Histogram(
            "freshet_encoder_encode_seconds",
            "Seconds in the inference server, by who asked.",
            ("source",),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._encode_stream = encode.labels("stream")
        self._encode_request = encode.labels("request")
        self._watermark = Gauge("freshet_encoder_watermark", "Last applied offset.", ("partition",), registry=registry)
        self._lag = Gauge("freshet_encoder_lag_records", "Records not yet applied.", ("partition",), registry=registry)
        self._turn_age = Gauge(
            "freshet_encoder_turn_age_seconds",
            "Seconds since the stream's loop last worked, by the clock: it grows while the stream stalls.",
            registry=registry,
        )
        self._failures = Counter(
            "freshet_encoder_stream_failures", "Failed attempts, by error class.", ("error",), registry=registry
        )
        self._forgets = Counter("freshet_encoder_forgets", "Records of the forgets topic applied.", registry=registry)
        self._rewinds = Counter(
            "freshet_encoder_rewinds", "Times the stream was read again from the beginning.", registry=registry
        )

    def batch(
        self,
        *,
        records: int,
        users: int,
        seconds: float,
        encode_seconds: float,
        counts: Mapping[str, int],
        freshness_seconds: Iterable[float],
    ) -> None:
        """One poll was applied."""
        self._batch_records.observe(records)
        self._batch_users.observe(users)
        self._batch_seconds.observe(seconds)
        if encode_seconds:
            self._encode_stream.observe(encode_seconds)
        for outcome, count in counts.items():
            self._records[outcome].inc(count)
        for wait in freshness_seconds:
            self._freshness.observe(wait)

    def watch_cache(self, counts: Callable[[], CacheCounts]) -> None:
        """Export what a model adapter counts."""
        self._registry.register(_CacheCollector(counts))

    def watch_turns(self, turns: TurnClock) -> None:
        """Export the age of the loop's last good turn as it is when somebody scrapes."""
        self._turn_age.set_function(lambda: turns.age_s)

    def request_encoded(self, seconds: float) -> None:
        """One on-demand encode ended."""
        self._encode_request.observe(seconds)

    def progress(self, watermarks: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Where the partitions stand. ends: one past each partition's last record, as far as known."""
        for partition, watermark in watermarks.items():
            self._watermark.labels(str(partition)).set(watermark)
            self._lag.labels(str(partition)).set(max(0, ends.get(partition, 0) - watermark - 1))

    def failure(self, error: str) -> None:
        """An attempt failed with an error of this class."""
        self._failures.labels(error).inc()

    def forgets(self, applied: int) -> None:
        """So many records of `forgets` were applied."""
        self._forgets.inc(applied)

    def rewind(self) -> None:
        """The state store had no epoch."""
        self._rewinds.inc()
