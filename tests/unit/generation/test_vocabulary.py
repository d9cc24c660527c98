"""The phrase vocabulary: every text has an encoding, which gives the text back, and nothing shorter would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.generation.vocabulary import FIXED_TOKENS, PAD, build_vocabulary
from services.algorithms.generation.vocabulary_text import normalised

TEXTS = [
    f"{question} {illness} ?"
    for question in ("what is (are)", "what are the treatments for", "who is at risk for", "how to diagnose")
    for illness in ("type 2 diabetes", "alzheimer's disease", "brain tumors", "vitamin b12 deficiency", "covid-19")
]
VOCABULARY = build_vocabulary(TEXTS, size=FIXED_TOKENS + 60, min_count=2)


@settings(deadline=None, max_examples=200)
@given(st.text() | st.lists(st.sampled_from([*TEXTS, "漢字", "👩‍👧", "İstanbul", "\x00", "b12"])).map(" ".join))
def test_decoding_gives_the_normalised_text_back(text: str) -> None:
    assert VOCABULARY.decode(VOCABULARY.encode(text)) == normalised(text)


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


def test_a_known_identifier_is_a_few_whole_phrases() -> None:
    tokens = VOCABULARY.encode("What are the treatments for Type 2 Diabetes ?")

    assert [VOCABULARY.phrase(token) for token in tokens] == ["what are the treatments for", "type 2 diabetes ?"]


def test_padding_is_token_zero_and_stands_for_nothing() -> None:
    assert VOCABULARY.phrase(PAD) == ""
    assert VOCABULARY.decode([PAD, *VOCABULARY.encode("covid-19"), PAD]) == "covid-19"


def test_a_size_that_cannot_hold_the_characters_is_refused() -> None:
    with pytest.raises(ValueError, match=f"size=10; allowed: at least {FIXED_TOKENS}"):
        build_vocabulary(TEXTS, size=10, min_count=2)
