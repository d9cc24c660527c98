"""How long identifiers are in tokens, by tokenizer and vocabulary size (PIXAR, Table 6).

The question: how much shorter is an identifier in phrases than in a language model's own word pieces, and how does
that fall with the vocabulary? Measured on MedQuAD's questions, film titles and real search queries, the texts that the
vocabulary was built for, as in the paper.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from services.offline.datasets.locate import Locator
from services.offline.datasets.texts import IDENTIFIER_TEXTS, identifier_texts
from services.offline.evaluation.text.trained import TOKENIZERS
from services.offline.training.phrases.identifiers import TargetTokenizer

Row = dict[str, Any]

SIZES = {
    "medquad-questions": (2_000, 8_000, 32_000),
    "ml-25m-titles": (8_000, 32_000, 128_000),
    "queries": (8_000, 32_000, 128_000),
}
_QUICK_TEXTS = 4_000
_QUICK_SIZES = (2_000,)
_PIECES = "word pieces"


def rows(*, quick: bool, locator: Locator | None = None, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Mean and 99th percentile of the lengths, per set, tokenizer and size; the share of the word pieces' mean."""
    found = []
    for name in IDENTIFIER_TEXTS:
        texts = identifier_texts(name, locator)
        texts = texts[:_QUICK_TEXTS] if quick else texts
        say(f"{name}: word pieces")
        pieces = _row(name, texts, _PIECES, 0, base=None)
        base = float(pieces["mean"])
        found.append(pieces | {"share_of_word_pieces": 1.0})
        for size in _QUICK_SIZES if quick else SIZES[name]:
            for kind in TOKENIZERS:
                if kind != _PIECES:
                    say(f"{name}: {kind}, {size:,}")
                    found.append(_row(name, texts, kind, size, base=base))
    return found


def lengths(tokenizer: TargetTokenizer, texts: Sequence[str]) -> tuple[float, float]:
    """Mean and 99th percentile of the numbers of tokens. Raises: ValueError for no texts."""
    if not texts:
        raise ValueError("texts has 0 entries; allowed: 1 or more")
    counts = np.array([len(tokens) for tokens in tokenizer.encode_all(texts)])
    return float(counts.mean()), float(np.percentile(counts, 99))


def _row(name: str, texts: Sequence[str], kind: str, size: int, *, base: float | None) -> Row:
    began = time.perf_counter()
    tokenizer = TOKENIZERS[kind](texts, size)
    built = time.perf_counter()
    mean, high = lengths(tokenizer, texts)
    return {
        "table": "lengths",
        "data": name,
        "texts": len(texts),
        "tokenizer": kind,
        "asked_size": size or None,
        "size": len(tokenizer),
        "mean": mean,
        "p99": high,
        "share_of_word_pieces": mean / base if base else None,
        "build_seconds": round(built - began, 1),
        "encode_seconds": round(time.perf_counter() - built, 1),
    }
