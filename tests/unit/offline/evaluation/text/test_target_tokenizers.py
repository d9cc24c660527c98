"""The tokenizers that the phrase vocabulary is measured against: same texts, padding at zero, nothing unwritable."""

from collections.abc import Callable, Sequence

import pytest

from services.algorithms.models.sentence_encoder import model_folder
from services.offline.evaluation.text.target_tokenizers import (
    WordPieceTokenizer,
    bpe_tokenizer,
    unigram_tokenizer,
    word_tokenizer,
)
from services.offline.training.phrases.identifiers import TargetTokenizer

TEXTS = [
    f"what are the {what} of {illness}?"
    for what in ("symptoms", "causes", "treatments", "stages")
    for illness in ("diabetes", "lymphoblastic leukemia", "whooping cough", "psoriasis", "psoriatic arthritis")
]
SIZE = 420
MAKERS: dict[str, Callable[[Sequence[str]], TargetTokenizer]] = {
    "word": lambda texts: word_tokenizer(texts, size=SIZE, min_count=2),
    "bpe": lambda texts: bpe_tokenizer(texts, size=SIZE),
    "unigram": lambda texts: unigram_tokenizer(texts, size=SIZE),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_baseline_has_at_most_the_size_asked_for_and_padding_first(name: str) -> None:
    made = MAKERS[name](TEXTS)

    assert 257 < len(made) <= SIZE
    assert made.phrase(0) == ""
    with pytest.raises(ValueError, match=f"token={len(made)}"):
        made.phrase(len(made))


@pytest.mark.parametrize("name", MAKERS)
def test_a_baseline_does_not_depend_on_the_order_of_the_texts(name: str) -> None:
    assert MAKERS[name](TEXTS).fingerprint == MAKERS[name](TEXTS[::-1]).fingerprint


@pytest.mark.parametrize("name", MAKERS)
def test_a_baseline_writes_texts_that_it_never_saw_without_padding(name: str) -> None:
    made = MAKERS[name](TEXTS)

    encoded = made.encode_all(["漢字 [PAD] é 👩‍👧", "", "\x00"])

    assert encoded[0]
    assert 0 not in encoded[0]
    assert encoded[1:] == [[], []]


@pytest.mark.parametrize("name", MAKERS)
def test_frequent_words_are_one_token(name: str) -> None:
    assert len(MAKERS[name](TEXTS).encode_all(["what are the symptoms of"])[0]) == 5


def test_word_pieces_are_those_of_the_encoder_without_its_marks() -> None:
    words = (model_folder() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    made = WordPieceTokenizer(words)

    [tokens] = made.encode_all(["Lymphoblastic leukemia"])

    assert [made.phrase(token) for token in tokens] == ["l", "##ym", "##ph", "##ob", "##lastic", "leukemia"]
    assert len(made) == 30_522
    assert made.phrase(0) == ""
