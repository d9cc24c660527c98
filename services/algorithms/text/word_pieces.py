"""BERT's uncased word pieces without PyTorch: from a query to the input of the text encoders.

The text is lower-cased, stripped of accents and split at punctuation; words are split into the longest known pieces.
Both encoders of a text bundle read these ids. The fingerprint shows a model's word list.

Letters: B texts, L tokens of the longest of them.
"""

import hashlib
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

MAX_TOKENS = 256
_LONGEST_WORD = 100
# New words never cease: at this many, the cache is cleared.
_REMEMBERED_WORDS = 200_000
# A text is cut to this many characters per token, to bound a huge one. No word piece of BERT's lists is longer, and a
# run of white space rarely is.
_CHARACTERS_PER_TOKEN = 64
_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")


class WordPieces:
    """A tokenizer over a word list: the row is the id; [PAD] is row 0."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises: ValueError if a special token is missing, or [PAD] is not first."""
        self._ids = {word: row for row, word in enumerate(words)}
        missing = [token for token in _SPECIAL if token not in self._ids]
        if missing:
            raise ValueError(f"word list of {len(words)} rows lacks {', '.join(missing)}; it needs {_SPECIAL}")
        if self._ids["[PAD]"] != 0:
            raise ValueError(f"[PAD] is row {self._ids['[PAD]']} of the word list; allowed: 0")
        self.words = tuple(words)
        self.fingerprint = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
        self._known: dict[str, list[int]] = {}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a `vocab.txt`. Raises: ValueError with the file if it is missing, not UTF-8, or not such a list."""
        try:
            return cls(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
        except FileNotFoundError as exc:
            raise ValueError(f"{path} is missing; it holds one word piece per line") from exc
        except ValueError as exc:  # also a text that is not UTF-8
            raise ValueError(f"{path}: {exc}") from exc

    def __len__(self) -> int:
        return len(self._ids)

    def token_ids(self, text: str, *, max_tokens: int = MAX_TOKENS) -> list[int]:
        """Ids of [CLS], the text's pieces and [SEP]: at most `max_tokens`."""
        wanted = max_tokens - 2
        pieces: list[int] = []
        for word in _words(text[: _CHARACTERS_PER_TOKEN * max_tokens]):
            if len(pieces) >= wanted:
                break
            if word not in self._known:
                if len(self._known) >= _REMEMBERED_WORDS:
                    self._known.clear()
                self._known[word] = self._pieces(word)
            pieces += self._known[word]
        return [self._ids["[CLS]"], *pieces[:wanted], self._ids["[SEP]"]]

    def batch(self, texts: Sequence[str], *, max_tokens: int = MAX_TOKENS) -> tuple[Tokens, Tokens]:
        """Input ids (B, L), zero at padding, and attention mask (B, L), 1 at tokens."""
        return padded([self.token_ids(text, max_tokens=max_tokens) for text in texts])

    def _pieces(self, word: str) -> list[int]:
        unknown = [self._ids["[UNK]"]]
        if len(word) > _LONGEST_WORD:
            return unknown
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self._ids:
                    break
            else:
                return unknown
            found.append(self._ids[piece])
            start = end
        return found


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tokens, Tokens]:
    """B rows of ids as ids (B, L), zero at padding, and mask (B, L), 1 at tokens."""
    longest = max((len(row) for row in rows), default=0)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return ids, mask


def _words(text: str) -> list[str]:
    spaced = []
    for char in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(char)
        if kind == "Mn" or (kind in ("Cc", "Cf", "Cs") and char not in "\t\n\r") or char == "\ufffd":
            continue
        if _is_punctuation(char, kind) or _is_cjk(ord(char)):
            spaced.append(f" {char} ")
        else:
            spaced.append(" " if char.isspace() else char)
    return "".join(spaced).split()


def _is_punctuation(char: str, kind: str) -> bool:
    # BERT treats every ASCII mark as punctuation, also Unicode's symbols ("$", "+").
    return kind.startswith("P") or (char.isascii() and char.isprintable() and not char.isalnum() and char != " ")


def _is_cjk(code: int) -> bool:
    return (
        0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code <= 0x2FA1F
    )
