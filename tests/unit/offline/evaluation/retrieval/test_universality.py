"""Theorem 1's constructions: the one that always works, and the printed one that does not."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.offline.evaluation.retrieval.universality import draw, mix, mixture_of_constants, mixture_of_scales


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 20),
    m=st.integers(1, 20),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
    sparse=st.booleans(),
)
def test_two_constants_of_rank_1_make_any_matrix(seed: int, n: int, m: int, scale: float, sparse: bool) -> None:
    rng = np.random.default_rng(seed)
    scores = scale * rng.normal(size=(n, m)) * (rng.random((n, m)) < 0.2 if sparse else 1)
    gates, logits = mixture_of_constants(scores)
    assert ((gates >= 0) & (gates <= 1)).all()
    assert np.abs(gates.sum(axis=0) - 1).max() < 1e-15
    assert [np.linalg.matrix_rank(part / max(scale, 1e-300)) for part in logits] == [1, 1]
    assert np.abs(mix(gates, logits) - scores).max() <= 1e-15 * np.abs(scores).max()


def test_the_printed_construction_leaves_the_identity_out() -> None:
    identity = np.eye(5)
    gates, logits = mixture_of_scales(identity, 1, epsilon=1e-9)
    assert ((gates >= 0) & (gates <= 1)).all()
    # It promises an error below epsilon and is off by a whole entry, on four of five of them.
    assert np.abs(mix(gates, logits) - identity).max() == pytest.approx(1)
    assert np.trace(mix(gates, logits)) == pytest.approx(1)
    assert np.abs(mix(*mixture_of_constants(identity)) - identity).max() == 0


def test_the_printed_construction_works_where_no_denominator_is_zero() -> None:
    scores = np.random.default_rng(1).normal(size=(6, 9))
    for rank in (1, 3, 6):
        gates, logits = mixture_of_scales(scores, rank)
        assert [np.linalg.matrix_rank(part) <= rank for part in logits] == [True, True]
        assert np.abs(mix(gates, logits) - scores).max() < 1e-9


@pytest.mark.parametrize(
    ("scores", "rank", "message"),
    [
        (np.ones(3), 1, r"scores has shape \(3,\)"),
        (np.ones((0, 3)), 1, r"scores has shape \(0, 3\)"),
        (np.array([[1.0, np.nan]]), 1, "NaN or infinite"),
        (np.ones((2, 3)), 3, r"rank=3 allowed: 1 to min\(n, m\) = 2"),
        (np.ones((2, 3)), 0, "rank=0 allowed"),
    ],
)
def test_what_is_no_matrix_or_no_rank_is_refused_by_name(scores: np.ndarray, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture_of_scales(scores, rank)


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "figure.png", size=6)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
