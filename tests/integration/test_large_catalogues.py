"""The benchmark of large catalogues, on a small one: its service answers what the library answers."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.ops.mol_scores import MolScorer
from services.cli.candidates_process import serving
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.large import rows
from services.offline.evaluation.large.catalogue import enlarged, queries
from services.stack import Ports

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def test_the_service_answers_what_the_library_does(small_bundle: Path, tmp_path: Path) -> None:
    trained = load_bundle(small_bundle)
    catalogue = enlarged(trained, 3_000, tmp_path / "bundle", seed=1)
    asked = queries(trained, 6, seed=1)
    scorer = MolScorer(catalogue.item_states, catalogue.pair_gate)
    # FAISS is an optional extra.
    names = ["quantized_tangents(500)", "exact", *(["anisotropic(500)"] if find_spec("faiss") else [])]
    for takes_codes in (False, True):
        with serving(catalogue.path, names, port=Ports.free()["candidates"]) as service:
            for name in names:
                index = make_index(parse_algorithm(name), scorer, codebooks=catalogue.codebooks)
                for number in range(len(asked)):
                    query = asked.take([number])
                    found = index.search(query, rows.K).item_indices[0]
                    assert service.search(query, name) == [catalogue.item_ids[row] for row in found]
        assert ("codes_taken" in (tmp_path / "candidates.log").read_text(encoding="utf-8")) == takes_codes


def test_the_page_has_a_row_for_each_algorithm(small_bundle: Path, tmp_path: Path) -> None:
    request = Request(how="freshet bench large", out=tmp_path, quick=True, seed=0)
    report = rows.run(
        request,
        bundle=small_bundle,
        sizes=[2_000],
        algorithms=["exact", "quantized_tangents(2000)"],
        serve=partial(serving, port=Ports.free()["candidates"]),
    )
    assert [row["algorithm"] for row in report["rows"]] == ["exact", "quantized_tangents(2000)"]
    assert report["rows"][0]["recall_100"] == 1
    assert report["rows"][1]["recall_100"] > 0.95
    assert "recall 1.0000" in report["rows"][0]["changing"]
    assert "| 2,000 | `exact` | 1.0000 |" in (tmp_path / "large-catalogues.md").read_text(encoding="utf-8")
