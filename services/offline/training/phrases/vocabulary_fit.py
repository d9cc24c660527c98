"""Fit a phrase vocabulary to texts: find candidates, then prune them to the wanted size (PIXAR, section 4.1)."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from services.algorithms.generation.vocabulary import FIXED_TOKENS, NUM_BYTE_TOKENS, PhraseVocabulary, ascii_pieces
from services.algorithms.generation.vocabulary_lattice import Lattice, Shown, Way
from services.algorithms.generation.vocabulary_segments import Integers
from services.algorithms.generation.vocabulary_text import Piece
from services.offline.training.phrases.vocabulary_candidates import Corpus, candidates

_TESTS = 3  # test vocabularies a round
_SHARE = 0.6  # share of the candidates in each test vocabulary
_KEPT = 0.8  # share of the candidates that a round keeps
_LAST_KEPT = 0.97  # near the goal all are tested together and few are pruned a round
_GOLDEN = 0.6180339887498949  # step between tests, so that their draws are uncorrelated


def pruned(
    lattice: Lattice,
    weights: Integers,
    pieces: Sequence[Piece],
    *,
    size: int,
    required: int,
) -> Shown:
    """Return the `size` pieces of the lattice to use (C,), always with the first `required` ones.

    `weights` (N,): the count of each position's text.
    """
    draws = _draws(pieces)
    lengths = np.array([len(text) for text, _ in pieces], dtype=np.int64)
    left = np.ones(len(pieces), dtype=bool)
    goal = max(size, required)
    remaining = len(pieces)
    rounds = 0
    while remaining > goal:
        near = remaining * _KEPT <= goal
        target = max(goal, int(remaining * (_LAST_KEPT if near else _KEPT)))
        if near:
            scores = (_uses(lattice, lattice.cheapest(left), weights) * lengths).astype(np.float64)
        else:
            scores = np.zeros(len(pieces))
            shown_often = np.zeros(len(pieces), dtype=np.int64)
            for test in range(rounds * _TESTS, (rounds + 1) * _TESTS):
                shown = left & ((draws + test * _GOLDEN) % 1.0 < _SHARE)
                shown[:required] = True
                scores += _uses(lattice, lattice.cheapest(shown), weights) * lengths
                shown_often += shown
            scores /= np.maximum(shown_often, 1)
            scores[shown_often == 0] = np.inf  # not tested in this round
        scores[:required] = np.inf
        rows = np.flatnonzero(left & np.isfinite(scores))
        # Of pieces with equal scores, the longer is pruned first, then the alphabetically later one.
        order = np.lexsort((-rows, -lengths[rows], scores[rows]))
        left[rows[order[: remaining - target]]] = False
        remaining = int(left.sum())
        rounds += 1
    return left


def _draws(pieces: Sequence[Piece]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) per piece, from its text and flag."""
    return np.array(
        [
            int.from_bytes(hashlib.blake2b(f"{flag:d}{text}".encode(), digest_size=6).digest(), "little") / 2.0**48
            for text, flag in pieces
        ]
    )


def _uses(lattice: Lattice, way: Way, weights: Integers) -> Integers:
    """Return how often each piece is used (C,), from `weights` (N,) of the positions."""
    num_pieces, num_forms = len(lattice.counts), len(way.costs)
    many, alone = np.flatnonzero(way.steps > 1), np.flatnonzero(way.steps == 1)
    # NumPy returns integers for an empty input, whatever the weights.
    used = np.bincount(way.phrases[many], weights=weights[many], minlength=num_pieces).astype(np.float64)
    of_form = np.bincount(lattice.form_of[alone], weights=weights[alone], minlength=num_forms)
    there = way.parts >= 0
    used += np.bincount(way.parts[there], weights=of_form[way.part_form[there]], minlength=num_pieces)
    return used.astype(np.int64)


def build_vocabulary(texts: Iterable[str], *, size: int, min_count: int) -> PhraseVocabulary:
    """Return a vocabulary of at most `size` tokens; fewer if the texts have fewer candidates.

    `min_count`: least count of a candidate (20 in the paper, for tens of millions of identifiers). The order of the
    texts has no effect.
    Raises: ValueError for a size below FIXED_TOKENS, a min_count below 1, or empty texts.
    Source: PIXAR section 4.1 after TokenMonster; it differs in drawing test vocabularies by hash.
    """
    if size < FIXED_TOKENS:
        raise ValueError(f"size={size}; allowed: at least {FIXED_TOKENS}, which every vocabulary has")
    if min_count < 1:
        raise ValueError(f"min_count={min_count}; allowed: at least 1")
    corpus = Corpus.of(texts)
    found = candidates(corpus, min_count=min_count)
    fixed = ascii_pieces()
    pieces = fixed + sorted(found.keys() - set(fixed))
    counts = [found.get(piece, 0) for piece in pieces]
    everything = PhraseVocabulary(pieces, counts)
    stays = pruned(
        everything.lattice(corpus.texts),
        corpus.word_weights,
        [("", False)] * NUM_BYTE_TOKENS + pieces,
        size=size,
        required=FIXED_TOKENS,
    )[NUM_BYTE_TOKENS:]
    rows = np.flatnonzero(stays).tolist()
    learnt = sorted(rows[len(fixed) :], key=lambda row: (-counts[row], pieces[row]))
    rows = rows[: len(fixed)] + learnt
    return PhraseVocabulary([pieces[row] for row in rows], [counts[row] for row in rows])
