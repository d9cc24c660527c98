"""SVD-softmax takes the tokens that scoring everything would take."""

import numpy as np
import pytest

from services.algorithms.generation.output_layer import OutputLayer
from services.offline.evaluation.generation.svd_softmax import SvdSoftmax, best_of_each

NUM_TOKENS, WIDTH, POSITIONS = 500, 32, 3


def setting() -> tuple[OutputLayer, np.ndarray]:
    rng = np.random.default_rng(0)
    spectrum = np.exp(-np.arange(WIDTH) / 6)
    weights = rng.normal(size=(NUM_TOKENS, WIDTH)) * spectrum
    x = rng.normal(size=(1 + POSITIONS, WIDTH)) * spectrum
    return OutputLayer.from_weights(weights.astype(np.float32)), x.astype(np.float32)


def best(layer: OutputLayer, x: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-layer.scores(x[1:]), axis=1)[:, :count]


def test_with_room_to_spare_the_best_tokens_are_there_with_padding() -> None:
    layer, x = setting()
    tokens = SvdSoftmax(layer, window=WIDTH, taken=60).tokens(x)
    assert tokens.dtype == np.int32
    assert tokens[0] == 0
    assert (np.diff(tokens) > 0).all()
    assert np.isin(best(layer, x, 20), tokens).all()


def test_a_narrow_window_still_finds_most_and_takes_few() -> None:
    layer, x = setting()
    tokens = SvdSoftmax(layer, window=12, taken=60).tokens(x)
    assert len(tokens) <= POSITIONS * 60 + 1
    assert np.isin(best(layer, x, 10), tokens).mean() > 0.9
    with pytest.raises(ValueError, match="window=33 allowed: 1 to 32"):
        SvdSoftmax(layer, window=33, taken=60)


def test_thresholds_from_a_sample_take_about_as_many_as_asked_for() -> None:
    scores = np.random.default_rng(0).normal(size=(200_000, 2)).astype(np.float32).T
    tokens = best_of_each(scores, 2000)
    assert 2500 < len(tokens) < 6000
    assert np.isin(np.argsort(-scores, axis=1)[:, :500], tokens).all()
