"""A tiny phrase model: five words, a word per token, an encoder of two narrow layers with drawn weights."""

import torch

from services.algorithms.models.text_bodies import BertBody, BodyShape
from services.algorithms.text.word_pieces import WordPieces
from services.offline.training.models.phrase_nar import PhraseEncoder

COLOURS = ("red", "green", "blue", "white", "black")
THINGS = ("house", "river", "horse", "ship", "stone")
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "show", "a", "me", *COLOURS, *THINGS)


class WordTokens:
    """A target tokenizer whose tokens are the words above; other words are passed over."""

    fingerprint = "words"
    _words = ("", *COLOURS, *THINGS)

    def __len__(self) -> int:
        return len(self._words)

    def encode_all(self, texts):
        return [[self._words.index(word) for word in text.split() if word in self._words[1:]] for text in texts]

    def phrase(self, token):
        return self._words[token]


def tiny_encoder(positions: int) -> tuple[PhraseEncoder, WordPieces]:
    shape = BodyShape(vocabulary=len(PIECES), width=32, layers=2, heads=4, inner=64, epsilon=1e-12, max_positions=16)
    body = BertBody(shape)
    torch.nn.init.normal_(body.segment, std=0.1)
    return PhraseEncoder(body, positions=positions, max_tokens=16), WordPieces(PIECES)


def corpus() -> tuple[list[tuple[str, int]], list[list[str]]]:
    """25 documents named "red house" ...; each asked for in two ways."""
    documents = [[f"{colour} {thing}"] for colour in COLOURS for thing in THINGS]
    pairs = [(f"{ask} {document[0]}", row) for row, document in enumerate(documents) for ask in ("show me a", "a")]
    return pairs, documents
