"""BM25 over items' words: a bm25s index, and a small delta of later changes.

This baseline finds items by exact words. It needs no model, so it is the first to find a new item. Rows are items.

`change` masks out the changed rows in the index, and adds rows with a new text to the delta. The delta uses the index's
mean length and document frequencies, so that scores are comparable. For a word unknown to the index, it uses the
frequency in the delta. When the delta's slots exceed 256 and half the index's rows, one new index replaces both. So
adding n rows costs at most about three builds of an index of n rows, for any batch sizes.

Letters: R rows, n slots of the delta.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import bm25s  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

# Lucene's defaults and formula, a usual baseline in papers.
_K1, _B = 1.2, 0.75
_MERGE_ROWS, _MERGE_SHARE = 256, 2
_WORD_BYTES = 160  # for a word and its two dictionary entries; measured: 131 on MovieLens-1M's titles
# Scripts without spaces are cut into characters; \w keeps digits and underscores, for years and code names in titles.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_ACCENTS = re.compile("[\u0300-\u036f]")


def words_of(text: str) -> list[str]:
    """A text's words, in order, without case, accents, punctuation and symbols (emoji, too).

    Frequent words stay: BM25 gives them little weight, and "It" or "The Who" are names.
    """
    folded = _ACCENTS.sub("", unicodedata.normalize("NFKD", text.casefold()))
    return _WORDS.findall(unicodedata.normalize("NFKC", folded))


@dataclass(frozen=True, slots=True)
class _Index:
    """A built index; `tokens` are the documents' word numbers, for the next build."""

    model: bm25s.BM25 | None
    vocabulary: Mapping[str, int]
    tokens: Sequence[npt.NDArray[np.int32]]
    mean_length: float
    frequencies: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tokens: Sequence[npt.NDArray[np.int32]], vocabulary: Mapping[str, int]) -> "_Index":
        lengths = np.array([len(row) for row in tokens])
        if not lengths.any():
            return cls(None, vocabulary, tokens, 1.0, np.zeros(len(vocabulary), dtype=np.int64))
        model = bm25s.BM25(k1=_K1, b=_B, method="lucene", backend="numpy")
        model.index(([row.tolist() for row in tokens], dict(vocabulary)), create_empty_token=False, show_progress=False)
        frequencies = np.diff(np.asarray(model.scores["indptr"]))
        return cls(model, vocabulary, tokens, float(lengths.mean()), frequencies.astype(np.int64))

    def scores(self, words: Sequence[str]) -> Scores:
        """Scores of all rows (R,); 0 where no word occurs."""
        known = [self.vocabulary[word] for word in words if word in self.vocabulary]
        if self.model is None or not known:
            return np.zeros(len(self.tokens), dtype=np.float32)
        return np.asarray(self.model.get_scores_from_ids(known), dtype=np.float32)

    @property
    def nbytes(self) -> int:
        total = sum(row.nbytes for row in self.tokens) + self.frequencies.nbytes + _WORD_BYTES * len(self.vocabulary)
        if self.model is not None:
            total += sum(self.model.scores[name].nbytes for name in ("data", "indices", "indptr"))
        return total


@dataclass(frozen=True, slots=True)
class _Delta:
    """Rows put after the index was built.

    documents: words of each row. postings: each word's slots (positions in `rows`) with term-frequency factors. is_dead
    (n,): slots whose row has since changed.
    """

    rows: Rows = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    is_dead: Mask = field(default_factory=lambda: np.empty(0, dtype=bool))
    documents: Mapping[int, Sequence[str]] = field(default_factory=dict)
    postings: Mapping[str, tuple[Rows, npt.NDArray[np.float64]]] = field(default_factory=dict)

    def changed(self, put: Mapping[int, Sequence[str]], withdrawn: Sequence[int], mean_length: float) -> "_Delta":
        """The delta after one more batch. mean_length: mean words of the index's documents."""
        rows = np.fromiter(put, dtype=np.int64, count=len(put))
        is_dead = self.is_dead | np.isin(self.rows, [*put, *withdrawn])
        found: dict[str, list[tuple[int, float]]] = {}
        for slot, words in enumerate(put.values(), start=len(self.rows)):
            for word, times in Counter(words).items():
                share = times / (times + _K1 * (1 - _B + _B * len(words) / mean_length))
                found.setdefault(word, []).append((slot, share))
        postings = dict(self.postings)
        for word, occurrences in found.items():
            slots, shares = np.array([slot for slot, _ in occurrences]), np.array([share for _, share in occurrences])
            if before := postings.get(word):
                slots, shares = np.concatenate([before[0], slots]), np.concatenate([before[1], shares])
            postings[word] = slots, shares
        gone = set(withdrawn)
        documents = {row: words for row, words in {**self.documents, **put}.items() if row not in gone}
        return _Delta(
            np.concatenate([self.rows, rows]), np.append(is_dead, np.zeros(len(rows), dtype=bool)), documents, postings
        )

    def scores(self, words: Sequence[str], index: _Index) -> Scores:
        """Scores (n,) in the order of `rows`, by the index's statistics."""
        out = np.zeros(len(self.rows), dtype=np.float32)
        for word in words:
            if word in self.postings:
                slots, shares = self.postings[word]
                number = index.vocabulary.get(word)
                size, frequency = len(index.tokens), 0 if number is None else int(index.frequencies[number])
                if not frequency:
                    size, frequency = size + len(self.documents), int(np.count_nonzero(~self.is_dead[slots]))
                out[slots] += (math.log(1 + (size - frequency + 0.5) / (frequency + 0.5)) * shares).astype(np.float32)
        out[self.is_dead] = 0
        return out


