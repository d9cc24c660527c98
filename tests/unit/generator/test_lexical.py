"""BM25 over items' words: equal to the formula, and as changeable as the catalogue is."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.text import lexical
from services.algorithms.text.lexical import LexicalIndex, words_of

TITLES = ["Toy Story", "Space Jam", "2001: A Space Odyssey", "Amélie", "The Space Between Us", "千と千尋の神隠し", ""]
WORDS = st.lists(st.sampled_from(["red", "blue", "green", "dog", "cat", "sun"]), max_size=6).map(" ".join)


def found(index: LexicalIndex, query: str, k: int = 10, allowed: np.ndarray | None = None) -> list[int]:
    return index.search(query, k, allowed)[0].tolist()


def formula(texts: list[str], query: str) -> np.ndarray:
    """Lucene's BM25, document by document."""
    documents = [words_of(text) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    out = np.zeros(len(texts))
    for word in words_of(query):
        frequency = sum(word in document for document in documents)
        weight = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
        for row, document in enumerate(documents):
            times = Counter(document)[word]
            out[row] += weight * times / (times + 1.2 * (0.25 + 0.75 * len(document) / mean)) if times else 0
    return out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Amélie, ÀLA carte!", ["amelie", "ala", "carte"]),
        ("It's 2001", ["it", "s", "2001"]),
        ("ｆｕｌｌ Straße", ["full", "strasse"]),
        ("千と千尋", ["千", "と", "千", "尋"]),
        ("снег и Ёлка", ["снег", "и", "елка"]),
        ("😀🎬 \x00\x07 --- ", []),
    ],
)
def test_words_are_folded_and_symbols_dropped(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@settings(deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=12), WORDS)
def test_scores_are_those_of_the_formula(texts: list[str], query: str) -> None:
    rows, scores = LexicalIndex(texts).search(query, len(texts))
    expected = formula(texts, query) if any(map(words_of, texts)) else np.zeros(len(texts))
    assert sorted(rows.tolist()) == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(scores, expected[rows], rtol=1e-5)
    assert (np.diff(scores) <= 0).all()


def test_an_index_of_nothing_or_of_no_words_answers_nothing_and_takes_rows() -> None:
    for texts in ([], ["", "!"]):
        index = LexicalIndex(texts)
        assert found(index, "space") == []
        index.change({len(texts): "Space Jam"})
        assert found(index, "space") == [len(texts)]


def test_only_allowed_rows_are_answered_and_new_ones_beyond_the_mask_are_not() -> None:
    index = LexicalIndex(TITLES)
    index.change({7: "Space again"})
    allowed = np.ones(len(TITLES), dtype=bool)
    allowed[2] = False
    assert set(found(index, "space", allowed=allowed)) == {1, 4}
    assert found(index, "space", allowed=np.zeros(8, dtype=bool)) == []


def test_a_put_row_is_found_by_the_next_search_and_a_withdrawn_one_is_not() -> None:
    index = LexicalIndex(TITLES)
    index.change({7: "Brand new saga", 1: "Renamed"}, withdrawn=[3])
    assert found(index, "saga") == [7]
    assert 1 not in found(index, "space")
    assert found(index, "renamed") == [1]
    assert found(index, "amelie") == []
    index.change({3: "Amelie again"}, withdrawn=[7])
    assert found(index, "amelie") == [3]
    assert found(index, "saga") == []


CHANGES = st.lists(st.tuples(st.integers(0, 14), st.one_of(st.none(), WORDS)), max_size=20)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=10), CHANGES, st.booleans())
def test_after_any_changes_exactly_the_rows_that_hold_a_word_are_found(
    texts: list[str], changes: list[tuple[int, str | None]], merges: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if merges:
            patch.setattr(lexical, "_MERGE_ROWS", 2)
        index, held = LexicalIndex(texts), dict(enumerate(texts))
        for row, text in changes:
            if text is None:
                index.change({}, withdrawn=[row])
                held.pop(row, None)
            else:
                index.change({row: text})
                held[row] = text
        for word in ("red", "sun"):
            assert sorted(found(index, word, k=100)) == sorted(row for row, text in held.items() if word in text)
        assert index.num_documents == sum(bool(text) for text in held.values())


def test_a_large_delta_is_built_into_the_index_and_scores_are_the_formulas_again() -> None:
    index = LexicalIndex(TITLES)
    more = {row: f"film number {row} of space" for row in range(7, 400)}
    index.change(more)
    rows, scores = index.search("space", 1_000)
    np.testing.assert_allclose(scores, formula([*TITLES, *more.values()], "space")[rows], rtol=1e-5)


def test_a_change_counts_the_words_of_its_own_texts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    index, counted = LexicalIndex(["first"]), list[list[str]]()
    monkeypatch.setattr(lexical, "Counter", lambda words: (counted.append(words), Counter(words))[1])
    for row in range(100):
        index.change({row: f"film {row}"}, withdrawn=[row + 1000])
    assert counted == [["film", str(row)] for row in range(100)]
    assert found(index, "film", k=200) == list(range(100))


def test_wrong_arguments_are_refused_by_name() -> None:
    index = LexicalIndex(TITLES)
    with pytest.raises(ValueError, match="k=0 allowed: at least 1"):
        index.search("space", 0)
    with pytest.raises(ValueError, match="row=-1 allowed: 0 or more"):
        index.change({-1: "x"})
    with pytest.raises(ValueError, match="row=2 is both put and withdrawn"):
        index.change({2: "x"}, withdrawn=[2])
