"""The compiled trie search, in every build that this processor can run, against assignments solved one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import native_builds
from scipy.optimize import linear_sum_assignment

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
def test_every_build_finds_the_best_assignments_and_bounds_what_beams_miss(
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
    # Multiples of 1/64, so that sums are exact in any order.
    gains = np.rint(rng.normal(size=(len(tokens), positions)) * 6 * 64) / 64
    if levels:
        gains = rng.integers(-levels, levels + 1, size=gains.shape).astype(float)
    gains[0] = 0
    deleted = rng.random(count) < 0.2
    items, allowed = None, None
    left = set(np.flatnonzero(~deleted).tolist())
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
        passes = np.append(allowed, np.zeros(5, dtype=bool))
        left = {one for one in left if passes[rows[offsets[one] : offsets[one + 1]]].any()}
    wanted = {one: gain for one in left if (gain := best_gain(sequences[one], tokens, gains, in_order)) is not None}
    best = sorted(wanted, key=lambda one: (-wanted[one], one))
    answers = [
        search_trie(
            parts, deleted, tokens, gains.astype(np.float32), beams=beams, results=results, in_order=in_order,
            items=items, allowed=allowed, kernels=library,
        )
        for library in native_builds("trie_search").values()
    ]  # fmt: skip
    for found in answers:
        assert found.identifiers.tolist() == answers[0].identifiers.tolist()
        assert (found.gains.tobytes(), found.bound) == (answers[0].gains.tobytes(), answers[0].bound)
    identifiers = answers[0].identifiers.tolist()
    assert identifiers == sorted(set(identifiers), key=lambda one: (-wanted[one], one))
    assert answers[0].gains.tolist() == [wanted[one] for one in identifiers]
    is_full = count > 0 and len(identifiers) == min(results, count)
    worst = wanted[identifiers[-1]] if is_full else -np.inf
    assert all(wanted[one] <= max(worst, answers[0].bound) for one in wanted.keys() - set(identifiers))
    if beams > count:
        assert identifiers == best[:results]
        assert answers[0].bound == -np.inf


def best_gain(sequence: list[int], tokens: np.ndarray, gains: np.ndarray, in_order: bool) -> float | None:
    """The definition: the best positions of the tokens, each at another; None if a token has no gains."""
    rows = np.searchsorted(tokens, sequence)
    if (rows == len(tokens)).any() or (tokens[rows] != sequence).any():
        return None
    of_tokens = gains[rows]
    places = (np.arange(len(rows)),) * 2 if in_order else linear_sum_assignment(of_tokens, maximize=True)
    return float(of_tokens[places].sum())


def test_beams_go_to_the_largest_bounds_and_each_part_has_its_own() -> None:
    tokens = np.arange(5, dtype=np.int32)
    gains = np.zeros((5, 2), dtype=np.float32)
    gains[1:] = [[2, 0], [3, 0], [0, 1], [0, 4]]
    alone, last = part([[1, 4], [2, 3]], 0), part([[1, 3]], 2)
    for library in native_builds("trie_search").values():
        found = search_trie((alone,), np.zeros(2, bool), tokens, gains, beams=1, results=2, kernels=library)
        # Node 2 has the larger bound, so identifier 0, of 2 + 4, is missed; its node's bound says so.
        assert (found.identifiers.tolist(), found.gains.tolist(), found.bound) == ([1], [4], 6)
        found = search_trie((alone, last), np.zeros(3, bool), tokens, gains, beams=1, results=3, kernels=library)
        assert found.identifiers.tolist() == [1, 2]


def test_a_million_identifiers_on_one_node_cost_the_results_alone() -> None:
    count = 1_000_000
    offsets = np.arange(count + 1, dtype=np.int64)
    trie = TrieArrays.build(np.ones(count, dtype=np.int32), offsets, np.arange(count, dtype=np.int32))
    assert len(trie.tokens) == 2
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
