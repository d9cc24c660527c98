"""The candidates process's own figures: seconds per stage, batch sizes, and what the index holds."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from services.candidates.domain import IndexInfo
from services.common.metrics import BATCH_BUCKETS, LATENCY_BUCKETS_S


class CandidatesMetrics:
    """Histograms with few labels, looked up once."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        stages = Histogram(
            "freshet_candidates_stage_seconds",
            "Seconds of a Search per stage: waiting, making the filter's mask, scanning the items.",
            ("stage",),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.queue, self.filter, self.scan = (stages.labels(stage) for stage in ("queue", "filter", "scan"))
        self._batch = Histogram(
            "freshet_candidates_batch_searches", "Searches per batch.", buckets=BATCH_BUCKETS, registry=registry
        )
        self._searches = Counter(
            "freshet_candidates_searches", "Searches by algorithm and stage.", ("algorithm", "stage"), registry=registry
        )
        self._items = Gauge("freshet_candidates_items", "Items in the index.", registry=registry)
        self._bytes = Gauge(
            "freshet_candidates_bytes_per_item", "Bytes that the index holds for one item.", registry=registry
        )

    def batch(self, searches: int) -> None:
        """One batch starts."""
        self._batch.observe(searches)

    def searched(self, algorithm: str, stage: str, searches: int) -> None:
        """Searches of one kind were answered."""
        self._searches.labels(algorithm, stage).inc(searches)

    def loaded(self, info: IndexInfo) -> None:
        """An index is in place."""
        self._items.set(info.num_items)
        self._bytes.set(info.bytes_per_item)
