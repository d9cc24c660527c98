"""Score-aware product codes as a first stage: what they find, small catalogues, strict filters, missing modules."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.indexes.quantized.anisotropic import Anisotropic, FastScan
from services.algorithms.indexes.quantized.codebooks import InvertedCodes
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import Visit
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.training.codebooks.inverted_file import catalogue_codebooks, train_inverted_file

pytest.importorskip("faiss", reason="faiss is an optional extra")


def anisotropic(items: ItemStates, network: PairGate | None = None, **sizes: Any) -> Anisotropic:
    """Over items that its codebooks were learned from."""
    return Anisotropic(MolScorer(items, network), codebooks=catalogue_codebooks(items, network), **sizes)


@pytest.mark.parametrize("shape", [(1, 1, 32), (4, 2, 16)], ids=["dot product", "mixture"])
def test_half_the_bits_find_nearly_all(shape: tuple[int, int, int]) -> None:
    p_q, p_x, d = shape
    rng = np.random.default_rng(3)
    items, queries = make_items(rng, 10_000, p_q, p_x, d), make_queries(rng, 16, p_q, p_x, d)
    network = make_pair_gate(rng, p_q * p_x, 32) if p_q > 1 else None
    scorer = MolScorer(items, network)
    wanted = BruteForce(scorer).search(queries, 50).item_indices
    index = anisotropic(items, network, pool_size=1_000)
    found = index.search(queries, 50)
    share = np.mean([len(set(row) & set(best)) / 50 for row, best in zip(found.item_indices, wanted, strict=True)])
    assert share > 0.97
    assert {one.kind for one in found.certificates} == {"estimate"}
    # Two bits a coordinate, FAISS's ids and centres: fewer than four bits a coordinate and a row number.
    assert index.nbytes < make_index(parse_algorithm("quantized_tangents(1000)"), scorer).nbytes


def test_few_cells_are_enough_whatever_the_filter_leaves_of_them() -> None:
    rng = np.random.default_rng(4)
    items, queries, network = make_items(rng, 2_000, 4, 2, 8), make_queries(rng, 5, 4, 2, 8), make_pair_gate(rng, 8, 16)
    index = anisotropic(items, network, pool_size=8, visit=Visit(probes=1))
    assert index.search(queries, 5).passes[0].touched.max() < 1_000
    allowed = np.zeros((5, 2_000), dtype=bool)
    for query, count in enumerate((0, 1, 7, 60, 2_000)):
        allowed[query, rng.permutation(2_000)[:count]] = True
    answer = index.search(queries, 60, allowed)
    assert (answer.item_indices >= 0).sum(axis=1).tolist() == [0, 1, 7, 60, 60]
    assert [one.kind for one in answer.certificates[:4]] == ["exact"] * 4


def test_a_scan_scores_as_its_codes_do() -> None:
    rng = np.random.default_rng(6)
    vectors, queries = (rng.normal(size=(count, 9)).astype(np.float32) for count in (700, 3))
    padded = np.pad(vectors, ((0, 0), (0, 1)))
    codes = train_inverted_file(padded, num_cells=9, num_subspaces=5, code_bits=4, rotate=True).coded(vectors)
    assert isinstance(codes, InvertedCodes)
    assert codes.codes.shape == (700, 5)
    scan = FastScan(codes)
    answer = scan.pool(queries, 700, visit=Visit(probes=9))
    exact = queries @ codes.decoded()[:, :9].T
    assert np.sort(answer.rows, axis=1).tolist() == [list(range(700))] * 3
    # FAISS adds up integers of 8 bits.
    assert np.abs(answer.scores - np.take_along_axis(exact, answer.rows, axis=1)).max() < 0.05 * exact.std()


def test_what_is_not_there_is_named() -> None:
    rng = np.random.default_rng(8)
    items, network = make_items(rng, 60, 4, 2, 8), make_pair_gate(rng, 8, 4)
    with pytest.raises(
        ValueError, match="codebooks, and the bundle has none; `freshet train` and `freshet index` write"
    ):
        make_index(parse_algorithm("anisotropic(5)"), MolScorer(items, network))
    others = catalogue_codebooks(make_items(rng, 60, 4, 2, 6), network)
    with pytest.raises(ValueError, match="vectors are 24 wide; these codebooks code 20"):
        Anisotropic(MolScorer(items, network), codebooks=others, pool_size=5)


def test_serving_codes_without_pytorch_and_names_faiss_where_it_is_not_installed(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    items = ItemStates(components=rng.normal(size=(40, 1, 6)).astype(np.float32))
    codebooks = catalogue_codebooks(items, None)
    assert codebooks is not None
    np.savez(tmp_path / "codebooks.npz", components=items.components, **codebooks.arrays)
    build = """
        import sys; sys.modules["torch"] = None; sys.modules[sys.argv[2]] = None
        import numpy as np
        from services.algorithms.indexes.quantized.anisotropic import Anisotropic
        from services.algorithms.indexes.quantized.codebooks import Codebooks
        from services.algorithms.ops.mol_scores import MolScorer
        from services.algorithms.scoring.states import ItemStates, QueryStates
        arrays = dict(np.load(sys.argv[1]))
        items = ItemStates(components=arrays.pop("components"))
        index = Anisotropic(MolScorer(items, None), codebooks=Codebooks(**arrays), pool_size=5)
        print(index.search(QueryStates(components=items.components[[7]]), 5).item_indices[0].tolist())
    """

    def built(missing: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", dedent(build), str(tmp_path / "codebooks.npz"), missing]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    found = Anisotropic(MolScorer(items, None), codebooks=codebooks, pool_size=5).search(
        QueryStates(components=items.components[[7]]), 5
    )
    assert built("nothing").stdout.strip() == str(found.item_indices[0].tolist())
    without = built("faiss").stderr.splitlines()[-1]
    assert "FAISS is not installed; it comes with the extra bench-cpu" in without
