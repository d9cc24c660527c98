"""Algorithms by name: what is read, what is refused, and that each name builds what it says."""

import numpy as np
import pytest
from retrieval_scene import make_items, make_pair_gate, make_queries

from services.algorithms.indexes.by_name import known_algorithms, make_index, make_indexes, parse_algorithm
from services.algorithms.ops.mol_scores import MolScorer
from services.offline.training.codebooks.inverted_file import catalogue_codebooks


def written(name: str) -> str:
    """A known name with numbers for its letters: "combined_top_k(N1,N2)" -> "combined_top_k(7,7)"."""
    return name.replace("N1", "7").replace("N2", "7").replace("N", "7").replace("C", "7")


@pytest.mark.parametrize("name", known_algorithms())
def test_every_known_name_builds_an_index_of_that_name(name: str) -> None:
    rng = np.random.default_rng(0)
    if name.startswith("anisotropic"):
        pytest.importorskip("faiss", reason="faiss is an optional extra")
    p_q = p_x = 1 if name.startswith("quantized(") else 2
    gate = None if p_x == 1 else make_pair_gate(rng, 4, 6)
    items = make_items(rng, 40, p_q, p_x, 8)
    scorer = MolScorer(items, gate)
    algorithm = parse_algorithm(written(name))
    assert algorithm.text == written(name)
    index = make_index(algorithm, scorer, codebooks=catalogue_codebooks(items, gate))
    assert index.name == algorithm.name
    assert index.search(make_queries(rng, 2, p_q, p_x, 8), 5).item_indices.shape == (2, 5)


@pytest.mark.parametrize("name", ["quantized_tangents", "anisotropic"])
def test_algorithms_that_differ_in_their_sizes_alone_share_their_codes_and_nothing_else(name: str) -> None:
    if name == "anisotropic":
        pytest.importorskip("faiss", reason="faiss is an optional extra")
    rng = np.random.default_rng(0)
    items, gate, queries = make_items(rng, 600, 2, 2, 8), make_pair_gate(rng, 4, 6), make_queries(rng, 3, 2, 2, 8)
    scorer, codebooks = MolScorer(items, gate), catalogue_codebooks(items, gate)
    algorithms = [parse_algorithm(f"{name}{sizes}") for sizes in ("(7)", "(50,3)", "(50)")]
    made = make_indexes([*algorithms, parse_algorithm("exact")], scorer, codebooks=codebooks)
    assert list(made) == [f"{name}(7)", f"{name}(50,3)", f"{name}(50)", "exact"]
    each = [make_index(algorithm, scorer, codebooks=codebooks) for algorithm in algorithms]
    sizes, codes = [], each[0]._bytes_of_codes  # type: ignore[attr-defined]
    for algorithm, alone in zip(algorithms, each, strict=True):
        shared = made[algorithm.text]
        for found, wanted in (
            (shared.search(queries, 5), alone.search(queries, 5)),
            (shared.first_stage(queries, 5), alone.first_stage(queries, 5)),
        ):
            assert np.array_equal(found.item_indices, wanted.item_indices)
            assert np.array_equal(found.scores, wanted.scores)
        sizes.append(alone.nbytes - shared.nbytes)
    assert codes > 0
    assert sizes == [0, codes, codes]
    with pytest.raises(ValueError, match="pool_size"):
        made[f"{name}(7)"].with_sizes(pool_size=0)  # type: ignore[attr-defined]


def test_a_mixture_is_refused_where_only_dot_products_can_be_searched() -> None:
    rng = np.random.default_rng(0)
    scorer = MolScorer(make_items(rng, 40, 2, 2, 8), make_pair_gate(rng, 4, 6))
    with pytest.raises(ValueError, match="items make 4 pairs; allowed: 1, a plain dot product"):
        make_index(parse_algorithm("quantized(7)"), scorer)


@pytest.mark.parametrize(
    "text",
    ["", "magic", "top_k_avg", "top_k_avg()", "top_k_avg(0)", "top_k_avg(1000001)", "top_k_avg(5,5)", "brute_force(3)",
     "combined_top_k(5)", "top_k_avg(5", "top_k_avg(-5)", "TopKAvg(5)", "top_k_avg(5) "],
)  # fmt: skip
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: brute_force, .*top_k_avg\(N\).*; sizes 1-1000000") as caught:
        parse_algorithm(text)
    assert repr(text) in str(caught.value)
