"""The text of a phrase vocabulary's tokens."""

from collections.abc import Iterable

from services.algorithms.generation.vocabulary import (
    _FOLLOWER,
    _FOLLOWERS,
    _LEAD,
    _LEADS,
    _UNUSUAL_LEAD,
    NUM_BYTE_TOKENS,
    PhraseVocabulary,
)
from services.algorithms.generation.vocabulary_text import joined


def text_of(vocabulary: PhraseVocabulary, tokens: Iterable[int]) -> str:
    """The text of an encoding."""
    words: list[tuple[str, bool]] = []
    waiting, unusual = bytearray(), False
    for token in [*tokens, NUM_BYTE_TOKENS]:
        if token >= _FOLLOWER and token < NUM_BYTE_TOKENS:
            waiting.append(_FOLLOWERS[token - _FOLLOWER])
            continue
        if waiting:
            words.append((waiting.decode(), unusual))
        waiting, unusual = bytearray(), token >= _UNUSUAL_LEAD
        if token < NUM_BYTE_TOKENS:
            waiting.append(_LEADS[(token - _LEAD) % len(_LEADS)])
        else:
            words.append(vocabulary.pieces[token - NUM_BYTE_TOKENS])
    return joined(words[:-1])
