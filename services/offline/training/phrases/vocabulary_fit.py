"""A phrase vocabulary fitted to a set of texts: candidates, then pruning to the size asked for (PIXAR, section 4.1)."""

from collections.abc import Iterable

import numpy as np

from services.algorithms.generation.vocabulary import FIXED_TOKENS, NUM_BYTE_TOKENS, PhraseVocabulary, ascii_pieces
from services.offline.training.phrases.vocabulary_candidates import Corpus, candidates
from services.offline.training.phrases.vocabulary_pruning import pruned


def build_vocabulary(texts: Iterable[str], *, size: int, min_count: int) -> PhraseVocabulary:
    """A vocabulary of at most `size` tokens for texts like these; fewer where they have fewer candidates.

    `min_count`: how often a candidate comes at least (20 in the paper, for tens of millions of identifiers). Equal
    texts, in whatever order and however often the whole of them is handed in, make an equal vocabulary; a text that
    comes twice counts twice.

    Raises: ValueError for a size below FIXED_TOKENS, a min_count below 1, or texts with nothing in them.
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
