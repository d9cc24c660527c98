"""The process's look at itself: what an audit finds in good, poor and lying answers, and what the metrics then say."""

import time
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.protocol import EXACT, Certificate
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.rules.filters import ItemFilter
from services.candidates.domain import SearchQuery, SearchResult, Stage
from services.candidates.metrics import TRUTH, Answered, Audit, CandidatesMetrics, Finding, examine

ITEMS = make_items(np.random.default_rng(1), 200, 2, 2, 8)
GATE = make_pair_gate(np.random.default_rng(2), 4, 6)
QUERY = make_queries(np.random.default_rng(3), 1, 2, 2, 8)
IDS = [f"{row:03}" for row in range(200)]


def make_live() -> LiveCatalogue:
    base = Catalogue(model_version="m", item_ids=IDS, titles=IDS, categories=[()] * 200, states=ITEMS, pair_gate=GATE)
    return LiveCatalogue(base, build=lambda items: {TRUTH: BruteForce(items)})


CATALOGUE = make_live()
EXACT_SCORES = mol_scores_reference(QUERY, ITEMS, GATE).numpy()[0]
BEST_FIRST = np.argsort(-EXACT_SCORES)


def answer(
    places: list[int], *, certificate: Certificate | None = EXACT, bound: float | None = None, **asked: Any
) -> Answered:
    """The items at these places of the true order, as if an index had answered them."""
    rows = BEST_FIRST[places]
    return Answered(
        search=SearchQuery(
            **{"k": len(places), "stage": Stage.FULL, "filter": ItemFilter(), **asked}, query=QUERY, model_version="m"
        ),
        found=SearchResult(
            algorithm="some",
            item_ids=[IDS[row] for row in rows],
            scores=EXACT_SCORES[rows].tolist(),
            bound=bound,
            certificate=certificate,
            search_s=0.0,
            passes=(),
            served=CATALOGUE.served,
            model_version="m",
        ),
    )


def test_the_true_top_k_has_full_recall_and_keeps_its_promise() -> None:
    finding = examine(CATALOGUE, answer(list(range(10))))
    assert finding.recall == 1
    assert finding.held is True
    assert finding.true == pytest.approx(EXACT_SCORES[BEST_FIRST[10]])


def test_a_missed_item_lowers_recall_and_breaks_a_claim_of_exactness() -> None:
    finding = examine(CATALOGUE, answer([0, 1, 2, 4, 5]))
    assert finding.recall == pytest.approx(4 / 5)
    assert finding.held is False


def test_a_gap_wide_enough_is_kept_and_one_too_narrow_is_not() -> None:
    gap = float(EXACT_SCORES[BEST_FIRST[3]] - EXACT_SCORES[BEST_FIRST[5]])
    for factor, held in ((1.01, True), (0.99, False)):
        assert examine(CATALOGUE, answer([0, 1, 2, 4, 5], certificate=Certificate(factor * gap))).held is held


def test_an_estimate_promises_nothing() -> None:
    finding = examine(CATALOGUE, answer([7, 8], certificate=Certificate(None)))
    assert (finding.held, finding.recall) == (None, 0)


def test_a_pool_is_held_to_its_bound() -> None:
    third = float(EXACT_SCORES[BEST_FIRST[2]])
    for bound, held in ((third + 1e-9, True), (third - 1e-9, False), (None, None)):
        pool = answer([0, 1, 3], certificate=None, bound=bound, stage=Stage.FIRST)
        assert examine(CATALOGUE, pool).held is held


def test_a_short_proven_answer_must_have_left_nothing_out() -> None:
    wanted = ItemFilter(allow_item_ids=[IDS[row] for row in BEST_FIRST[:3]])
    assert examine(CATALOGUE, answer([0, 1, 2], k=10, filter=wanted)).held is True
    assert examine(CATALOGUE, answer([0, 1], k=10, filter=wanted)).held is False


def test_metrics_count_what_became_of_each_promise() -> None:
    registry = CollectorRegistry()
    metrics = CandidatesMetrics(registry)
    findings: list[Finding] = []
    audit = Audit(CATALOGUE, share=1.0, report=lambda finding: (findings.append(finding), metrics.audited(finding))[0])
    for places, certificate in (([0, 1], EXACT), ([1, 2], EXACT), ([1, 2], Certificate(None))):
        assert audit.wants()
        audit.offer(answer(places, certificate=certificate))
        audit_done(audit, findings)
    audit.close()
    labels = {"algorithm": "some", "stage": "full"}
    for promise in ("held", "broken", "none"):
        found = registry.get_sample_value("freshet_candidates_audit_promises_total", {**labels, "promise": promise})
        assert found == 1
    assert registry.get_sample_value("freshet_candidates_audit_recall_sum", labels) == 1 + 0.5 + 0.5
    assert registry.get_sample_value("freshet_candidates_audit_slack_count", labels) == 1


def audit_done(audit: Audit, findings: list[Finding]) -> None:
    """Wait until the audit is free again: only then it takes the next answer."""
    before = time.monotonic()
    while not audit.wants():
        assert time.monotonic() - before < 10, f"still busy after {len(findings)} findings"
        time.sleep(0.001)


def test_no_share_means_no_audits_and_a_share_is_kept_to() -> None:
    none = Audit(CATALOGUE, share=0.0, report=lambda finding: None)
    assert not any(none.wants() for _ in range(1000))
    some = Audit(CATALOGUE, share=0.1, report=lambda finding: None, seed=4)
    assert 700 < sum(some.wants() for _ in range(10_000)) < 1300
