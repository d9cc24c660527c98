"""The compiled row products and unions against NumPy's, in every build that this processor can run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import native_builds

from services.algorithms.ops.token_scores import ZERO, HalfRows, code_rows, code_vectors, token_scores, union


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 90),
    width=st.sampled_from([1, 7, 16, 63, 64, 65, 384, 1040]),
    num_vectors=st.integers(1, 17),
    count=st.sampled_from([None, 0, 1, 2, 33]),
    extreme=st.booleans(),
)
def test_native_products_are_numpys(
    seed: int, num_rows: int, width: int, num_vectors: int, count: int | None, extreme: bool
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(num_rows, width)).astype(np.float32)
    vectors = rng.normal(size=(num_vectors, width)).astype(np.float32)
    if extreme:  # the largest sums there are, and rows of nothing
        weights, vectors = np.sign(weights) * 3, np.sign(vectors)
        weights[0] = 0
    chosen = None if count is None else rng.integers(0, num_rows, size=count).astype(np.int32)
    coded, half = code_rows(weights), HalfRows(weights.astype(np.float16))
    which = slice(None) if chosen is None else chosen
    codes, steps = code_vectors(vectors)
    sums = codes.astype(np.float64) @ (coded.weights[which].astype(np.float64) - ZERO).T  # whole numbers: exact
    wanted = sums.astype(np.float32) * (steps[:, None] * coded.scales[which])
    wanted_half = vectors @ half.decoded(which).T
    for library in native_builds("token_scores").values():
        found = token_scores(coded, vectors, chosen, kernels=library)
        assert found.shape == (num_vectors, num_rows if chosen is None else len(chosen))
        assert found.tobytes() == wanted.tobytes()
        found = token_scores(half, vectors, chosen, kernels=library)
        np.testing.assert_allclose(found, wanted_half, atol=2e-6 * width * (1 + 3 * extreme) + 1e-6)


def test_int8_products_are_within_the_stated_rounding() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(500, 384)).astype(np.float32)
    vectors = rng.normal(size=(4, 384)).astype(np.float32)
    exact = vectors.astype(np.float64) @ weights.T.astype(np.float64)
    steps = np.abs(weights).max(axis=1) / 127
    own = np.abs(vectors).max(axis=1) / 127
    bound = np.abs(vectors).sum(axis=1)[:, None] * steps / 2 + np.abs(weights).sum(axis=1) * own[:, None] / 2
    bound += 384 * np.outer(own, steps) / 4 + 1e-3
    off = np.abs(token_scores(code_rows(weights), vectors, None) - exact)
    assert (off <= bound).all()
    assert np.sqrt((off**2).mean()) < 0.01 * np.sqrt((exact**2).mean())


@pytest.mark.parametrize("value", [0.0, 6e-8, 6.1e-5, 1.0, -2.5, 65504.0, -65504.0])
def test_every_build_reads_half_precision_subnormals_and_ends_of_the_range(value: float) -> None:
    half = HalfRows(np.full((3, 20), value, dtype=np.float16))
    vectors = np.eye(20, dtype=np.float32)[:2]
    for library in native_builds("token_scores").values():
        found = token_scores(half, vectors, None, kernels=library)
        assert (found == np.float32(np.float16(value))).all()


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.sampled_from([1, 2, 63, 64, 65, 1000, 100_000]),
    m=st.integers(1, 6),
    r=st.integers(1, 300),
    k=st.integers(0, 6),
)
def test_native_unions_are_numpys_and_leave_nothing_behind(seed: int, num_rows: int, m: int, r: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    sets = rng.integers(0, num_rows, size=(m, r)).astype(np.int32)
    for _ in range(2):
        chosen = rng.permutation(m)[:k]
        wanted = sorted({0, *sets[chosen].ravel().tolist()})
        for library in native_builds("token_scores").values():
            assert union(sets, chosen, num_rows, kernels=library).tolist() == wanted
