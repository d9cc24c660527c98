"""Texts for the phrase vocabulary: one normal form, cut into words, digits and marks with the joints between them.

A joint is a space or nothing. The adjacent characters determine the usual joint, such as no space before a comma. A
flag marks a word after an unusual joint.

Letters: T texts, N words of all texts.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Symbols = npt.NDArray[np.int64]
# A text and whether the joint before it is unusual.
Piece = tuple[str, bool]

LONGEST_WORD = 32  # characters; a longer run is cut, so that no text is slow

_CLOSING = frozenset(".,;:!?)]}%'’”-/")
_OPENING = frozenset("([{'’“-/#$@")
_ROUNDS = 8


class _Cleaned(dict[int, str | None]):
    def __missing__(self, code: int) -> str | None:
        kind = unicodedata.category(chr(code))
        self[code] = None if kind == "Cf" else " " if kind in ("Cc", "Cs", "Zs", "Zl", "Zp") else chr(code)
        return self[code]


class _Classes(dict[int, str]):
    """Character classes: "a" letters with their marks, "0" numbers, "c" ideographs, "." all others."""

    def __missing__(self, code: int) -> str:
        kind = unicodedata.category(chr(code))[0]
        self[code] = (
            " " if code == 32 else "c" if _is_ideograph(code) else {"L": "a", "M": "a", "N": "0"}.get(kind, ".")
        )
        return self[code]


_CLEANED = _Cleaned()
_CLASSES = _Classes()
_WORD = re.compile(f"a{{1,{LONGEST_WORD}}}|0{{1,{LONGEST_WORD}}}|[c.]")


def normalised(text: str) -> str:
    """The text in lower case and NFKC, without control characters, with single inner spaces. Idempotent."""
    if text.isascii():
        return " ".join(text.lower().translate(_CLEANED).split())
    for _ in range(_ROUNDS):  # lower case may decompose, and composition may give capitals: repeat until stable
        before = text
        text = " ".join(unicodedata.normalize("NFKC", text.lower()).translate(_CLEANED).split())
        if text == before:
            break
    return text


def usual_space(left: str, right: str) -> bool:
    """Whether two words usually have a space between them."""
    return not (right in _CLOSING or left in _OPENING or _is_ideograph(ord(left)) or _is_ideograph(ord(right)))


def is_whole(phrase: str) -> bool:
    """Whether the phrase begins with no closing mark, ends with no opening mark, and has brackets in pairs."""
    return not (
        phrase[0] in _CLOSING
        or phrase[-1] in _OPENING
        or any(phrase.count(a) != phrase.count(b) for a, b in ("()", "[]", "{}"))
    )


def is_alphanumeric(character: str) -> bool:
    """Whether the character is a letter, mark or number, but no ideograph, which is a word by itself."""
    return _CLASSES[ord(character)] in "a0"


@dataclass(kw_only=True, slots=True)
class Words:
    """Words numbered by first occurrence, after the words of `known`."""

    known: "Words | None" = None
    _ids: dict[str, int] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._names) + (len(self.known) if self.known else 0)

    def number(self, word: str) -> int:
        """The word's number; a new word gets the next number."""
        found = None if self.known is None else self.known._ids.get(word)
        if found is None:
            found = self._ids.get(word)
            if found is None:
                found = self._ids[word] = len(self)
                self._names.append(word)
        return found

    def name(self, number: int) -> str:
        if self.known is not None:
            if number < len(self.known):
                return self.known.name(number)
            number -= len(self.known)
        return self._names[number]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Texts as flat symbols.

    Shapes: symbols (N,) int64, 2 * word number + (1 if the joint before is unusual); starts (T + 1,) int64: text t's
    begin in symbols.
    """

    symbols: Symbols
    starts: npt.NDArray[np.int64]


def cut(texts: Iterable[str], words: Words) -> Cut:
    """Cut normalised texts; new words get numbers in `words`."""
    symbols: list[int] = []
    starts = [0]
    usual: dict[tuple[str, str], bool] = {}
    for text in texts:
        end, last = 0, ""
        for match in _WORD.finditer(text.translate(_CLASSES)):
            start = match.start()
            first = text[start]
            if last:
                joint = (last, first)
                expected = usual.get(joint)
                if expected is None:
                    expected = usual[joint] = usual_space(last, first)
                unusual = (start > end) is not expected
            else:
                unusual = False
            end = match.end()
            symbols.append(2 * words.number(text[start:end]) + unusual)
            last = text[end - 1]
        starts.append(len(symbols))
    return Cut(symbols=np.array(symbols, dtype=np.int64), starts=np.array(starts, dtype=np.int64))


def spelled(forms: Sequence[Piece]) -> Cut:
    """Words as flat characters, 2 * code point + flag. The first character has the word's flag; all others have flag 1,
    as in "##ing".
    """
    starts = np.cumsum([0, *(len(word) for word, _ in forms)])
    codes = np.frombuffer("".join(word for word, _ in forms).encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
    symbols = 2 * codes + 1
    symbols[starts[:-1]] -= ~np.array([unusual for _, unusual in forms], dtype=bool)
    return Cut(symbols=symbols, starts=starts)


def word_ends(symbols: Symbols, alphanumeric: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether a word boundary follows each position (N,): "vitamin b12" has none between b and 12.

    alphanumeric (N,): whether the word at a position is letters or digits.
    """
    ends = np.ones(len(symbols), dtype=bool)
    ends[:-1] = ~(((symbols[1:] & 1) == 1) & alphanumeric[1:] & alphanumeric[:-1])
    return ends


def joined(words: Iterable[Piece]) -> str:
    text = ""
    parts: list[str] = []
    for word, unusual in words:
        if text and usual_space(text[-1], word[0]) is not unusual:
            parts.append(" ")
        parts.append(word)
        text = word
    return "".join(parts)


def _is_ideograph(code: int) -> bool:
    return (
        0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code <= 0x3FFFF
    )
