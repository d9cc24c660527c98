"""Vectors of one's own, from a table to an answer: `freshet index`, `candidates`, `freshet search-vectors`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.algorithms.bundles.model_bundle import BundleError, load_bundle
from tests.unit.cli.shell import facts, refused, shown

RNG = np.random.default_rng(0)
ITEMS = RNG.normal(size=(300, 12)).astype(np.float32) * RNG.uniform(0.5, 2, size=(300, 1)).astype(np.float32)
QUERIES = RNG.normal(size=(4, 12)).astype(np.float16).astype(np.float32)
IDS = [f"thing-{row}" for row in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    categories = [["even"] if row % 2 == 0 else ["odd"] for row in range(300)]
    columns = {
        "item_id": IDS,
        "vector": ITEMS.tolist(),
        "categories": categories,
        "price": pa.array([row // 10 if row % 7 else None for row in range(300)], pa.int32()),
        "released": [date(2026, 1 + row % 12, 1) for row in range(300)],
        "maker": pa.array(["ü" if row % 5 == 0 else "x" for row in range(300)]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), folder / "items.pq")
    np.save(folder / "queries.npy", QUERIES)
    made = facts("index", folder / "items.pq", "--out", folder / "bundle")
    assert (made["num_items"], made["width"], made["codebooks"]) == (300, 12, True)
    return folder


def test_codebooks_are_written_where_pytorch_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = load_bundle(folder / "bundle")
    assert bundle.codebooks is not None
    codes = bundle.codebooks.coded(ITEMS)
    assert np.square(codes.decoded() - ITEMS).mean() < 0.2 * np.square(ITEMS).mean()
    for name in [one for one in sys.modules if one.startswith("services.offline.training.codebooks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    made = shown("index", folder / "items.pq", "--out", folder / "plain")
    assert "no codebooks for `anisotropic`: learning them needs PyTorch (extra train)" in made
    plain = load_bundle(folder / "plain")
    assert plain.codebooks is None
    assert plain.model_version == bundle.model_version


@pytest.fixture(scope="module")
def candidates(folder: Path) -> Iterator[str]:
    environment = {
        **os.environ,
        "FRESHET_BUNDLE": str(folder / "bundle"),
        "FRESHET_CANDIDATES_PORT": "0",
        "FRESHET_METRICS_PORT": "0",
        "FRESHET_CANDIDATES_FOLLOWS_TOPICS": "false",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.candidates"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        events = (json.loads(line) for line in process.stdout)
        port = next(event["port"] for event in events if event["event"] == "serving")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_own_vectors_are_answered_exactly(folder: Path, candidates: str) -> None:
    for row in range(4):
        answer = facts("search-vectors", folder / "queries.npy", "--row", row, "--k", 5, "--candidates", candidates)
        scores = ITEMS.astype(np.float64) @ QUERIES[row]
        best = np.argsort(-scores)[:5]
        assert [item["item_id"] for item in answer["items"]] == [IDS[item] for item in best]
        assert [item["score"] for item in answer["items"]] == pytest.approx(scores[best].tolist())
        assert answer["certificate"] == {"kind": "exact", "gap": 0.0}


def test_filters_and_passes_are_shown(folder: Path, candidates: str) -> None:
    filters = ("--allow-categories", "even", "--deny-items", "thing-0", "--candidates", candidates)
    text = shown("search-vectors", folder / "queries.npy", *filters)
    item_ids = [line.split()[1] for line in text.splitlines()[:10]]
    assert all(int(item_id.removeprefix("thing-")) % 2 == 0 for item_id in item_ids)
    assert "thing-0" not in item_ids
    assert "exact; " in text
    assert " ms  " in text


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        (["price<=7"], lambda row: row % 7 and row // 10 <= 7),
        (["has no price", "maker=ü"], lambda row: row % 7 == 0 and row % 5 == 0),
        (["released >= 2026-06-01", "maker not in ü"], lambda row: row % 12 >= 5 and row % 5),
    ],
)
def test_other_columns_are_attributes(folder: Path, candidates: str, where: list[str], holds: Any) -> None:
    conditions = [word for one in where for word in ("--where", one)]
    found = facts("search-vectors", folder / "queries.npy", "--candidates", candidates, *conditions)
    scores = ITEMS.astype(np.float64) @ QUERIES[0]
    best = [row for row in np.argsort(-scores) if holds(row)][:10]
    assert [item["item_id"] for item in found["items"]] == [IDS[row] for row in best]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--where", "colour=red"],
            "name='colour' allowed: price (number), released (time), maker (tag)",
        ),
        (["--where", "price=cheap"], "filter.where[0]: 'price' one of 'cheap': a tag; allowed: a number"),
        (["--where", "price !!"], "condition='price !!' allowed: e.g. price<=20"),
        (["--row", "4"], "row=4 allowed: 0-3"),
        (["--algorithm", "magic"], "algorithm='magic' allowed: empty or one of"),
        (["--k", "0"], "k=0 allowed: 1-10000"),
    ],
)
def test_a_search_that_makes_no_sense_says_so(
    folder: Path, candidates: str, arguments: list[str], message: str
) -> None:
    assert message in refused(2, "search-vectors", folder / "queries.npy", "--candidates", candidates, *arguments)


def test_a_vector_of_another_width_is_refused_with_both(folder: Path, candidates: str, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.ones(13))
    said = refused(2, "search-vectors", tmp_path / "wide.npy", "--candidates", candidates)
    assert "query components have width 13 but item components have width 12" in said


@pytest.mark.parametrize("content", [np.arange(3), np.ones((2, 2, 2)), np.array([1e9]), np.array([np.nan])])
def test_a_file_that_holds_no_query_vectors_is_refused(tmp_path: Path, content: np.ndarray) -> None:
    np.save(tmp_path / "q.npy", content)
    refused(2, "search-vectors", tmp_path / "q.npy", "--candidates", "127.0.0.1:1")


def test_nothing_listening_is_said_in_one_sentence(folder: Path) -> None:
    said = refused(3, "search-vectors", folder / "queries.npy", "--candidates", "127.0.0.1:1")
    assert "nothing answers at 127.0.0.1:1: the candidates process is not running there" in said


def test_normalized_vectors_are_cosines_and_a_vector_of_zeros_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"item_id": ["a", "b"], "vector": [[3.0, 4.0], [0.0, 2.0]]}), tmp_path / "v.pq")
    shown("index", tmp_path / "v.pq", "--out", tmp_path / "b", "--normalize")
    components = load_bundle(tmp_path / "b").item_states.components[:, 0]
    assert np.asarray(components) == pytest.approx(np.array([[0.6, 0.8], [0, 1]]))
    pq.write_table(pa.table({"item_id": ["a", "b"], "vector": [[3.0, 4.0], [0.0, 0.0]]}), tmp_path / "v.pq")
    said = refused(2, "index", tmp_path / "v.pq", "--out", tmp_path / "b", "--normalize")
    assert "row 1: a vector of zeros has no direction" in said


def test_what_needs_an_encoder_refuses_such_a_bundle_by_name(folder: Path) -> None:
    with pytest.raises(BundleError, match="holds embeddings brought from elsewhere and no encoder"):
        _ = load_bundle(folder / "bundle").max_history
