"""The catalogue's proof must notice what it is there to notice, and hold for what is served."""

import numpy as np
import pytest

from services.algorithms.generation.generator import Generator
from services.offline.evaluation.generation import proof as generation_proof
from services.offline.evaluation.generation.proof import Proof, prove_catalogue, query
from services.offline.evaluation.generation.rows import FULL, SHORTLIST, growth, page


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


def test_every_kind_of_hostile_query_is_finite() -> None:
    rng = np.random.default_rng(0)
    assert all(np.isfinite(query(rng, number)).all() for number in range(200))


def row(phrases: int, method: str, cpu: float) -> dict[str, object]:
    names = ("ms", "p95 ms", "scores cpu ms", "floor ms", "top 10 tokens", "top 10 identifiers", "found its own")
    values = dict.fromkeys(names, 0.5)
    return {
        "phrases": phrases, "weights": "synthetic, int8", "method": method, "setting": "m 1, r 2", "union": 20_000,
        "cpu ms": cpu, "speedup": 9.5, "extra MB": 1.0, **values,
    }  # fmt: skip


def test_the_page_holds_every_row_growth_and_the_proof() -> None:
    rows = [row(10, FULL, 40.0), row(10, SHORTLIST, 2.0), row(30, FULL, 90.0), row(30, SHORTLIST, 2.5)]
    text = page(
        {
            "command": "freshet bench generation",
            "machine": "a machine",
            "seed": 7,
            "rows": rows,
            "growth": growth(rows),
            "proof": Proof(queries=100_000, answers=5).plain(),
            "rates": {"bytes_read": 1e10},
        }
    )
    assert "| shortlist | m 1, r 2 | 20,000 | 0.5 | 2.5 | 0.5 | 9.5 |" in text
    assert all(figure in text for figure in ("1.25 times", "100,000", "(seed 7)"))


def test_one_size_has_no_growth() -> None:
    assert growth([row(10, FULL, 40.0), row(10, SHORTLIST, 2.0)]) is None
