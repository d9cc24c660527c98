"""Find candidate tokens: frequent phrases of whole words, words, and parts of words in a set of texts.

The first stage of PIXAR's section 4.1 (TokenMonster): all substrings up to a length that respect word boundaries and
character classes and occur often enough. It counts one length at a time over sorted keys of (number of the shorter
substring, next symbol), and extends only frequent substrings. Memory: about 80 bytes per word of the distinct texts,
and per letter of the distinct words.

Letters: T distinct texts, N words (or letters) of all of them, C candidates.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.generation.vocabulary_segments import Integers
from services.algorithms.generation.vocabulary_text import (
    Cut,
    Piece,
    Words,
    cut,
    is_alphanumeric,
    is_whole,
    joined,
    normalised,
    spelled,
    word_ends,
)

MOST_WORDS = 12  # including marks: "what is (are)" has five
MOST_CHARACTERS = 64
LONGEST_PART = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Distinct normalised texts, sorted, so that nothing depends on the input's order. Shapes: weights (T,) each text's
    count; cut.symbols (N,) as in vocabulary_text.
    """

    texts: list[str]
    words: Words
    cut: Cut
    weights: Integers

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Corpus":
        """Return the corpus without texts that normalise to "". Raises: ValueError if none is left."""
        often: dict[str, int] = {}
        for text in texts:
            plain = normalised(text)
            if plain:
                often[plain] = often.get(plain, 0) + 1
        if not often:
            raise ValueError("texts has nothing in it; allowed: at least one text with a visible character")
        distinct = sorted(often)
        words = Words()
        return cls(
            texts=distinct,
            words=words,
            cut=cut(distinct, words),
            weights=np.array([often[text] for text in distinct], dtype=np.int64),
        )

    @property
    def word_weights(self) -> Integers:
        """Return the weight of each position's text (N,)."""
        return np.repeat(self.weights, np.diff(self.cut.starts))

    def forms(self) -> tuple[list[Piece], Integers]:
        """Return distinct words with their flags, and their counts."""
        symbols, form_of = np.unique(self.cut.symbols, return_inverse=True)
        forms = [(self.words.name(symbol >> 1), bool(symbol & 1)) for symbol in symbols.tolist()]
        often = np.bincount(form_of, weights=self.word_weights, minlength=len(forms)).astype(np.int64)
        return forms, often


def candidates(corpus: Corpus, *, min_count: int) -> dict[Piece, int]:
    """Return phrases, words and parts of words with at least `min_count` occurrences, with counts, sorted.

    Of phrases that differ only in plural, marks or spaces, the one with the largest count times length is returned.
    """
    forms, often = corpus.forms()
    found = _parts(forms, often, min_count)
    found.update(((text, False), count) for text, count in _distinct(_phrases(corpus, min_count)).items())
    return dict(sorted(found.items()))


def frequent(
    symbols: Integers,
    starts: Integers,
    weights: Integers,
    *,
    longest: int,
    min_count: int,
    allowed: Callable[[int, Integers], npt.NDArray[np.bool_]],
) -> Iterable[tuple[int, Integers, Integers]]:
    """For n = 1, 2, …: yield (n, positions, counts), one position for each sequence of n symbols with `min_count`
    occurrences at positions that are `allowed(n, positions)`. A longer sequence starts only where the shorter one is
    frequent, even if that is not allowed.

    Shapes: symbols, weights (N,).
    """
    room = np.repeat(starts[1:], np.diff(starts)) - np.arange(len(symbols))
    positions = np.arange(len(symbols))
    names = np.zeros(len(symbols), dtype=np.int64)
    distinct, new = np.unique(symbols, return_inverse=True)
    for length in range(1, longest + 1):
        fits = room[positions] >= length
        positions, names = positions[fits], names[fits]
        if not len(positions):
            return
        keys = names * len(distinct) + new[positions + length - 1]
        _, first, names = np.unique(keys, return_index=True, return_inverse=True)
        here = weights[positions]
        valid = allowed(length, positions)
        counts = np.bincount(names, weights=here * valid, minlength=len(first)).astype(np.int64)
        enough = np.flatnonzero(counts >= min_count)
        yield length, positions[first[enough]], counts[enough]
        going = np.bincount(names, weights=here, minlength=len(first))[names] >= min_count
        positions, names = positions[going], names[going]


def _phrases(corpus: Corpus, min_count: int) -> dict[str, int]:
    symbols, starts = corpus.cut.symbols, corpus.cut.starts
    plain = np.array([is_alphanumeric(corpus.words.name(row)[0]) for row in range(len(corpus.words))], dtype=bool)
    ends = word_ends(symbols, plain[symbols >> 1])
    usual = (symbols & 1) == 0

    def allowed(length: int, positions: Integers) -> npt.NDArray[np.bool_]:
        if length == 1:
            return np.zeros(len(positions), dtype=bool)
        whole: npt.NDArray[np.bool_] = usual[positions] & ends[positions + length - 1]
        return whole

    found: dict[str, int] = {}
    for length, positions, counts in frequent(
        symbols, starts, corpus.word_weights, longest=MOST_WORDS, min_count=min_count, allowed=allowed
    ):
        for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
            text = joined(
                (corpus.words.name(symbol >> 1), bool(symbol & 1))
                for symbol in symbols[position : position + length].tolist()
            )
            if len(text) <= MOST_CHARACTERS and any(map(is_alphanumeric, text)) and is_whole(text):
                found[text] = count
    return found


def _parts(forms: Sequence[Piece], often: Integers, min_count: int) -> dict[Piece, int]:
    """Return substrings of words, and whole words of any length; the flag marks those not at a word's beginning."""
    letters = spelled(forms)
    symbols, starts = letters.symbols, letters.starts
    found: dict[Piece, int] = {}
    for length, positions, counts in frequent(
        symbols,
        starts,
        np.repeat(often, np.diff(starts)),
        longest=LONGEST_PART,
        min_count=min_count,
        allowed=lambda length, positions: np.ones(len(positions), dtype=bool),
    ):
        for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
            codes = symbols[position : position + length].tolist()
            found["".join(chr(code >> 1) for code in codes), bool(codes[0] & 1)] = count
    for form, count in zip(forms, often.tolist(), strict=True):
        if count >= min_count:
            found.setdefault(form, count)
    return found


_WORD_IN_PHRASE = re.compile(r"\w+")


def _distinct(phrases: dict[str, int]) -> dict[str, int]:
    best: dict[str, tuple[int, str]] = {}
    for text in sorted(phrases):
        key = " ".join(map(_singular, _WORD_IN_PHRASE.findall(text)))
        value = phrases[text] * len(text)
        if key not in best or value > best[key][0]:
            best[key] = (value, text)
    return {text: phrases[text] for _, text in best.values()}


def _singular(word: str) -> str:
    """Remove the -s of a plural or a genitive ("diabetes" always loses its -s, too)."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
