"""BERT's uncased word pieces, which turn a query into the text encoders' input.

Both encoders of a text bundle read token ids from here. The fingerprint identifies a word list.

Letters: B texts, L tokens of the longest of them.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

MAX_TOKENS = 256
_LONGEST_WORD = 100
# A text is cut to this many characters per token, to bound the work on a huge text. Word pieces of BERT's lists are
# shorter, and white space between words rarely is longer.
_CHARACTERS_PER_TOKEN = 64
_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")


class WordPieces:
    """A tokenizer over a word list. A word's row is its id; [PAD] is row 0."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raise ValueError if a special token is missing, or [PAD] is not first."""
        self._ids = {word: row for row, word in enumerate(words)}
        missing = [token for token in _SPECIAL if token not in self._ids]
        if missing:
            raise ValueError(f"word list of {len(words)} rows lacks {', '.join(missing)}; it needs {_SPECIAL}")
        if self._ids["[PAD]"] != 0:
            raise ValueError(f"[PAD] is row {self._ids['[PAD]']} of the word list; allowed: 0")
        self.words = tuple(words)
        self.fingerprint = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
        # Only processes with the extra "generate" or "train" have the package.
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        model = models.WordPiece(self._ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = normalizers.BertNormalizer()
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

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
        start = text[: _CHARACTERS_PER_TOKEN * max_tokens].encode(errors="ignore").decode()  # without surrogates
        pieces = self._tokenizer.encode(start, add_special_tokens=False).ids
        return [self._ids["[CLS]"], *pieces[: max(0, max_tokens - 2)], self._ids["[SEP]"]]

    def batch(self, texts: Sequence[str], *, max_tokens: int = MAX_TOKENS) -> tuple[Tokens, Tokens]:
        """Input ids (B, L), zero at padding, and attention mask (B, L), 1 at tokens."""
        return padded([self.token_ids(text, max_tokens=max_tokens) for text in texts])


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tokens, Tokens]:
    """Pad B rows of ids to ids (B, L), zero at padding; return them with mask (B, L), 1 at tokens."""
    longest = max((len(row) for row in rows), default=0)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return ids, mask
