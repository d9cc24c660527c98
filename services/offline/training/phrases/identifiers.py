"""Document identifiers as token sequences, each of which fits the decoder's s positions.

A document has several identifiers (title, keywords, real or pseudo queries), which several documents may share. Longer
identifiers than s are omitted and counted. A document with no others gets its shortest one, cut to s tokens and
counted separately. Equal token sequences are one identifier.

Letters: X documents, I identifiers, s positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.algorithms.generation.vocabulary import PhraseVocabulary
from services.algorithms.ops.trie_search import MAX_POSITIONS

# Each position costs time per query, and a search over assignments grows with 2^s.
_MOST_POSITIONS = MAX_POSITIONS
_COVERED = 0.97


@dataclass(frozen=True, kw_only=True, slots=True)
class Identifiers:
    """Identifiers i with sequence tokens[i], text texts[i] and document rows documents[i] (ascending).

    of_document[x]: identifiers of document x. `row_of`: i by sequence. `left_out`, `cut`: how many were omitted or cut.
    """

    positions: int
    texts: list[str]
    tokens: list[tuple[int, ...]]
    documents: list[list[int]]
    of_document: list[list[int]]
    row_of: dict[tuple[int, ...], int]
    left_out: int
    cut: int

    def __len__(self) -> int:
        return len(self.tokens)


def identifiers_of(
    documents: Sequence[Sequence[str]], tokenizer: PhraseVocabulary, *, positions: int | None = None
) -> Identifiers:
    """Tokenize X documents' identifiers; texts without tokens are ignored.

    positions: s; by default the lengths' 97th percentile, at least 2, at most a trie's maximum (12).
    Raises: ValueError naming the document if one has no identifier, or if positions is out of range.
    """
    if not documents:
        raise ValueError("documents has 0 rows; allowed: 1 or more")
    encoded = iter(tokenizer.encode_all([text for each in documents for text in each]))
    encoded_texts = [[(tuple(next(encoded)), text) for text in each] for each in documents]
    sequences = [[pair for pair in row if pair[0]] for row in encoded_texts]
    bare = next((row for row, found in enumerate(sequences) if not found), None)
    if bare is not None:
        raise ValueError(f"documents[{bare}]={list(documents[bare])!r} has no identifier; allowed: a text with words")
    if positions is None:
        lengths = np.array([len(tokens) for row in sequences for tokens, _ in row])
        positions = min(_MOST_POSITIONS, max(2, int(np.ceil(np.quantile(lengths, _COVERED)))))
    if not 1 <= positions <= _MOST_POSITIONS:
        raise ValueError(f"positions={positions}; allowed: 1 to {_MOST_POSITIONS}")
    tokens_of: list[tuple[int, ...]] = []
    texts: list[str] = []
    named: list[list[int]] = []
    of_document: list[list[int]] = []
    row_of: dict[tuple[int, ...], int] = {}
    left_out = cut = 0
    for document, row in enumerate(sequences):
        fitting = [pair for pair in row if len(pair[0]) <= positions]
        left_out += len(row) - len(fitting)
        if not fitting:
            tokens, text = min(row, key=lambda pair: len(pair[0]))
            fitting = [(tokens[:positions], text)]
            left_out, cut = left_out - 1, cut + 1
        of_document.append([])
        for tokens, text in fitting:
            number = row_of.setdefault(tokens, len(tokens_of))
            if number == len(tokens_of):
                tokens_of.append(tokens)
                texts.append(text)
                named.append([])
            if not named[number] or named[number][-1] != document:
                named[number].append(document)
                of_document[document].append(number)
    return Identifiers(
        positions=positions,
        texts=texts,
        tokens=tokens_of,
        documents=named,
        of_document=of_document,
        row_of=row_of,
        left_out=left_out,
        cut=cut,
    )
