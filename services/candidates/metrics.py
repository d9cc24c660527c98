"""The candidates process's metrics, and the audit of live searches.

An audit compares a small share of live searches with brute force, in the background, one at a time. It measures recall,
whether the certificate or bound was right, and its slack.
"""

import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from services.algorithms.indexes.protocol import Pass, Scores
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.scoring.voted_answers import voted_answers
from services.candidates.domain import IndexInfo, SearchQuery, SearchResult, Stage
from services.catalogue.changes import CatalogueMetrics
from services.platform.metrics import BATCH_BUCKETS, Figures

log = structlog.get_logger()

# Recall counts this many best items, or k if fewer.
RECALL_K = 100
# The audits' brute-force algorithm; requests cannot name it.
TRUTH = "truth"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One live answer. votes: by item; None if nothing votes."""

    search: SearchQuery
    found: SearchResult
    votes: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An audit's result. recall: the share of the true best `RECALL_K` (or k) in the answer. promised: the answer's
    bound on omitted items, None without proof. true: the highest omitted score, -inf if none was omitted.
    """

    algorithm: str
    stage: Stage
    recall: float
    promised: float | None
    true: float

    @property
    def held(self) -> bool | None:
        """Whether the bound was right; None without a bound."""
        return None if self.promised is None else self.true <= self.promised


def examine(catalogue: LiveCatalogue, answered: Answered) -> Finding:
    """Answer from the same version by brute force, and compare."""
    item_ids = answered.found.item_ids
    # One more item than the answer has, so that it omits at least one.
    best_ids, best_scores = _truth(catalogue, answered, len(item_ids) + 1)
    there = frozenset(item_ids)
    is_there = np.array([item_id in there for item_id in best_ids], dtype=bool)
    wanted = min(RECALL_K, answered.search.k, len(best_ids))
    left_out = best_scores[~is_there]
    return Finding(
        algorithm=answered.found.algorithm,
        stage=answered.search.stage,
        recall=float(is_there[:wanted].mean()) if wanted else 1.0,
        promised=_promise(answered),
        true=float(left_out[0]) if len(left_out) else -math.inf,
    )


def _truth(catalogue: LiveCatalogue, answered: Answered, count: int) -> tuple[Sequence[str], Scores]:
    """Return the true best `count`: by final score for a FULL answer with votes, else by s."""
    search, found = answered.search, answered.found
    votes = [answered.votes] if answered.votes is not None and search.stage is Stage.FULL else None
    filters, share = [search.filter], found.model_share
    ((best,), _) = voted_answers(catalogue, found.served, search.query, count, filters, votes, TRUTH, model_share=share)
    return best.item_ids, best.scores


def _promise(answered: Answered) -> float | None:
    search, found = answered.search, answered.found
    if search.stage is Stage.FIRST:
        return found.bound
    if found.certificate is None or found.certificate.gap is None:
        return None
    if len(found.scores) < search.k:
        return -math.inf  # a shorter proven answer: nothing else matches
    return found.scores[-1] + found.certificate.gap


class Audit:
    """Audits a share of the answers in a thread, which calls `report`. The catalogue has the algorithm `TRUTH`."""

    def __init__(
        self, catalogue: LiveCatalogue, *, share: float, report: Callable[[Finding], None], seed: int | None = None
    ) -> None:
        self._catalogue, self._share, self._report = catalogue, share, report
        self._random = random.Random(seed)
        self._busy = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")

    def wants(self) -> bool:
        """Return whether to offer the next answer: at random, but not during an audit."""
        return self._share > 0 and self._random.random() < self._share and not self._busy.locked()

    def offer(self, answered: Answered) -> None:
        """Audit an answer in the background, unless an audit is running."""
        if self._busy.acquire(blocking=False):
            self._thread.submit(self._examine, answered)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _examine(self, answered: Answered) -> None:
        try:
            finding = examine(self._catalogue, answered)
            self._report(finding)
            if finding.held is False:
                log.error(
                    "certificate_broken",
                    algorithm=finding.algorithm,
                    stage=finding.stage.value,
                    promised=finding.promised,
                    true=finding.true,
                )
        except Exception:
            log.exception("audit_failed", algorithm=answered.found.algorithm)
        finally:
            self._busy.release()


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
