"""Benchmark rows: complete for every algorithm, and honest about proof."""

import json
from dataclasses import asdict

import pytest

from services.offline.evaluation.catalogues.scene import SYNTHETIC, Shape
from services.offline.evaluation.common.roofline import Rates
from services.offline.evaluation.retrieval.algorithms import TRANSCRIPTION, algorithms
from services.offline.evaluation.retrieval.rows import Plan, Row, page, rows, wrong_proofs

TINY = Shape(
    name="tiny",
    num_items=1_200,
    num_query_components=2,
    num_item_components=2,
    component_width=8,
    gate_hidden=8,
)
RATES = Rates(multiply_adds=1e10, exponentials=1e9, bytes_read=1e10, threads=1)
WANTED = {
    "catalogue",
    "shape",
    "batch",
    "algorithm",
    "milliseconds",
    "speedup",
    "relative_hr_100",
    "recall_100",
    "exact",
    "touched",
    "floor_ratio",
    "bytes_per_item",
}


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    plan = Plan(shape=TINY, batches=(1, 4), num_queries=8, seconds=0.0)
    return rows(plan, seed=0, quick=False, rates=RATES)


def test_every_row_has_every_field_and_is_json(measured: list[Row]) -> None:
    for row in measured:
        assert row.keys() >= WANTED, row["algorithm"]
        # A generated catalogue has no labels.
        assert (row["catalogue"], row["relative_hr_100"]) == (SYNTHETIC, None)
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured


def test_every_algorithm_has_a_row_for_every_batch(measured: list[Row]) -> None:
    names = {one.name for one in algorithms(TINY.num_items, TINY, quick=False)}
    found = {(row["algorithm"], row["batch"]) for row in measured if not row["algorithm"].startswith(TRANSCRIPTION)}
    assert found == {(name, batch) for name in names for batch in (1, 4)}
    assert "top_k_avg(4000)" not in names  # more than half of 1,200 items


def test_every_algorithm_of_the_paper_stands_beside_its_transcription(measured: list[Row]) -> None:
    for row in measured:
        if row["algorithm"].startswith(("brute_force", "top_k", "combined")):
            assert row["speedup_same"] > 0, row["algorithm"]


def test_what_is_proven_exact_has_recall_one(measured: list[Row]) -> None:
    proven = [row for row in measured if row["exact"] == 1.0]
    assert {row["algorithm"] for row in proven} >= {"brute_force", "exact_algorithm_1", "exact_low_precision"}
    assert all(row["recall_100"] == 1.0 for row in proven)
    assert wrong_proofs(measured) == []


def test_a_false_proof_is_named() -> None:
    row = {"algorithm": "liar", "shape": "tiny", "batch": 1, "exact": 1.0, "recall_100": 0.99}
    assert wrong_proofs([row]) == ["liar at tiny, batch 1: recall 0.9900"]


def test_trained_bundles_stand_first_with_recall_and_hit_rate(measured: list[Row]) -> None:
    trained = [row | {"catalogue": "mine as trained", "recall_100": 0.5, "relative_hr_100": 0.25} for row in measured]
    report = {"command": "freshet bench retrieval", "machine": "a machine", "rates": asdict(RATES), "proof": None}
    text = page(report | {"rows": [*measured, *trained]})
    assert text.index("### mine as trained: 1,200 items, batch 1") < text.index("## Synthetic catalogues")
    assert "| 0.500 | 0.250 |" in text
    assert "None in this run" in page(report | {"rows": measured})
