"""The phrase vocabulary: an identifier's text as the fewest phrases of a fixed list (PIXAR, section 4.1).

A token is a phrase of whole words, a word, a piece of a word or a character; bytes encode other characters. A flag
marks unusual spacing before a token, like "##" in word pieces (`vocabulary_text.py`).
offline/training/phrases/vocabulary_fit chooses the tokens.

Letters: V tokens, T texts.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_manifest import errors_of
from services.algorithms.generation.vocabulary_lattice import Lattice, Way
from services.algorithms.generation.vocabulary_segments import Integers, Matches, PieceTrie
from services.algorithms.generation.vocabulary_text import (
    Piece,
    Words,
    cut,
    is_alphanumeric,
    normalised,
    spelled,
    word_ends,
)
from services.algorithms.ops.trie_search import laid_end_to_end

_LEADS = range(0xC2, 0xF5)  # lead bytes of non-ASCII characters in UTF-8; _FOLLOWERS: continuation bytes
_FOLLOWERS = range(0x80, 0xC0)
_LEAD, _UNUSUAL_LEAD = 1, 1 + len(_LEADS)  # after [PAD]
_FOLLOWER = _UNUSUAL_LEAD + len(_LEADS)
NUM_BYTE_TOKENS = _FOLLOWER + len(_FOLLOWERS)  # including [PAD]
ASCII = tuple(chr(code) for code in range(33, 127) if not chr(code).isupper())
# Every vocabulary has [PAD], bytes, and the ASCII characters without and with the flag.
FIXED_TOKENS = NUM_BYTE_TOKENS + 2 * len(ASCII)

_CHARACTERS = 2 * 0x110000  # symbols of the trie of pieces: 2 * code point + flag
_TEXTS_AT_ONCE = 1 << 16


class PhraseVocabulary:
    """V tokens: [PAD], bytes, then `pieces` in order, with `counts` (V,), 0 for [PAD] and bytes. Immutable."""

    def __init__(self, pieces: Sequence[Piece], counts: Sequence[int]) -> None:
        """pieces: normalised texts with flags, `ascii_pieces()` first. counts: occurrences of each piece in the fitted
        texts, which decide between equally short encodings.

        Raises: ValueError for other first pieces, and if a piece repeats, is not normalised, or has a flag and several
        words.
        """
        if list(pieces[: 2 * len(ASCII)]) != ascii_pieces():
            raise ValueError(f"pieces begin with {pieces[:3]!r}; allowed: the characters of ASCII, as ascii_pieces()")
        if len(counts) != len(pieces):
            raise ValueError(f"counts has {len(counts)} entries; allowed: one for each of the {len(pieces)} pieces")
        if len(set(pieces)) != len(pieces):
            raise ValueError(f"pieces has {len(pieces) - len(set(pieces))} entries twice; allowed: each once")
        self.pieces = list(pieces)
        self.counts = np.concatenate([np.zeros(NUM_BYTE_TOKENS, dtype=np.int64), np.array(counts, dtype=np.int64)])
        self._words = Words()
        self._cut = cut((text for text, _ in pieces), self._words)
        num_words = np.diff(self._cut.starts).tolist()
        for (text, unusual), count in zip(pieces, num_words, strict=True):
            if not text or normalised(text) != text or (unusual and count > 1):
                raise ValueError(f"piece={(text, unusual)!r}; allowed: normalised text, a flag for one word at most")

    def __len__(self) -> int:
        return NUM_BYTE_TOKENS + len(self.pieces)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._body()).hexdigest()

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The fewest tokens that restore each normalised text; [] if the normalised text is empty.

        Ties go to the largest sum of counts, then to the longest first piece. A million words take six seconds on two
        busy cores.
        """
        encoded: list[list[int]] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            encoded += self._encoded([normalised(text) for text in texts[start : start + _TEXTS_AT_ONCE]])
        return encoded

    def save(self, path: Path) -> None:
        """Write one line per piece: count, "##" if flagged, and text, separated by tabs."""
        path.write_bytes(self._body())

    @classmethod
    def load(cls, path: Path) -> "PhraseVocabulary":
        """Load a vocabulary; the caller compares its `fingerprint`. Raises: BundleError for invalid lines or pieces."""
        with errors_of(path, OverflowError):
            lines = [line.split("\t") for line in path.read_bytes().decode().split("\n")[:-1]]
            return cls([(text, flag == "##") for _, flag, text in lines], [int(count) for count, _, _ in lines])

    def _body(self) -> bytes:
        counts = self.counts[NUM_BYTE_TOKENS:].tolist()
        return "".join(
            f"{count}\t{'##' if unusual else ''}\t{text}\n"
            for (text, unusual), count in zip(self.pieces, counts, strict=True)
        ).encode()

    @cached_property
    def _phrases(self) -> PieceTrie:
        """Pieces of two or more words; the trie's symbols are words."""
        many = np.flatnonzero(np.diff(self._cut.starts) > 1)
        words, starts = self._cut.symbols, self._cut.starts
        symbols, starts = laid_end_to_end([words[starts[row] : starts[row + 1]].tolist() for row in many.tolist()])
        numbers = (many + NUM_BYTE_TOKENS).astype(np.int32)
        return PieceTrie.build(symbols.astype(np.int64), starts, numbers, 2 * len(self._words))

    @cached_property
    def _parts(self) -> PieceTrie:
        """Pieces of at most one word; the trie's symbols are characters."""
        one = np.flatnonzero(np.diff(self._cut.starts) == 1)
        letters = spelled([self.pieces[row] for row in one.tolist()])
        numbers = (one + NUM_BYTE_TOKENS).astype(np.int32)
        return PieceTrie.build(letters.symbols, letters.starts, numbers, _CHARACTERS)

    def lattice(self, texts: Sequence[str]) -> Lattice:
        """All ways to write normalised texts in these tokens."""
        words = Words(known=self._words)
        found = cut(texts, words)
        forms, form_of = np.unique(found.symbols, return_inverse=True)
        names = [(words.name(symbol >> 1), bool(symbol & 1)) for symbol in forms.tolist()]
        letters = spelled(names)
        phrases = self._phrases.matches(found.symbols, found.starts)
        alphanumeric = np.array([is_alphanumeric(word[0]) for word, _ in names], dtype=bool)
        _end_with_words(phrases, word_ends(found.symbols, alphanumeric[form_of]))
        return Lattice(
            text=found,
            form_of=form_of,
            letters=letters,
            phrases=phrases,
            parts=self._parts.matches(letters.symbols, letters.starts),
            counts=self.counts,
        )

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        lattice = self.lattice(texts)
        way = lattice.cheapest()
        spelt = _word_tokens(way)
        starts = np.concatenate([[0], np.cumsum(way.costs)])
        positions = np.flatnonzero(way.steps)
        form = lattice.form_of[positions]
        phrase = way.steps[positions] > 1
        lengths = np.where(phrase, 1, way.costs[form])
        ends = np.cumsum(lengths)
        out = np.empty(int(lengths.sum()), dtype=np.int64)
        out[ends[phrase] - 1] = way.phrases[positions[phrase]]
        own = lengths[~phrase]
        within = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
        out[np.repeat(ends[~phrase] - own, own) + within] = spelt[np.repeat(starts[form[~phrase]], own) + within]
        tokens = out.tolist()
        bounds = np.concatenate([[0], ends])[np.searchsorted(positions, lattice.text.starts)].tolist()
        return [tokens[start:stop] for start, stop in pairwise(bounds)]


def ascii_pieces() -> list[Piece]:
    return [(character, unusual) for unusual in (False, True) for character in ASCII]


def _end_with_words(matches: Matches, ends: npt.NDArray[np.bool_]) -> None:
    for taken in range(2, matches.shape[1] + 1):
        positions = np.flatnonzero(matches[:, taken - 1] >= 0)
        matches[positions[~ends[positions + taken - 1]], taken - 1] = -1


def _word_tokens(way: Way) -> Integers:
    if (way.parts >= 0).all():
        return way.parts.astype(np.int64)
    tokens: list[int] = []
    for piece, symbol in zip(way.parts.tolist(), way.characters.tolist(), strict=True):
        if piece >= 0:
            tokens.append(piece)
        else:
            tokens += _byte_tokens(symbol >> 1, unusual=bool(symbol & 1))
    return np.array(tokens, dtype=np.int64)


def _byte_tokens(code: int, *, unusual: bool) -> list[int]:
    lead, *followers = chr(code).encode()
    return [
        (_UNUSUAL_LEAD if unusual else _LEAD) + lead - _LEADS.start,
        *(_FOLLOWER + follower - _FOLLOWERS.start for follower in followers),
    ]
