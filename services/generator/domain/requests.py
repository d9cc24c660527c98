"""Requests and answers of the generator as dataclasses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.algorithms.rules.filters import ItemFilter

TEXT_MOL, PHRASES, LEXICAL = "text_mol", "phrases", "lexical"
MAX_K = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One query in words. filter: excludes no seen items, since the query has no user."""

    query: str
    k: int
    filter: ItemFilter


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Items, best first, with the source's own scores; from a generating source also one identifier per item."""

    item_ids: Sequence[str]
    scores: Sequence[float]
    identifiers: Sequence[str] = ()


class TextSource(Protocol):
    """Finds items by words. `find` runs in one worker thread; other threads apply changes."""

    @property
    def num_documents(self) -> int:
        """Number of documents or identifiers."""

    @property
    def num_bytes(self) -> int: ...

    def find(self, asked: Sequence[Asked]) -> Sequence[Scored]:
        """Answer validated queries, in order."""
