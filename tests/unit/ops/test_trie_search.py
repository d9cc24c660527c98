"""The compiled trie search against NumPy's, bit for bit, in every build that this processor can run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import native_builds
from trie_search_in_numpy import search_in_numpy

from services.algorithms.ops.trie_search import ItemRows, TrieArrays, laid_end_to_end, search_trie


def part(sequences: list[list[int]], first: int) -> TrieArrays:
    tokens, offsets = laid_end_to_end(sequences)
    return TrieArrays.build(tokens, offsets, np.arange(first, first + len(sequences), dtype=np.int32))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    positions=st.integers(1, 9),
    num_tokens=st.sampled_from([2, 9, 70, 3000]),
    count=st.sampled_from([0, 1, 40, 2000]),
    beams=st.sampled_from([1, 2, 7, 5000]),
    results=st.sampled_from([1, 5, 100, 3000]),
    share=st.sampled_from([0.02, 0.5, 1.0]),
    levels=st.sampled_from([0, 1, 4]),
    in_order=st.booleans(),
    filtered=st.sampled_from([None, 0.0, 0.02, 0.7]),
)
def test_native_and_numpy_agree_to_the_bit(
    seed: int,
    positions: int,
    num_tokens: int,
    count: int,
    beams: int,
    results: int,
    share: float,
    levels: int,
    in_order: bool,
    filtered: float | None,
) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(1, num_tokens, size=rng.integers(1, positions + 1)).tolist() for _ in range(count)]
    cut = int(rng.integers(0, count + 1))
    parts = (part(sequences[:cut], 0), part(sequences[cut:], cut))
    tokens = np.append(0, np.flatnonzero(rng.random(num_tokens - 1) < share) + 1).astype(np.int32)
    gains = rng.normal(size=(len(tokens), positions)) * 6
    if levels:
        gains = rng.integers(-levels, levels + 1, size=gains.shape)
    gains[0] = 0
    deleted = rng.random(count) < 0.2
    items, allowed = None, None
    if filtered is not None:
        known, lengths = int(rng.integers(0, count + 1)), rng.integers(1, 4, size=count)
        rows = rng.integers(0, 50, size=lengths.sum()).astype(np.int32)
        offsets = np.append(0, np.cumsum(lengths))
        items = ItemRows(
            rows[: offsets[known]],
            offsets[: known + 1],
            rows[offsets[known] :],
            offsets[known:] - offsets[known],
        )
        allowed = rng.random(45) < filtered  # rows beyond it are newer than the filter
    question = (parts, deleted, tokens, gains.astype(np.float32))
    how = {"beams": beams, "results": results, "in_order": in_order, "items": items, "allowed": allowed}
    wanted = search_in_numpy(*question, **how)
    assert not deleted[wanted.identifiers].any()
    if items is not None and allowed is not None:
        assert all(allowed[of[of < 45]].any() for of in map(items.of, wanted.identifiers.tolist()))
    for library in native_builds("trie_search").values():
        found = search_trie(*question, **how, kernels=library)
        assert found.identifiers.tolist() == wanted.identifiers.tolist()
        assert found.gains.tobytes() == wanted.gains.tobytes()
        assert found.bound == wanted.bound


def test_a_million_identifiers_on_one_node_cost_the_results_alone() -> None:
    count = 1_000_000
    offsets = np.arange(count + 1, dtype=np.int64)
    trie = TrieArrays.build(np.ones(count, dtype=np.int32), offsets, np.arange(count, dtype=np.int32))
    assert trie.num_nodes == 2
    tokens, gains = np.array([0, 1], dtype=np.int32), np.array([[0.0], [2.5]], dtype=np.float32)
    deleted = np.zeros(count, dtype=bool)
    deleted[[0, 3]] = True
    found = search_trie((trie,), deleted, tokens, gains, beams=8, results=5)
    assert found.identifiers.tolist() == [1, 2, 4, 5, 6]
    assert found.gains.tolist() == [2.5] * 5


def test_identifiers_that_the_items_do_not_reach_yet_are_left_out_under_a_filter() -> None:
    items = ItemRows(
        np.array([0], dtype=np.int32), np.array([0, 1]), np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64)
    )
    question = ((part([[1], [1]], 0),), np.zeros(2, bool), np.array([0, 1], np.int32), np.zeros((2, 1), np.float32))
    how = {"beams": 8, "results": 5, "items": items, "allowed": np.ones(1, bool)}
    assert search_trie(*question, **how).identifiers.tolist() == [0]
    assert search_in_numpy(*question, **how).identifiers.tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"children": np.array([1, 2, 4], dtype=np.int32)}, "children does not run from the first entry to the last"),
        ({"children": np.array([1, 2], dtype=np.int32)}, r"children has shape \(2,\); 2 nodes need \(3,\)"),
        ({"children": np.array([1, 0, 2], dtype=np.int32)}, "children decreases"),
        ({"children": np.array([1, 1, 2], dtype=np.int32)}, "children lie at or before their node"),
        ({"ends": np.array([0, 3, 1], dtype=np.int32)}, "ends decreases"),
        ({"ends": np.array([0, 0, 2], dtype=np.int32)}, "ends does not run"),
    ],
)
def test_boundaries_that_would_lead_a_walk_astray_are_refused(changes: dict, message: str) -> None:
    whole = part([[1]], 0)
    arrays = {name: getattr(whole, name) for name in ("tokens", "children", "ends", "identifiers")}
    with pytest.raises(ValueError, match=message):
        TrieArrays(**{**arrays, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gains": np.zeros((3, 13), np.float32)}, r"gains have shape \(3, 13\); allowed: \(3, 1 to 12\)"),
        ({"gains": np.zeros((2, 4), np.float32)}, r"gains have shape \(2, 4\); allowed: \(3, 1 to 12\)"),
        ({"beams": 0}, "beams=0 allowed: at least 1"),
        ({"results": 0}, "results=0 allowed: at least 1"),
    ],
)
def test_wrong_questions_are_refused(changes: dict, message: str) -> None:
    question = {"gains": np.zeros((3, 4), np.float32), "beams": 1, "results": 1, **changes}
    with pytest.raises(ValueError, match=message):
        search_trie((part([[1]], 0),), np.zeros(1, bool), np.arange(3, dtype=np.int32), **question)
