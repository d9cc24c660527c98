"""Grouped top-N against its reference: for every instruction set that this processor has.

Vectors hold small whole numbers, so that every order of summation gives the same score and ties abound.
"""

import ctypes
import re

import numpy as np
import pytest
import torch
from grouped_top_k_reference import grouped_top_k_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import native_builds

from services.algorithms.native.threads import compute_threads, set_compute_threads
from services.algorithms.ops import grouped_top_k
from services.algorithms.ops.grouped_top_k import GroupedBest, GroupedTopK, Storage

_BUILDS = native_builds("grouped_top_k")
every_build = pytest.mark.parametrize("library", _BUILDS.values(), ids=_BUILDS)


def check(found: GroupedBest, queries: np.ndarray, items: np.ndarray, size: int, allowed: np.ndarray) -> None:
    rows, scores, following = grouped_top_k_reference(
        torch.from_numpy(queries), torch.from_numpy(items), size, torch.from_numpy(allowed)
    )
    np.testing.assert_array_equal(found.rows, rows.numpy())
    np.testing.assert_array_equal(found.scores, scores.numpy())
    np.testing.assert_array_equal(found.following, following.numpy())


def whole(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-3, 4, size=shape).astype(np.float32)


@every_build
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 300), st.integers(1, 4), st.integers(1, 19)),
    size=st.integers(1, 400),
    storage=st.sampled_from(["rows", "float32", "bfloat16"]),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    per_query=st.booleans(),
)
def test_every_path_equals_the_reference_ties_included(
    library: ctypes.CDLL,
    seed: int,
    shape: tuple[int, ...],
    size: int,
    storage: Storage,
    share: float,
    per_query: bool,
) -> None:
    num_queries, vectors, count, groups, width = shape
    rng = np.random.default_rng(seed)
    items, queries = whole(rng, count, groups, width), whole(rng, num_queries, vectors, width)
    mask = rng.random((num_queries, count) if per_query else count) < share
    index = GroupedTopK(items, storage=storage)
    found = index.search(queries, size, mask, kernels=library)
    check(found, queries, items, size, np.broadcast_to(mask, (num_queries, count)).copy())


@every_build
@pytest.mark.parametrize(
    "order", ["random", "rising", "falling", "the sample holds the best", "the sample holds the worst"]
)
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_large_catalogue_in_any_order_has_the_same_best(library: ctypes.CDLL, order: str, share: float) -> None:
    # Above 65,536 items the native scan starts at thresholds guessed from every 64th panel of 64.
    rng = np.random.default_rng(1)
    count = 70_000
    values = rng.permutation(count) // 3
    if order in ("rising", "falling"):
        values = np.sort(values)[:: 1 if order == "rising" else -1]
    sampled = np.arange(count) // 64 % 64 == 0
    if order == "the sample holds the best":
        values = np.where(sampled, 5, rng.integers(0, 5, count))
    if order == "the sample holds the worst":
        values = np.where(sampled, 0, values)
    items = np.stack([values, np.ones(count)], axis=1).astype(np.float32)[:, None, :]
    queries = np.array([[[1, 0], [-1, 7]], [[0, 0], [2, -5]]], dtype=np.float32)
    allowed = rng.random(count) < share
    found = GroupedTopK(items).search(queries, 2000, allowed, kernels=library)
    check(found, queries, items, 2000, np.broadcast_to(allowed, (2, count)).copy())


@every_build
def test_real_numbers_stay_within_float32_of_the_reference(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(2)
    items, queries = rng.normal(size=(5000, 3, 33)).astype(np.float32), rng.normal(size=(7, 5, 33)).astype(np.float32)
    found = GroupedTopK(items).search(queries, 50, kernels=library)
    exact = np.einsum("bqd,xsd->bqsx", queries.astype(float), items.astype(float))
    wanted = np.sort(exact, axis=-1)[..., ::-1]
    assert np.abs(found.scores - wanted[..., :50]).max() < 1e-4
    assert np.abs(found.following - wanted[..., 50]).max() < 1e-4
    assert np.abs(found.scores - np.take_along_axis(exact, found.rows, axis=-1)).max() < 1e-4


@every_build
def test_an_item_has_the_same_score_wherever_it_lies(library: ctypes.CDLL) -> None:
    # Order by id among equal items rests on it: equal bits in a full panel and at the ragged end.
    rng = np.random.default_rng(3)
    items = np.repeat(rng.normal(size=(1, 1, 77)).astype(np.float32), 131, axis=0)
    queries = rng.normal(size=(9, 3, 77)).astype(np.float32)
    found = GroupedTopK(items).search(queries, 131, kernels=library)
    assert (found.scores == found.scores[..., :1]).all()
    assert (found.rows == np.arange(131)).all()


def test_the_answer_does_not_depend_on_threads_or_on_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    items, queries = rng.normal(size=(20_000, 2, 16)).astype(np.float32), rng.normal(size=(6, 4, 16)).astype(np.float32)
    allowed, index = rng.random((6, 20_000)) < 0.5, GroupedTopK(items)
    before = compute_threads()
    answers = []
    try:
        for threads in (1, 2, 5):
            set_compute_threads(threads)
            answers.append(index.search(queries, 300, allowed))
    finally:
        set_compute_threads(before)
    monkeypatch.setattr(grouped_top_k, "_BUFFER_BYTES", 1)
    answers.append(index.search(queries, 300, allowed))
    for found in answers[1:]:
        np.testing.assert_array_equal(found.rows, answers[0].rows)
        np.testing.assert_array_equal(found.scores, answers[0].scores)


def test_rounded_storage_scores_the_rounded_vectors_with_half_the_bytes() -> None:
    rng = np.random.default_rng(5)
    items, queries = rng.normal(size=(200, 1, 8)).astype(np.float32), rng.normal(size=(2, 1, 8)).astype(np.float32)
    index = GroupedTopK(items, storage="bfloat16")
    rounded = torch.from_numpy(items).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(index.vectors_of(np.arange(200)), rounded)
    np.testing.assert_array_equal(GroupedTopK(items, storage="float32").vectors_of(np.arange(200)), items)
    np.testing.assert_array_equal(GroupedTopK(items).vectors_of(np.array([[3, 5], [7, 7]])), items[[[3, 5], [7, 7]]])
    found = index.search(queries, 5)
    exact = GroupedTopK(np.ascontiguousarray(rounded)).search(queries, 5)
    np.testing.assert_array_equal(found.rows, exact.rows)
    assert index.nbytes == 256 * 8 * 2
    assert GroupedTopK(items).nbytes == 0


@pytest.mark.parametrize("shape", [(0, 1, 3), (5, 3)])
def test_items_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"items has shape {shape}")):
        GroupedTopK(np.ones(shape, dtype=np.float32))
