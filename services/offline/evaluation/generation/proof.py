"""Check that generated identifiers are in the catalogue, between random inserts and deletes.

A plain dictionary has the present catalogue; each answer's text and items must equal its entry. For every twentieth
query, scores must also equal the best assignment of the phrases.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from services.algorithms.generation.generator import Generator, GeneratorSettings

Floats = npt.NDArray[np.float32]
Catalogue = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]  # identifier -> phrases, item rows

POSITIONS, WIDTH = 6, 32
_NUM_TOKENS, _IDENTIFIERS, _VECTORS, _SET_TOKENS = 5000, 20_000, 64, 200
_CHANGE_EVERY, _SCORE_EVERY = 50, 20


@dataclass(slots=True)
class Proof:
    """Counts of queries, answers, changes and errors. The proof `holds` with at least one answer and no error."""

    queries: int = 0
    answers: int = 0
    inserts: int = 0
    deletes: int = 0
    outside_the_catalogue: int = 0
    not_allowed: int = 0
    wrong_scores: int = 0
    unseen_inserts: int = 0
    seen_after_delete: int = 0

    @property
    def holds(self) -> bool:
        wrong = (self.outside_the_catalogue, self.not_allowed, self.wrong_scores)
        return self.answers > 0 and not any((*wrong, self.unseen_inserts, self.seen_after_delete))

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


def prove_catalogue(*, num_queries: int, seed: int, say: Callable[[str], None] = lambda line: None) -> Proof:
    """Check `num_queries` queries. Even ones are Gaussian, in permutation mode; odd ones are adversarial, in fixed
    mode.

    A third of the queries is filtered.
    """
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(_NUM_TOKENS, WIDTH)).astype(np.float32)
    centers = rng.normal(size=(_VECTORS, WIDTH)).astype(np.float32)
    sets = np.argsort(-centers @ weights.T, axis=1)[:, :_SET_TOKENS].astype(np.int32)
    lengths = rng.integers(1, 5, size=_IDENTIFIERS)
    sequences = [_sequence(rng, sets, int(length)) for length in lengths]
    catalogue: Catalogue = {number: (tuple(tokens), (number,)) for number, tokens in enumerate(sequences)}
    texts = [_text(number, tokens) for number, tokens in enumerate(sequences)]
    generators = [
        Generator.build(
            weights, centers, sets, sequences, texts, [[number] for number in range(_IDENTIFIERS)],
            max_tokens=POSITIONS, settings=GeneratorSettings(sets=3, beams=32, mode=mode),
        )
        for mode in ("permutation", "fixed")
    ]  # fmt: skip
    proof = Proof()
    for number in range(num_queries):
        if number % 5000 == 0:
            say(f"answers in the catalogue: {number:,} of {num_queries:,} queries")
        generator = generators[number % 2]
        x = query(rng, number)
        allowed = rng.random(_IDENTIFIERS + num_queries) < rng.choice([0.001, 0.3]) if number % 3 == 0 else None
        found = generator.generate(x, 10, allowed)
        proof.queries += 1
        proof.answers += len(found.answers)
        for answer in found.answers:
            tokens, items = catalogue.get(answer.identifier, ((), ()))
            rows = tuple(answer.item_rows.tolist())
            if not tokens or answer.text != _text(answer.identifier, tokens) or rows != items:
                proof.outside_the_catalogue += 1
            elif allowed is not None and not allowed[list(rows)].all():
                proof.not_allowed += 1
            elif number % _SCORE_EVERY == 0:
                proof.wrong_scores += not _scored_right(generator, x, tokens, answer.score)
        if number % _CHANGE_EVERY == 0:
            _change(rng, proof, generators, catalogue, sets)
    return proof


def query(rng: np.random.Generator, number: int) -> Floats:
    """Return x (1 + s, D): Gaussian for even numbers, else as from a broken or hostile encoder."""
    x = rng.normal(size=(1 + POSITIONS, WIDTH)).astype(np.float32)
    if number % 2 == 0:
        return x
    broken: list[Callable[[], Any]] = [
        lambda: np.zeros_like(x),
        lambda: np.tile(x[0], (len(x), 1)),
        lambda: x * np.float32(10.0) ** rng.integers(-30, 15),
        lambda: np.eye(len(x), x.shape[1], k=int(rng.integers(0, 9)), dtype=np.float32) * 50,
        lambda: -np.abs(x) * 100,
        lambda: np.where(rng.random(x.shape) < 0.02, np.float32(1e6), np.float32(0)),
        lambda: np.sign(x),
    ]
    return np.asarray(broken[number // 2 % len(broken)](), dtype=np.float32)


def _sequence(rng: np.random.Generator, sets: npt.NDArray[np.int32], length: int) -> list[int]:
    """Draw phrases of one shortlist, so that most identifiers can be reached."""
    return [max(1, int(token)) for token in rng.choice(sets[rng.integers(0, len(sets))], size=length)]


def _text(identifier: int, tokens: tuple[int, ...] | list[int]) -> str:
    return f"{identifier}: {' '.join(map(str, tokens))}"


def _scored_right(generator: Generator, x: Floats, tokens: tuple[int, ...], score: float) -> bool:
    scores = generator.output_layer.scores(x[1:], np.array((0, *tokens)))
    if generator.settings.mode == "fixed":
        kept = np.arange(len(tokens))
        expected = float(scores[kept, kept + 1].sum(dtype=np.float64) + scores[len(tokens) :, 0].sum(dtype=np.float64))
    else:
        expected = assignment_score(scores[:, 1:].T, scores[:, 0])
    return abs(score - expected) <= 1e-5 * (1 + POSITIONS * float(np.abs(scores).max()))


def _change(
    rng: np.random.Generator,
    proof: Proof,
    generators: list[Generator],
    catalogue: Catalogue,
    sets: npt.NDArray[np.int32],
) -> None:
    """Insert an identifier with the phrases of a query's best answer, which the query must find.

    Then delete that best answer, or without one the inserted identifier: the query must not find it.
    """
    number = len(generators[0].identifiers)
    x = rng.normal(size=(1 + POSITIONS, WIDTH)).astype(np.float32)
    best = generators[0].generate(x, 1).answers
    tokens = catalogue[best[0].identifier][0] if best else (1,)
    for generator in generators:
        generator.insert(_text(number, tokens), tokens, [number])
    catalogue[number] = (tokens, (number,))
    proof.inserts += 1
    if best:
        # The inserted identifier scores as high as the best answer. Others with the same phrases may rank before it.
        seen = {answer.identifier for answer in generators[0].generate(x, 200).answers}
        proof.unseen_inserts += number not in seen
    gone = best[0].identifier if best else number
    del catalogue[gone]
    for generator in generators:
        generator.delete(gone)
    proof.deletes += 1
    seen = {answer.identifier for answer in generators[0].generate(x, 200).answers}
    proof.seen_after_delete += gone in seen


def assignment_score(scores: npt.NDArray[np.float32], padding: npt.NDArray[np.float32]) -> float:
    """Return the score of the best assignment of n tokens to s positions. Shapes: scores (n, s), padding (s,)."""
    gains = scores.astype(np.float64) - padding
    return float(gains[linear_sum_assignment(gains, maximize=True)].sum() + padding.sum(dtype=np.float64))
