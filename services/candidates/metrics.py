"""The candidates process's own figures: seconds and items per pass, batch sizes, audits, what the index holds, how
fresh it is."""

import math
from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from services.algorithms.indexes.protocol import Pass
from services.candidates.audit import RECALL_K, Finding
from services.candidates.domain import IndexInfo
from services.common.catalogue_metrics import CatalogueMetrics
from services.common.metrics import BATCH_BUCKETS, LATENCY_BUCKETS_S

ITEM_BUCKETS = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7)
RECALL_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
SLACK_BUCKETS = (1e-6, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)


class CandidatesMetrics:
    """Histograms with few labels, looked up once."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._stages = Histogram(
            "freshet_candidates_stage_seconds",
            "Seconds of a batch of searches per stage: waiting, the votes, the algorithm's passes, what changed since.",
            ("stage",),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.queue = self._stages.labels("queue")
        self.catalogue = CatalogueMetrics("candidates", registry)
        self._touched = Histogram(
            "freshet_candidates_pass_items",
            "Items that a pass looked at for one search.",
            ("algorithm", "stage"),
            buckets=ITEM_BUCKETS,
            registry=registry,
        )
        self._recall = Histogram(
            "freshet_candidates_audit_recall",
            f"Share of the true best (up to {RECALL_K}) that an audited answer held.",
            ("algorithm", "stage"),
            buckets=RECALL_BUCKETS,
            registry=registry,
        )
        self._promises = Counter(
            "freshet_candidates_audit_promises",
            "Audited answers by what became of their certificate or bound: held, broken, or none given.",
            ("algorithm", "stage", "promise"),
            registry=registry,
        )
        self._slack = Histogram(
            "freshet_candidates_audit_slack",
            "How far above the truth a kept promise was: promised minus true best left-out score (similarity units).",
            ("algorithm", "stage"),
            buckets=SLACK_BUCKETS,
            registry=registry,
        )
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

        self._remembered = Gauge(
            "freshet_candidates_remembered", "Interactions in the memory that votes.", registry=registry
        )

    def batch(self, searches: int) -> None:
        """One batch starts."""
        self._batch.observe(searches)

    def searched(self, algorithm: str, stage: str, searches: int) -> None:
        """Searches of one kind were answered."""
        self._searches.labels(algorithm, stage).inc(searches)

    def passed(self, algorithm: str, passes: Sequence[Pass]) -> None:
        """A batch went through an algorithm's passes."""
        for one in passes:
            self._stages.labels(one.name).observe(one.seconds)
            touched = self._touched.labels(algorithm, one.name)
            for items in one.touched.tolist():
                touched.observe(items)

    def audited(self, finding: Finding) -> None:
        """An answer was compared with the truth."""
        labels = (finding.algorithm, finding.stage.value)
        self._recall.labels(*labels).observe(finding.recall)
        promise = {None: "none", True: "held", False: "broken"}[finding.held]
        self._promises.labels(*labels, promise).inc()
        if finding.held and finding.promised is not None and math.isfinite(finding.true):
            self._slack.labels(*labels).observe(finding.promised - finding.true)

    def loaded(self, info: IndexInfo) -> None:
        """An index is in place, or changed."""
        self._items.set(info.num_items)
        self._bytes.set(info.bytes_per_item)
        self._remembered.set(info.num_remembered)
