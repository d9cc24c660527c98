"""The shortlist's competitors take the tokens that scoring everything would take."""

import numpy as np
import pytest

from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.generation.shortlist import Shortlist
from services.offline.evaluation.generation.softmax_baselines import (
    Clustered,
    LowRank,
    ShortlistTokens,
    TokenSource,
    WholeVocabulary,
    best_of_each,
)

NUM_TOKENS, WIDTH, POSITIONS = 500, 32, 3


def setting() -> tuple[OutputLayer, np.ndarray]:
    rng = np.random.default_rng(0)
    spectrum = np.exp(-np.arange(WIDTH) / 6)
    weights = rng.normal(size=(NUM_TOKENS, WIDTH)) * spectrum
    x = rng.normal(size=(1 + POSITIONS, WIDTH)) * spectrum
    return OutputLayer.from_weights(weights.astype(np.float32)), x.astype(np.float32)


def best(layer: OutputLayer, x: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-layer.scores(x[1:]), axis=1)[:, :count]


def sources(layer: OutputLayer) -> dict[str, TokenSource]:
    weights = layer.decoded(slice(None))
    centres = weights[:10].copy()
    owners = np.argmin(((weights[:, None] - centres) ** 2).sum(axis=2), axis=1)
    everything = np.tile(np.arange(NUM_TOKENS, dtype=np.int32), (1, 1))
    return {
        "whole": WholeVocabulary(layer),
        "shortlist": ShortlistTokens(Shortlist(centres[:1], everything, num_tokens=NUM_TOKENS), 1),
        "low rank": LowRank(layer, window=WIDTH, taken=60),
        "clustered": Clustered(layer, centres, owners, probes=10),
    }


@pytest.mark.parametrize("name", ["whole", "shortlist", "low rank", "clustered"])
def test_with_room_to_spare_the_best_tokens_are_there_with_padding(name: str) -> None:
    layer, x = setting()
    tokens = sources(layer)[name].tokens(x)
    assert tokens.dtype == np.int32
    assert tokens[0] == 0
    assert (np.diff(tokens) > 0).all()
    assert np.isin(best(layer, x, 20), tokens).all()


def test_a_narrow_window_still_finds_most_and_takes_few() -> None:
    layer, x = setting()
    tokens = LowRank(layer, window=12, taken=60).tokens(x)
    assert len(tokens) <= POSITIONS * 60 + 1
    assert np.isin(best(layer, x, 10), tokens).mean() > 0.9
    with pytest.raises(ValueError, match="window=33 allowed: 1 to 32"):
        LowRank(layer, window=33, taken=60)


def test_thresholds_from_a_sample_take_about_as_many_as_asked_for() -> None:
    scores = np.random.default_rng(0).normal(size=(200_000, 2)).astype(np.float32).T
    tokens = best_of_each(scores, 2000)
    assert 2500 < len(tokens) < 6000
    assert np.isin(np.argsort(-scores, axis=1)[:, :500], tokens).all()
