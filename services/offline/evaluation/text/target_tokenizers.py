"""What a phrase vocabulary is measured against: words, byte-pair and unigram pieces, and a model's own word pieces.

Each meets `TargetTokenizer` and reads the same normalised texts; padding is token 0. Byte-pair merges are the
library's. Unigram pieces are cut by the library, too, but fitted here: its trainer (tokenizers 0.23) seeds from the
distinct words without their counts, so a frequent word that is part of no other gets no token: "what" is "wh" + "at"
on MedQuAD, 16.8 tokens a question, 9.6 as fitted here. It knows neither data sets nor models.

Letters: V tokens, T texts.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.algorithms.generation.vocabulary import FIXED_TOKENS, PhraseVocabulary, ascii_pieces
from services.algorithms.generation.vocabulary_segments import Integers
from services.algorithms.generation.vocabulary_text import normalised, spelled
from services.algorithms.text.word_pieces import WordPieces
from services.offline.training.phrases.vocabulary_candidates import LONGEST_PART, Corpus, frequent

PADDING = "[PAD]"
_SEEDS = 10  # times the size
_KEPT = 0.75  # of the pieces after a round, as in SentencePiece


class SubwordTokenizer:
    """BPE or unigram pieces of the library. Any text can be written: its alphabet are the 256 bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.fingerprint = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Each normalised text's tokens."""
        plain = [normalised(text) for text in texts]
        return [found.ids for found in self._tokenizer.encode_batch(plain, add_special_tokens=False)]

    def phrase(self, token: int) -> str:
        """The piece as the library writes it: "Ġ" is a space before it; "" for padding."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            raise ValueError(f"token={token}; allowed: 0 to {len(self) - 1}")
        return "" if piece == PADDING else piece


class WordPieceTokenizer:
    """The pieces of a text encoder's own word list, without [CLS] and [SEP], at its natural size."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._pieces = WordPieces(words)

    @property
    def fingerprint(self) -> str:
        """The word list's."""
        return self._pieces.fingerprint

    def __len__(self) -> int:
        return len(self._words)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text's pieces; a text longer than the encoder reads is cut."""
        return [self._pieces.token_ids(text)[1:-1] for text in texts]

    def phrase(self, token: int) -> str:
        """The piece; "" for padding."""
        if not 0 <= token < len(self):
            raise ValueError(f"token={token}; allowed: 0 to {len(self) - 1}")
        return "" if token == 0 else self._words[token]


def word_tokenizer(texts: Iterable[str], *, size: int, min_count: int) -> PhraseVocabulary:
    """The most frequent whole words, each with at most one word in it; other words are spelled in characters.

    Raises: ValueError as build_vocabulary.
    """
    if size < FIXED_TOKENS:
        raise ValueError(f"size={size}; allowed: at least {FIXED_TOKENS}, which every vocabulary has")
    forms, often = Corpus.of(texts).forms()
    count_of = dict(zip(forms, often.tolist(), strict=True))
    fixed = ascii_pieces()
    known = set(fixed)
    words = sorted(
        (form for form, count in count_of.items() if count >= min_count and form not in known),
        key=lambda form: (-count_of[form], form),
    )[: size - FIXED_TOKENS]
    pieces = fixed + words
    return PhraseVocabulary(pieces, [count_of.get(piece, 0) for piece in pieces])


def bpe_tokenizer(texts: Iterable[str], *, size: int) -> SubwordTokenizer:
    """Byte-pair merges within words, as GPT-2's; deterministic whatever the order of the texts."""
    _check_size(size)
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(map(normalised, texts)), trainer)
    return SubwordTokenizer(tokenizer)


def unigram_tokenizer(texts: Iterable[str], *, size: int) -> SubwordTokenizer:
    """A unigram language model of pieces within words (Kudo 2018): seeds are the frequent substrings, counts come from
    the best cut of every word, and the pieces whose best cut in two costs least likelihood go, a quarter at a time.

    Fewer than `size` tokens where the texts have fewer substrings that come twice.
    """
    _check_size(size)
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=True)
    often: Counter[str] = Counter()
    for text in sorted(map(normalised, texts)):
        often.update(word for word, _ in splitter.pre_tokenize_str(text))
    words = sorted(often)
    weights = np.array([often[word] for word in words], dtype=np.int64)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    counts: dict[str, float] = _seeds(words, weights, most=_SEEDS * size)
    counts.update({letter: max(1.0, counts.get(letter, 1.0)) for letter in alphabet})
    goal = size - 1  # one is padding
    while True:
        for _ in range(2):
            counts = _recounted(counts, words, weights, alphabet)
        if len(counts) <= goal:
            return SubwordTokenizer(_unigram(counts))
        costs = _costs(counts)
        kept = max(goal, int(len(counts) * _KEPT))
        ranked = sorted(costs, key=lambda piece: (-costs[piece], piece))[: kept - len(alphabet)]
        counts = {piece: counts[piece] for piece in [*alphabet, *ranked]}


def _check_size(size: int) -> None:
    least = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if size < least:
        raise ValueError(f"size={size}; allowed: at least {least}, all bytes and padding")


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _seeds(words: Sequence[str], weights: Integers, *, most: int) -> dict[str, float]:
    """Substrings of words that come twice or more: the `most` that cover most characters."""
    letters = spelled([(word, True) for word in words])
    found: dict[str, float] = {}
    for length, places, counts in frequent(
        letters.symbols,
        letters.starts,
        np.repeat(weights, np.diff(letters.starts)),
        longest=LONGEST_PART,
        min_count=2,
        allowed=lambda length, places: np.ones(len(places), dtype=bool),
    ):
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            found["".join(chr(code >> 1) for code in letters.symbols[place : place + length].tolist())] = count
    ranked = sorted(found, key=lambda piece: (-found[piece] * len(piece), piece))[:most]
    return {piece: found[piece] for piece in ranked}


def _unigram(counts: dict[str, float]) -> Tokenizer:
    total = math.fsum(counts.values())
    pieces = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    # A text with "[PAD]" in it is cut elsewhere: padding's score is worse than that of its five letters.
    scored = [(PADDING, -1e4), *((piece, math.log(count / total)) for piece, count in pieces)]
    return _byte_level(models.Unigram(scored))


def _recounted(
    counts: dict[str, float],
    words: Sequence[str],
    weights: Integers,
    alphabet: Sequence[str],
) -> dict[str, float]:
    """How often each piece stands in the best cut of the words; pieces that never do are dropped, letters stay."""
    tokenizer = _unigram(counts)
    model = tokenizer.model
    new: Counter[str] = Counter()
    for word, weight in zip(words, weights.tolist(), strict=True):
        for token in model.tokenize(word):
            new[token.value] += weight
    return {letter: max(0.5, new.get(letter, 0)) for letter in alphabet} | {
        piece: float(count) for piece, count in new.items() if count > 0
    }


def _costs(counts: dict[str, float]) -> dict[str, float]:
    """What the words lose in log likelihood without a piece of two or more characters, by its best cut in two."""
    total = math.fsum(counts.values())
    score = {piece: math.log(count / total) for piece, count in counts.items()}

    def of(part: str) -> float:
        known = score.get(part)
        return known if known is not None else math.fsum(score[letter] for letter in part)

    return {
        piece: count * (score[piece] - max(of(piece[:cut]) + of(piece[cut:]) for cut in range(1, len(piece))))
        for piece, count in counts.items()
        if len(piece) > 1
    }
