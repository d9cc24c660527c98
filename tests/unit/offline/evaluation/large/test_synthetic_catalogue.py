"""A synthetic item is as near to the trained one that it was made of, whatever the components' width, and queries are
the encoder's, of whatever head."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from retrieval_scene import make_bundle

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates
from services.contracts.shards import Shard
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.large import gaps, processes, rows
from services.offline.evaluation.large.catalogue import enlarged, queries
from services.offline.training import PRESETS
from services.offline.training.presets import with_sasrec
from services.offline.training.run import run_training
from tests.integration.sharded_answers import states_of
from tests.unit.offline.training.training_scene import CONFIG, cyclic_interactions


@pytest.mark.parametrize("width", [32, 50, 128])
def test_a_copys_cosine_with_its_original_does_not_depend_on_the_width(tmp_path: Path, width: int) -> None:
    trained = make_bundle(tmp_path / "trained", d=width)
    items = enlarged(trained, 500, tmp_path / "enlarged", seed=1).item_states.components
    # Originals are far apart: the nearest one is an item's own.
    cosines = np.einsum("xpd,ypd->xyp", items, trained.item_states.components)
    nearest = cosines.mean(axis=2).max(axis=1)
    assert nearest.mean() == pytest.approx(0.87, abs=0.01)


def test_a_shard_and_the_processes_before_it_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, shard = make_bundle(tmp_path / "trained", d=16), Shard(0, 2)
    monkeypatch.setattr(processes, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    request = Request(how="freshet bench large", out=tmp_path, quick=True, seed=0)
    report = processes.run(request, bundle=trained.path, sizes=[500], shard=shard, width=8)
    names = ["candidates 0/2", "gateway", "reranker", "refresher", "candidates 0/2, again"]
    assert [row["process"] for row in report["rows"]] == names
    own = shard.rows(enlarged(trained, 500, tmp_path / "all", seed=0, width=8).item_ids)
    states = 4 * (trained.item_states.components.shape[1] * 8 + trained.manifest.head.num_pairs)
    for row in (report["rows"][0], report["rows"][-1]):
        assert (row["held"], row["states"]) == (len(own), states)


@pytest.fixture(scope="module")
def dot_product(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("dot") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "quick", with_sasrec(CONFIG))
        run_training(out=out, interactions=cyclic_interactions(), split="none", head="dot", epochs=1)
    return load_bundle(out)


@contextmanager
def in_process(path: Path, algorithms: Sequence[str]) -> Iterator[rows.Served]:
    bundle = load_bundle(path)
    index = BruteForce(MolScorer(bundle.item_states, bundle.pair_gate))

    def search(query: QueryStates, algorithm: str) -> list[str]:
        assert algorithm in algorithms
        return [bundle.item_ids[row] for row in index.search(query, rows.K).item_indices[0]]

    yield rows.Served(search=search, start_s=1.0, resident_bytes=lambda: 1)


def test_a_dot_products_queries_are_its_encoders_and_cross_the_wire_without_a_gate(dot_product: Bundle) -> None:
    asked = queries(dot_product, 3, seed=0)
    assert asked.gate is None
    np.testing.assert_allclose(np.linalg.norm(asked.components, axis=2), 1, atol=2e-3)
    assert [one.gate for one in states_of(dot_product, asked)] == [b""] * 3


def test_large_catalogues_of_a_dot_product_are_measured(dot_product: Bundle, tmp_path: Path) -> None:
    request = Request(how="freshet bench large", out=tmp_path, quick=True, seed=0)
    report = rows.run(request, bundle=dot_product.path, sizes=[2_000], algorithms=rows.ALGORITHMS, serve=in_process)
    assert [row["algorithm"] for row in report["rows"]] == list(rows.ALGORITHMS)
    assert report["rows"][-1]["recall_100"] == 1


def test_promises_are_compared_with_brute_force(
    dot_product: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaps, "_TIMED", 10)
    request = Request(how="freshet bench gaps", out=tmp_path, quick=True, seed=0)
    report = gaps.run(request, bundle=dot_product.path, sizes=[2_000], requests=10)
    assert [row["asked"] for row in report["rows"]] == [
        "quantized(200), no gap",
        "exact",
        "gap 0",
        "gap 0.01",
        "gap 0.05",
    ]
    assert [row["requests"] for row in report["rows"]] == [10, 10, 40, 40, 40]
    assert gaps.broken(report) == ""
    assert [row["proven"] for row in report["rows"][1:]] == [1, 1, 1, 1]
    assert (tmp_path / "gaps.png").stat().st_size > 0
    report["rows"][2]["broken"] = 3
    assert gaps.broken(report) == "proven gaps that do not hold: 3 of gap 0 at 2,000"
