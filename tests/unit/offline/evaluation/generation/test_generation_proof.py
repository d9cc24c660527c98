"""The catalogue's proof must notice what it is there to notice, and hold for what is served."""

import numpy as np
import pytest

from services.algorithms.generation.generator import Generator
from services.offline.evaluation.generation import proof as generation_proof
from services.offline.evaluation.generation.proof import Proof, prove_catalogue, query
from services.offline.evaluation.generation.rows import FULL, SHORTLIST, page


def test_five_hundred_queries_with_changes_between_answer_only_with_the_catalogue() -> None:
    """100,000 in `freshet bench generation`."""
    proof = prove_catalogue(num_queries=500, seed=3)
    assert proof.holds, proof
    assert proof.queries == 500
    assert proof.answers > 2000
    assert proof.inserts == proof.deletes == 10


def test_an_identifier_that_stays_after_its_deletion_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generator, "delete", lambda self, identifier: True)
    proof = prove_catalogue(num_queries=200, seed=3)
    assert not proof.holds
    assert proof.seen_after_delete > 0


def test_a_score_that_is_not_the_best_assignment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_proof, "assignment_score", lambda scores, padding: 1e9)
    proof = prove_catalogue(num_queries=100, seed=3)
    assert proof.wrong_scores > 0
    assert not proof.holds


def test_a_proof_without_answers_does_not_hold() -> None:
    assert not Proof(queries=10).holds


def test_the_page_has_every_count_of_a_proof() -> None:
    report = {"command": "c", "machine": "m", "seed": 7, "rows": [], "rates": {"bytes_read": 1e10}}
    text = page(report | {"proof": Proof(queries=100_000).plain()})
    assert "100,000 random and adversarial queries" in text
    assert "–" not in text


def test_every_kind_of_hostile_query_is_finite() -> None:
    rng = np.random.default_rng(0)
    assert all(np.isfinite(query(rng, number)).all() for number in range(200))


def test_growth_is_of_the_shortlist_and_one_size_has_none() -> None:
    rows = [
        {"phrases": phrases, "method": method, "cpu ms": cpu, "scores cpu ms": cpu}
        for phrases, method, cpu in ((10, FULL, 40.0), (10, SHORTLIST, 2.0), (30, FULL, 90.0), (30, SHORTLIST, 2.5))
    ]
    report = {"command": "c", "machine": "m", "seed": 7, "rates": {"bytes_read": 1e10}, "proof": Proof().plain()}
    grown = "The shortlist from 10 to 30 phrases: 2.00 to 2.50 ms of processor time, 1.25 times."
    assert grown in page(report | {"rows": rows})
    assert "The shortlist from" not in page(report | {"rows": rows[:2]})
