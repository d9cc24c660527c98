"""Small tries, scores and a catalogue, and the best identifiers by trying every assignment."""

import itertools
from dataclasses import dataclass

import numpy as np

from services.algorithms.generation.generator import Generator, GeneratorSettings
from services.algorithms.generation.trie import IdentifierTrie


@dataclass(frozen=True)
class Scene:
    sequences: list[list[int]]
    num_tokens: int
    positions: int
    tokens: np.ndarray
    scores: np.ndarray

    def trie(self) -> IdentifierTrie:
        numbers = np.arange(len(self.sequences))
        return IdentifierTrie.build(self.sequences, numbers, max_tokens=self.positions, num_tokens=self.num_tokens)

    def by_trying_all(self, mode: str) -> dict[int, float]:
        """The score of every identifier whose tokens were scored."""
        place = {token: number for number, token in enumerate(self.tokens.tolist())}
        scores, padding = self.scores.astype(np.float64), self.scores[:, 0].astype(np.float64)
        found = {}
        for identifier, sequence in enumerate(self.sequences):
            if not all(token in place for token in sequence):
                continue
            ways = (
                [tuple(range(len(sequence)))]
                if mode == "fixed"
                else itertools.permutations(range(self.positions), len(sequence))
            )
            found[identifier] = max(
                sum(scores[position, place[token]] for position, token in zip(way, sequence, strict=True))
                + sum(padding[position] for position in range(self.positions) if position not in way)
                for way in ways
            )
        return found


def scene(seed: int, *, positions: int, num_tokens: int, count: int, share: float = 0.7, levels: int = 0) -> Scene:
    """Random identifiers of up to `positions` tokens; `levels` above 0: whole numbers as scores, many ties."""
    rng = np.random.default_rng(seed)
    sequences = [
        rng.integers(1, num_tokens, size=rng.integers(1, positions + 1)).tolist() if num_tokens > 1 else []
        for _ in range(count)
    ]
    tokens = np.append(0, np.flatnonzero(rng.random(num_tokens - 1) < share) + 1).astype(np.int32)
    scores = rng.normal(size=(positions, len(tokens))) * 5
    if levels:
        scores = rng.integers(0, levels, size=scores.shape)
    return Scene(sequences, num_tokens, positions, tokens, scores.astype(np.float32))


def small_generator(
    seed: int, *, count: int = 300, positions: int = 4, num_tokens: int = 200, width: int = 24
) -> Generator:
    """A generator over random weights; item i has identifier i, and every seventh identifier a second item."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(num_tokens, width)).astype(np.float32)
    centers = rng.normal(size=(16, width)).astype(np.float32)
    sets = np.argsort(-centers @ weights.T, axis=1)[:, :40].astype(np.int32)
    sequences = [rng.integers(1, num_tokens, size=rng.integers(1, positions + 1)).tolist() for _ in range(count)]
    rows = [[number, number + count] if number % 7 == 0 else [number] for number in range(count)]
    return Generator.build(
        weights,
        centers,
        sets,
        sequences,
        [" ".join(map(str, sequence)) for sequence in sequences],
        rows,
        max_tokens=positions,
        settings=GeneratorSettings(sets=3, beams=64),
    )
