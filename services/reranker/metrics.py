"""The reranker's metrics."""

from prometheus_client import REGISTRY, CollectorRegistry

from services.algorithms.indexes.protocol import Certificate
from services.catalogue.metrics import CatalogueMetrics
from services.platform.metrics import BATCH_BUCKETS, Figures


class RerankerMetrics:
    """Histograms with few labels."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        figures = Figures(registry)
        stages = figures.histogram(
            "freshet_reranker_stage_seconds",
            "Seconds of a Rerank per stage: waiting, verifying the filter, scoring, choosing.",
            "stage",
        )
        self.queue, self.verify, self.score, self.choose = (
            stages.labels(stage) for stage in ("queue", "verify", "score", "choose")
        )
        self.catalogue = CatalogueMetrics("reranker", registry)
        self._batch = figures.histogram("freshet_reranker_batch_pools", "Pools per batch.", buckets=BATCH_BUCKETS)
        self._dropped = figures.counter(
            "freshet_reranker_dropped_items", "Candidates dropped: unknown, repeated, or against the filter."
        )
        certificates = figures.counter("freshet_reranker_certificates", "Answers by kind of certificate.", "kind")
        self._certificates = {kind: certificates.labels(kind) for kind in ("exact", "bounded", "estimate")}

    def batch(self, pools: int) -> None:
        self._batch.observe(pools)

    def ranked(self, certificate: Certificate, dropped_items: int) -> None:
        self._certificates[certificate.kind].inc()
        if dropped_items:
            self._dropped.inc(dropped_items)
