"""Codes in a snapshot: what starts from it searches them as before, and what does not fit is refused and made."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutable_scene import MODEL, restore
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.by_name import make_indexes, parse_algorithm
from services.algorithms.indexes.mutable.index import MutableIndex
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.snapshot import HeldCodes, code_arrays, load_snapshot, write_snapshot
from services.algorithms.ops.quantized_scan import (
    Cells,
    CellScan,
    Coder,
    Coding,
    Visit,
    codes_key,
    vectors_coded,
)
from services.algorithms.scoring.states import ItemStates, PairGate
from services.offline.training.codebooks.inverted_file import catalogue_codebooks

X = 600
CELLS = Cells(num_cells=5, bits=4)
VECTORS = np.random.default_rng(0).normal(size=(300, 24)).astype(np.float32)


@pytest.mark.parametrize("cells", [CELLS, Cells(num_cells=3, bits=8), Cells(num_cells=40, bits=4, coded_width=12)])
def test_the_codes_of_some_rows_are_searched_as_all_with_the_others_left_out(cells: Cells) -> None:
    codes = cells.coded(VECTORS, seed=0)
    rows = np.sort(np.random.default_rng(1).permutation(300)[:170])
    some = codes.take(rows)
    some.check_fits(170, 24)
    everything = Visit(probes=100)
    queries = np.random.default_rng(2).normal(size=(4, 24)).astype(np.float32)
    wanted = CellScan(codes).pool(queries, 50, visit=everything, allowed=np.isin(np.arange(300), rows))
    found = CellScan(some).pool(queries, 50, visit=everything)
    assert np.array_equal(rows[found.rows], wanted.rows)
    assert np.array_equal(found.scores, wanted.scores)


class Scene:
    """An index of one coded algorithm with items in its main segment and behind it, some of each dead."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(0)
        p = 1 if name == "quantized" else 2
        self.gate: PairGate | None = None if p == 1 else make_pair_gate(rng, 4, 6)
        self.items: ItemStates = make_items(rng, X, p, p, 8)
        self.queries = make_queries(rng, 3, p, p, 8)
        self.algorithm = parse_algorithm(f"{name}(50)")
        self.codebooks = catalogue_codebooks(self.items, self.gate)

    def build(self, coder: Coder = vectors_coded) -> Callable[..., Any]:
        return lambda items: make_indexes([self.algorithm], items, coder, self.codebooks)

    def batch(self, rows: range) -> ItemBatch:
        return ItemBatch(item_ids=[f"i{row:03}" for row in rows], states=self.items.take(list(rows)))

    def index(self) -> MutableIndex:
        return MutableIndex(self.batch(range(500)), self.gate, model_version=MODEL, build=self.build())


@pytest.mark.parametrize("name", ["quantized", "quantized_tangents", "anisotropic"])
def test_an_index_that_starts_from_a_snapshot_codes_nothing_and_answers_the_same(tmp_path: Path, name: str) -> None:
    if name == "anisotropic":
        pytest.importorskip("faiss", reason="faiss is an optional extra")
    scene = Scene(name)
    index = scene.index()
    snapshot = load_snapshot(write_snapshot(tmp_path, index), model_version=MODEL)
    assert snapshot.codes.num_rows == 500
    again = restore(snapshot, scene.gate, build=scene.build(snapshot.codes))
    assert not snapshot.codes.made
    found, wanted = again.version.search(scene.queries, 5), index.version.search(scene.queries, 5)
    assert (found.item_ids, found.certificates) == (wanted.item_ids, wanted.certificates)
    assert np.array_equal(found.scores, wanted.scores)


def test_coded_items_lie_first_and_the_others_behind_them(tmp_path: Path) -> None:
    scene = Scene("quantized")
    index = scene.index()
    index.apply(upserts=scene.batch(range(490, 520)), removals=["i007"])
    snapshot = load_snapshot(write_snapshot(tmp_path, index), model_version=MODEL)
    coded_ids = [f"i{row:03}" for row in range(490) if row != 7]
    assert list(snapshot.items.item_ids) == [*coded_ids, *(f"i{row:03}" for row in range(490, 520))]
    assert snapshot.codes.num_rows == len(coded_ids)


def held(codes: Any, cells: Coding[Any] = CELLS) -> HeldCodes:
    return HeldCodes(path=Path("codes"), arrays=code_arrays({codes_key("part", cells, 0): codes}, codes.num_items))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda codes: held(replace(codes, num_items=299)),
            "codes of 299 vectors 24 wide; allowed: 300 vectors 24 wide",
        ),
        (lambda codes: held(replace(codes, width=25)), "codes of 300 vectors 25 wide; allowed: 300 vectors 24 wide"),
        (
            lambda codes: held(codes, Cells(num_cells=5, bits=8)),
            "codes of part, all dimensions in 8 bits, seed 0; allowed: part, all dimensions in 4 bits, seed 0",
        ),
    ],
)
def test_codes_that_do_not_fit_are_refused_and_made(spoil: Callable[[Any], HeldCodes], reason: str) -> None:
    codes = CELLS.coded(VECTORS, seed=0)
    reports: list[tuple[str, dict[str, str]]] = []
    coder = replace(spoil(codes), report=lambda event, **said: reports.append((event, said)))
    found = coder("part", lambda: VECTORS, VECTORS.shape, cells=CELLS, seed=0)
    ((event, said),) = reports
    assert (event, said["path"], said["part"]) == ("codes_refused", "codes", "part")
    assert said["reason"].startswith(reason)
    assert coder.made
    assert np.array_equal(found.codes, codes.codes)