@dataclass(frozen=True, slots=True)
class _Serving:
    index: _Index
    delta: _Delta
    is_dead: Mask


class LexicalIndex:
    """Finds rows by words. Any number of threads may search while one changes the index; a search reads one version."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Row i has the words of text i. Cost: 50 to 60 microseconds per title (two shared cores)."""
        self._serving = _built(words_of(text) for text in texts)

    @property
    def num_documents(self) -> int:
        serving = self._serving
        live = sum(bool(len(row)) for row, dead in zip(serving.index.tokens, serving.is_dead, strict=True) if not dead)
        return live + sum(bool(words) for words in serving.delta.documents.values())

    @property
    def nbytes(self) -> int:
        """Bytes of postings, words, and word numbers for the next build; without the delta's documents."""
        serving = self._serving
        delta = sum(found.nbytes + values.nbytes + _WORD_BYTES for found, values in serving.delta.postings.values())
        return serving.index.nbytes + serving.is_dead.nbytes + delta

    def change(self, put: Mapping[int, str], withdrawn: Sequence[int] = ()) -> None:
        """Replace the texts of rows and withdraw rows, for later searches. A row beyond the last is new.

        Raises: ValueError for a negative row, or one both put and withdrawn. Cost: 30 microseconds for each row put;
        sometimes also a full build.
        """
        rows = [*put, *withdrawn]
        if rows and min(rows) < 0:
            raise ValueError(f"row={min(rows)} allowed: 0 or more")
        if both := set(put) & set(withdrawn):
            raise ValueError(f"row={min(both)} is both put and withdrawn; allowed: one of them")
        before = self._serving
        is_dead = before.is_dead.copy()
        is_dead[[row for row in rows if row < len(is_dead)]] = True
        documents = {row: words_of(text) for row, text in put.items()}
        delta = before.delta.changed(documents, withdrawn, before.index.mean_length)
        if len(delta.rows) > max(_MERGE_ROWS, len(is_dead) // _MERGE_SHARE):
            self._serving = _merged(before.index, is_dead, delta.documents)
        else:
            self._serving = _Serving(before.index, delta, is_dead)

    def search(self, query: str, k: int, allowed: Mask | None = None) -> tuple[Rows, Scores]:
        """The k rows of largest BM25 score above 0, best first, ties by row.

        allowed: whether each row may be returned; None allows all rows. Rows beyond its end are not returned. Raises:
        ValueError for k below 1.
        """
        if k < 1:
            raise ValueError(f"k={k} allowed: at least 1")
        serving, words = self._serving, words_of(query)
        of_index, of_delta = serving.index.scores(words), serving.delta.scores(words, serving.index)
        of_index[serving.is_dead] = 0
        found = np.flatnonzero(of_index)
        positions = np.flatnonzero(of_delta)
        rows = np.concatenate([found, serving.delta.rows[positions]])
        scores = np.concatenate([of_index[found], of_delta[positions]])
        if allowed is not None:
            passes = np.zeros(len(rows), dtype=bool)
            inside = rows < len(allowed)
            passes[inside] = allowed[rows[inside]]
            rows, scores = rows[passes], scores[passes]
        if k < len(rows):
            reach = np.partition(scores, len(scores) - k)[len(scores) - k]
            rows, scores = rows[scores >= reach], scores[scores >= reach]
        order = np.lexsort((rows, -scores))[:k]
        return rows[order], scores[order]


def _built(documents: Iterable[Sequence[str]]) -> _Serving:
    vocabulary: dict[str, int] = {}
    tokens = [
        np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words], dtype=np.int32)
        for words in documents
    ]
    return _Serving(_Index.of(tokens, vocabulary), _Delta(), np.zeros(len(tokens), dtype=bool))


def _merged(index: _Index, is_dead: Mask, documents: Mapping[int, Sequence[str]]) -> _Serving:
    by_number = list(index.vocabulary)
    everything: list[Sequence[str]] = [
        () if dead else [by_number[number] for number in row.tolist()]
        for row, dead in zip(index.tokens, is_dead, strict=True)
    ]
    everything += [()] * (max(documents, default=-1) + 1 - len(everything))
    for row, words in documents.items():
        everything[row] = words
    return _built(everything)
