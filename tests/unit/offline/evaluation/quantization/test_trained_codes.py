"""Codes of trained items at equal bits, and the indexes beside them, on a small mixture."""

from pathlib import Path

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import Cells, CellScan, Visit
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.quantization.trained import code_rows, codes, index_rows, values

RNG = np.random.default_rng(0)
SCORER = MolScorer(make_items(RNG, 700, 2, 2, 8), make_pair_gate(RNG, 4, 8))
QUERIES = make_queries(RNG, 12, 2, 2, 8)


def quick(out: Path) -> Request:
    return Request(how="", out=out, quick=True, seed=0)


@pytest.mark.parametrize("coded_width", [12, 5])
def test_decoded_scalar_codes_score_as_their_scan(coded_width: int) -> None:
    vectors, queries = (RNG.normal(size=(count, 12)).astype(np.float32) for count in (300, 4))
    found = Cells(num_cells=6, bits=4, coded_width=coded_width).coded(vectors, seed=0)
    answer = CellScan(found).pool(queries, 300, visit=Visit(probes=6))
    decoded = np.take_along_axis(queries @ values(found).T, answer.rows, axis=1)
    # A query's own codes are of 8 bits.
    assert np.abs(answer.scores - decoded).max() < 0.1


def test_codes_are_compared_at_equal_bits(tmp_path: Path) -> None:
    rows = list(code_rows(SCORER, QUERIES, quick(tmp_path)))
    assert len(rows) == len(list(codes(20)))
    by_bits: dict[int, list[float]] = {}
    for row in rows:
        by_bits.setdefault(row["bits"], []).append(row["N=200"])
    assert list(by_bits) == [640, 80, 40, 20]
    (floats,) = by_bits[640]
    assert all(floats >= share - 0.02 for shares in by_bits.values() for share in shares)
    assert min(by_bits[80]) > max(by_bits[20])


def test_indexes_are_measured_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="faiss is an optional extra")
    rows = list(index_rows(SCORER, QUERIES, quick(tmp_path)))
    assert [(row["index"], row["N"]) for row in rows] == [
        ("exact", None),
        ("quantized_tangents", 200),
        ("anisotropic", 200),
    ]
    assert rows[0]["recall_100"] == 1
    assert all(row["recall_100"] > 0.5 and row["milliseconds"] > 0 and row["bytes_beside_states"] > 0 for row in rows)
