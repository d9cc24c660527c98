"""The candidates process's metrics."""

import math
from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry

from services.algorithms.indexes.protocol import Pass
from services.candidates.audit import RECALL_K, Finding
from services.candidates.domain import IndexInfo
from services.catalogue.changes import CatalogueMetrics
from services.platform.metrics import BATCH_BUCKETS, Figures

ITEM_BUCKETS = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7)
RECALL_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
SLACK_BUCKETS = (1e-6, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)


class CandidatesMetrics:
    """Metrics with few labels."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        figures = Figures(registry)
        self._stages = figures.histogram(
            "freshet_candidates_stage_seconds",
            "Seconds of a batch of searches per stage: queue, votes, the algorithm's passes, newer changes.",
            "stage",
        )
        self.queue = self._stages.labels("queue")
        self.catalogue = CatalogueMetrics("candidates", registry)
        stage = ("algorithm", "stage")
        self._touched = figures.histogram(
            "freshet_candidates_pass_items", "Items that a pass touched for one search.", *stage, buckets=ITEM_BUCKETS
        )
        text = f"Share of the true best (up to {RECALL_K}) in an audited answer."
        self._recall = figures.histogram("freshet_candidates_audit_recall", text, *stage, buckets=RECALL_BUCKETS)
        text = "Audited answers by their certificate or bound: held, broken, or none given."
        self._promises = figures.counter("freshet_candidates_audit_promises", text, *stage, "promise")
        text = "Slack of a promise that held: promised minus true best left-out score (similarity units)."
        self._slack = figures.histogram("freshet_candidates_audit_slack", text, *stage, buckets=SLACK_BUCKETS)
        self._batch = figures.histogram(
            "freshet_candidates_batch_searches", "Searches per batch.", buckets=BATCH_BUCKETS
        )
        self._searches = figures.counter("freshet_candidates_searches", "Searches by algorithm and stage.", *stage)
        text = "Attempts at an answer within a gap, by whether they proved it."
        self._gaps = figures.counter("freshet_candidates_gaps", text, "algorithm", "outcome")
        self._items = figures.gauge("freshet_candidates_items", "Items in the index.")
        self._bytes = figures.gauge("freshet_candidates_bytes_per_item", "Bytes of the index per item.")
        self._remembered = figures.gauge("freshet_candidates_remembered", "Interactions in the memory that votes.")

    def batch(self, searches: int) -> None:
        self._batch.observe(searches)

    def searched(self, algorithm: str, stage: str, searches: int) -> None:
        self._searches.labels(algorithm, stage).inc(searches)

    def gap_asked(self, algorithm: str, is_proven: bool) -> None:
        self._gaps.labels(algorithm, "proven" if is_proven else "not_proven").inc()

    def passed(self, algorithm: str, passes: Sequence[Pass]) -> None:
        for one in passes:
            self._stages.labels(one.name).observe(one.seconds)
            touched = self._touched.labels(algorithm, one.name)
            for items in one.touched.tolist():
                touched.observe(items)

    def audited(self, finding: Finding) -> None:
        labels = (finding.algorithm, finding.stage.value)
        self._recall.labels(*labels).observe(finding.recall)
        promise = {None: "none", True: "held", False: "broken"}[finding.held]
        self._promises.labels(*labels, promise).inc()
        if finding.held and finding.promised is not None and math.isfinite(finding.true):
            self._slack.labels(*labels).observe(finding.promised - finding.true)

    def loaded(self, info: IndexInfo) -> None:
        self._items.set(info.num_items)
        self._bytes.set(info.bytes_per_item)
        self._remembered.set(info.num_remembered)
