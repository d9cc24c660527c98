"""The phrase vocabulary: every text has an encoding, which gives the text back, and nothing shorter would."""

import random
from pathlib import Path

import pytest
from fakes.phrases import text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.generation.vocabulary import (
    FIXED_TOKENS,
    NUM_BYTE_TOKENS,
    PhraseVocabulary,
    ascii_pieces,
)
from services.algorithms.generation.vocabulary_text import (
    is_alphanumeric,
    is_whole,
    normalised,
    usual_space,
)
from services.offline.training.phrases.vocabulary_candidates import Corpus, candidates
from services.offline.training.phrases.vocabulary_fit import build_vocabulary

TEXTS = [
    f"{question} {illness} ?"
    for question in ("what is (are)", "what are the treatments for", "who is at risk for", "how to diagnose")
    for illness in ("type 2 diabetes", "alzheimer's disease", "brain tumors", "vitamin b12 deficiency", "covid-19")
]
SIZE = FIXED_TOKENS + 60
VOCABULARY = build_vocabulary(TEXTS, size=SIZE, min_count=2)
# Pieces that compete for the same few characters, so that short random texts have many encodings.
CROWDED = PhraseVocabulary(
    [
        *ascii_pieces(),
        *[("ab", False), ("ab", True), ("aba", False), ("ba", True), ("bab", True), ("11", True)],
        *[("a b", False), ("b a", False), ("a b a", False), ("ab a", False), ("a b1", False), ("b b", False)],
        *[("a-b", False), ("b-a", False), ("(a)", False), ("a (b)", False), ("1 a", False), ("b . a", False)],
    ],
    [*range(len(ascii_pieces())), *[5, 3, 9, 7, 7, 2], *[4, 4, 8, 1, 6, 3], *[2, 2, 5, 5, 1, 1]],
)
AWKWARD = [
    "漢字",
    "漢 字 abc漢",
    "👩‍👧",
    "İstanbul",
    "\x00",
    "b12",
    "ﬁﬂ",
    "ß ẞ",
    "a\u0301\u0300",
    "한국어",
    "देवनागरी",
    "\ud800",
    "\u2028",
    "1½",
]


@settings(deadline=None, max_examples=60)
@given(st.text() | st.lists(st.sampled_from([*TEXTS, *AWKWARD])).map(" ".join))
def test_decoding_gives_the_normalised_text_back(text: str) -> None:
    assert text_of(VOCABULARY, VOCABULARY.encode_all([text])[0]) == normalised(text)


@settings(deadline=None, max_examples=60)
@given(st.text() | st.lists(st.sampled_from(AWKWARD)).map("".join))
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ab1-.() ", max_size=14))
def test_no_encoding_is_shorter_and_none_as_short_is_more_frequent(text: str) -> None:
    (tokens,) = CROWDED.encode_all([text])

    assert (len(tokens), int(CROWDED.counts[tokens].sum())) == fewest_by_trying_all(CROWDED, normalised(text))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.text(alphabet="ab1-.() ", max_size=14) | st.sampled_from(AWKWARD), max_size=6))
def test_texts_encoded_together_are_encoded_as_alone(texts: list[str]) -> None:
    assert CROWDED.encode_all(texts) == [CROWDED.encode_all([text])[0] for text in texts]


def fewest_by_trying_all(vocabulary: PhraseVocabulary, text: str) -> tuple[int, int]:
    """The fewest tokens, and the largest sum of counts among those: over all tokens at every place of the text."""
    counts = vocabulary.counts[NUM_BYTE_TOKENS:].tolist()
    pieces = [(*piece, count) for piece, count in zip(vocabulary.pieces, counts, strict=True)]
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    for end in range(len(text)):
        if end not in best:
            continue
        for piece, unusual, count in pieces:
            if end == 0:
                joint, allowed = "", not unusual
            else:
                joint = " " if usual_space(text[end - 1], piece[0]) is not unusual else ""
                allowed = True
            stop = end + len(joint) + len(piece)
            many_words = len(words_by_hand(piece)) > 1
            inside = stop < len(text) and is_alphanumeric(text[stop - 1]) and is_alphanumeric(text[stop])
            if many_words and (inside or unusual):
                continue
            if allowed and text[end:stop] == joint + piece:
                found = (best[end][0] + 1, best[end][1] - count)
                best[stop] = min(best.get(stop, found), found)
    tokens, negative = best[len(text)]
    return tokens, -negative


