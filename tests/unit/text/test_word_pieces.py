"""Word pieces: the ids that the published weights were trained with, and an answer for any text at all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.algorithms.models.sentence_encoder import model_folder
from services.algorithms.text.word_pieces import WordPieces
from tests.unit.text.text_scene import WORDS

REAL = WordPieces.read(model_folder() / "vocab.txt")


def test_the_published_word_list_has_the_rows_of_the_weights() -> None:
    assert len(REAL) == 30_522
    assert REAL.fingerprint != WordPieces(WORDS).fingerprint


@pytest.mark.parametrize(
    "text",
    [
        "Space movies with a sense of humour",
        "What are the symptoms of Wilson's disease ($5, 10%)?",
        "Crème brûlée, naïve café, ÅNGSTRÖM",
        "中文 and русский and ελληνικά",
        "e-mail: a_b@c.org (see https://example.org/x?y=1)",
        "tab\tline\nreturn\r zero\u200bwidth \x07bell",
        "antidisestablishmentarianism " * 60,
    ],
)
def test_ids_equal_those_of_the_published_tokenizer(text: str) -> None:
    published = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    published.no_padding()
    published.enable_truncation(256)
    assert REAL.token_ids(text) == published.encode(text).ids


def test_texts_without_a_word_give_the_two_marks_alone() -> None:
    for text in ("", "   ", "\x00\x01\x02", "\u200b\u200d", "\ufffd"):
        assert REAL.token_ids(text) == [101, 102]


def test_a_word_beyond_a_hundred_characters_and_a_surrogate_are_no_error() -> None:
    assert WordPieces(WORDS).token_ids("x" * 101) == [2, 1, 3]
    assert WordPieces(WORDS).token_ids("cat \ud800 dog") == [2, 7, 8, 3]


def test_a_huge_text_costs_its_beginning_and_fits_the_limit() -> None:
    ids = REAL.token_ids("space " * 5_000_000, max_tokens=64)
    assert len(ids) == 64
    assert ids[0] == 101
    assert ids[-1] == 102


def test_a_batch_is_padded_with_zeros_that_the_mask_tells() -> None:
    ids, mask = WordPieces(WORDS).batch(["the cat", "", "a dog!"])
    assert ids.tolist() == [[2, 10, 7, 3, 0], [2, 3, 0, 0, 0], [2, 9, 8, 11, 3]]
    np.testing.assert_array_equal(mask, ids != 0)
    empty, _ = WordPieces(WORDS).batch([])
    assert empty.shape == (0, 0)


def test_a_word_list_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks \[CLS\], \[SEP\]"):
        WordPieces(["[PAD]", "[UNK]", "cat"])
    with pytest.raises(ValueError, match=r"\[PAD\] is row 1"):
        WordPieces(["cat", "[PAD]", "[UNK]", "[CLS]", "[SEP]"])


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=80))
def test_any_text_gives_known_ids_between_the_two_marks(text: str) -> None:
    ids = REAL.token_ids(text, max_tokens=32)
    assert ids[0] == 101
    assert ids[-1] == 102
    assert len(ids) <= 32
    assert all(0 < number < 30_522 for number in ids)
