"""Codes on disk: what is taken from there searches as what was made, and what isn't whole is made anew."""

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.indexes.quantized.kept_codes import KEPT, KeptCodes
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import Cells, Coding, coded
from services.offline.training.codebooks.inverted_file import catalogue_codebooks

CELLS = Cells(num_cells=5, bits=4)


class Made:
    """Vectors (300, 24), and how often they were asked for; events as they were reported."""

    def __init__(self, seed: int = 0) -> None:
        self.vectors = np.random.default_rng(seed).normal(size=(300, 24)).astype(np.float32)
        self.times = 0
        self.events: list[str] = []

    def __call__(self) -> np.ndarray:
        self.times += 1
        return self.vectors

    def report(self, event: str, **said: object) -> None:
        self.events.append(event)


def same(found: Any, wanted: Any) -> bool:
    return all(np.array_equal(getattr(found, one.name), getattr(wanted, one.name)) for one in fields(wanted))


def take(root: Path, made: Made, *, of: str = "items-1", cells: Coding[Any] = CELLS, seed: int = 0, **how: Any) -> Any:
    return KeptCodes(root, of=of, report=made.report, **how)("part", made, cells=cells, seed=seed)


@pytest.mark.parametrize(
    "cells",
    [CELLS, Cells(num_cells=3, bits=8), Cells(num_cells=3, bits=4, coded_width=12)],
    ids=lambda cells: f"{cells.kind.__name__} {cells.text}",
)
def test_codes_are_made_once(tmp_path: Path, cells: Coding[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.algorithms.bundles.tensor_file.LOADED_BYTES", 0)
    made = Made()
    wanted = cells.coded(made.vectors, seed=0)
    assert same(take(tmp_path / "new", made, cells=cells), wanted)
    found = take(tmp_path / "new", made, cells=cells)
    assert same(found, wanted)
    assert made.times == 1
    assert made.events == ["codes_taken"]
    assert isinstance(found.codes.base, np.memmap)
    assert not list((tmp_path / "new").glob(".*"))


@pytest.mark.parametrize(
    "other",
    [{"of": "items-2"}, {"seed": 1}, {"cells": Cells(num_cells=6, bits=4)}, {"cells": Cells(num_cells=5, bits=8)}],
)
def test_codes_of_something_else_are_not_taken(tmp_path: Path, other: dict[str, Any]) -> None:
    made = Made()
    take(tmp_path, made)
    take(tmp_path, made, **other)
    assert made.times == 2


@pytest.mark.parametrize(
    "name", ["quantized", "quantized_tangents", "quantized_top_k_avg", "quantized_top_k_per_embedding", "anisotropic"]
)
def test_an_index_over_kept_codes_answers_as_one_that_made_them(tmp_path: Path, name: str) -> None:
    if name == "anisotropic":
        pytest.importorskip("faiss", reason="faiss is an optional extra")
    rng = np.random.default_rng(0)
    p = 1 if name == "quantized" else 2
    gate = None if p == 1 else make_pair_gate(rng, 4, 6)
    items, queries = make_items(rng, 600, p, p, 8), make_queries(rng, 3, p, p, 8)
    scorer, codebooks = MolScorer(items, gate), catalogue_codebooks(items, gate)
    algorithm = parse_algorithm(f"{name}(50)")
    alone = make_index(algorithm, scorer, np.arange(600), codebooks=codebooks)
    events: list[str] = []

    def report(event: str, **said: object) -> None:
        events.append(event)

    for _ in range(2):
        coder = KeptCodes(tmp_path, of="these", report=report)
        index = make_index(algorithm, scorer, np.arange(600), coder, codebooks)
        found, wanted = index.search(queries, 5), alone.search(queries, 5)
        assert np.array_equal(found.item_indices, wanted.item_indices)
        assert np.array_equal(found.scores, wanted.scores)
        assert found.certificates == wanted.certificates
    assert events == ["codes_taken"] * (2 if name == "quantized_top_k_per_embedding" else 1)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def altered(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def missing(path: Path) -> None:
    path.unlink()


def empty_seal(path: Path) -> None:
    path.with_suffix(".json").write_text("")


def strange_seal(path: Path) -> None:
    path.with_suffix(".json").write_text(json.dumps({"sha512": "?"}))


def list_seal(path: Path) -> None:
    path.with_suffix(".json").write_text("[]")


def deep_seal(path: Path) -> None:
    path.with_suffix(".json").write_text("[" * 100_000)


@pytest.mark.parametrize("spoil", [torn, altered, missing, empty_seal, strange_seal, list_seal, deep_seal])
def test_what_is_not_whole_is_made_anew_and_kept(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    made = Made()
    wanted = take(tmp_path, made)
    (path,) = tmp_path.glob("codes-*.safetensors")
    wanted = coded(made.vectors, cells=CELLS, seed=0)
    spoil(path)
    assert same(take(tmp_path, made), wanted)
    assert same(take(tmp_path, made), wanted)
    assert made.times == 2
    assert made.events == ["codes_made_anew", "codes_taken"]


def test_a_reader_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    made = Made()
    take(tmp_path / "none", made, writes=False)
    assert not (tmp_path / "none").exists()
    take(tmp_path, made)
    take(tmp_path, made, writes=False)
    assert made.times == 2


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    made = Made()
    (tmp_path / "file").write_text("no folder")
    assert same(take(tmp_path / "file", made), coded(made.vectors, cells=CELLS, seed=0))
    assert made.events == ["codes_not_kept"]


def test_codes_of_the_sets_that_were_used_last_stay(tmp_path: Path) -> None:
    made = Made()
    for of in ("a", "b"):
        take(tmp_path, made, of=of)
    for entry in tmp_path.glob("*.json"):
        os.utime(entry, (1_000_000_000, 1_000_000_000))
    for of in ("a", "c"):
        take(tmp_path, made, of=of)
    assert len(list(tmp_path.glob("codes-*.safetensors"))) == KEPT
    made.times = 0
    take(tmp_path, made, of="a")
    take(tmp_path, made, of="c")
    assert made.times == 0