def words_by_hand(piece: str) -> list[str]:
    """Runs of letters, of digits, and single marks, cut without the code under test."""
    words: list[str] = []
    last = ""
    for character in piece:
        kind = "a" if character.isalpha() else "0" if character.isdigit() else " " if character == " " else character
        if kind in "a0" and kind == last:
            words[-1] += character
        elif kind != " ":
            words.append(character)
        last = kind if kind in "a0 " else ""
    return words


def test_a_known_identifier_is_a_few_whole_phrases() -> None:
    (tokens,) = VOCABULARY.encode_all(["What are the  treatments for\nType 2 Diabetes ?"])

    assert [text_of(VOCABULARY, [token]) for token in tokens] == ["what are the treatments for", "type 2 diabetes ?"]


def test_a_phrase_does_not_end_inside_a_word() -> None:
    vocabulary = PhraseVocabulary([*ascii_pieces(), ("vitamin b", False), ("vitamin", False)], [1] * 138)

    first = [text_of(vocabulary, tokens[:1]) for tokens in vocabulary.encode_all(["vitamin b", "vitamin b12"])]
    assert first == ["vitamin b", "vitamin"]


@pytest.mark.parametrize("text", ["", " ", "\x00\x01", "\u200d", "\ud800\n"])
def test_a_text_of_nothing_visible_has_no_tokens(text: str) -> None:
    assert VOCABULARY.encode_all([text]) == [[]]


def test_any_order_of_the_texts_makes_the_same_vocabulary() -> None:
    shuffled = random.Random(3).sample(TEXTS, len(TEXTS))

    assert build_vocabulary(shuffled, size=SIZE, min_count=2).fingerprint == VOCABULARY.fingerprint


def test_the_size_asked_for_is_reached_and_every_learnt_token_came_often_enough() -> None:
    assert len(VOCABULARY) == SIZE
    assert (VOCABULARY.counts[FIXED_TOKENS:] >= 2).all()


@pytest.mark.parametrize(("size", "min_count"), [(10, 2), (SIZE, 0)])
def test_a_size_or_count_out_of_range_is_refused_with_what_is_allowed(size: int, min_count: int) -> None:
    with pytest.raises(ValueError, match="allowed: at least"):
        build_vocabulary(TEXTS, size=size, min_count=min_count)


def test_candidates_keep_one_of_the_variants_of_a_phrase() -> None:
    texts = ["brain tumor"] * 5 + ["brain tumors"] * 9 + ["brain-tumor"] * 3 + ["Brain Tumor!"] * 2
    corpus = Corpus.of(texts)

    found = {text for text, _ in candidates(corpus, min_count=2) if "brain" in text and "tumor" in text}

    assert found == {"brain tumors"}


def test_candidates_respect_words_marks_and_the_least_count() -> None:
    texts = ["vitamin b12 (low)", "vitamin b12 (low)", "vitamin c"]
    found = candidates(Corpus.of(texts), min_count=2)

    assert found["vitamin b12", False] == 2
    assert found["vitamin", False] == 3
    phrases = [text for text, unusual in found if " " in text and not unusual]
    assert phrases == ["b12 (low)", "vitamin b12", "vitamin b12 (low)"]
    assert all(is_whole(phrase) for phrase in phrases)


def test_a_kept_vocabulary_is_the_same_when_read(tmp_path: Path) -> None:
    vocabulary = build_vocabulary([*TEXTS, *AWKWARD, *AWKWARD], size=SIZE, min_count=2)
    vocabulary.save(tmp_path / "phrases.vocabulary")

    read = PhraseVocabulary.load(tmp_path / "phrases.vocabulary")

    assert read.fingerprint == vocabulary.fingerprint
    assert read.encode_all(TEXTS) == vocabulary.encode_all(TEXTS)
    assert [path.name for path in tmp_path.iterdir()] == ["phrases.vocabulary"]


@pytest.mark.parametrize(
    "wrong", [b"", b"1\t\ta", b"[" * 100_000, b"x\t\t!\n", b"1\t!\n", b"9" * 30 + b"\t\t!\n", b"\xff"], ids=len
)
def test_a_file_of_other_lines_is_refused(wrong: bytes, tmp_path: Path) -> None:
    (tmp_path / "vocabulary").write_bytes(wrong)
    with pytest.raises(BundleError, match="vocabulary: "):
        PhraseVocabulary.load(tmp_path / "vocabulary")


@pytest.mark.parametrize(
    "piece", [("Not normal", False), (" space", False), ("two  spaces", False), ("a", False), ("a b", True)], ids=repr
)
def test_a_piece_that_no_text_could_hold_or_that_is_there_twice_is_refused(piece: tuple[str, bool]) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        PhraseVocabulary([*ascii_pieces(), piece], [1] * 137)
