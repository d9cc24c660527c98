"""The lexical source, and the table of all sources.

The lexical source is BM25 over titles, categories and documents; it finds new items at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.algorithms.text.lexical import LexicalIndex
from services.contracts.topics.items import CatalogueItem
from services.generator.domain.items import Changes, ItemTable
from services.generator.domain.phrases import Phrases
from services.generator.domain.requests import LEXICAL, PHRASES, TEXT_MOL, Asked, Scored, TextSource
from services.generator.domain.text_mol import TextMol


class Lexical:
    """Answers from the items' present words."""

    def __init__(self, items: ItemTable) -> None:
        self._items = items
        self._index = LexicalIndex(items.words())

    @property
    def num_documents(self) -> int:
        return self._index.num_documents

    @property
    def num_bytes(self) -> int:
        return self._index.nbytes

    def find(self, asked: Sequence[Asked]) -> list[Scored]:
        answers = []
        for one in asked:
            rows, scores = self._index.search(one.query, one.k, self._items.allowed(one.filter))
            answers.append(Scored(item_ids=self._items.ids(rows.tolist()), scores=scores.tolist()))
        return answers

    def change(self, changes: Changes) -> None:
        if changes.words or changes.hidden:
            self._index.change(changes.words, sorted(changes.hidden))


@dataclass(kw_only=True, slots=True)
class Sources:
    """The sources. reasons: why a source is not loaded. One thread describes items; any number read."""

    items: ItemTable
    lexical: Lexical
    text_version: str
    text: TextMol | None = None
    phrases: Phrases | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def by_name(self) -> Mapping[str, TextSource | None]:
        return {TEXT_MOL: self.text, PHRASES: self.phrases, LEXICAL: self.lexical}

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Apply descriptions and withdrawals, to the table first: sources find rows of the table."""
        changes = self.items.describe(items)
        self.lexical.change(changes)
        if self.text is not None:
            self.text.describe(items)
        if self.phrases is not None:
            self.phrases.change(changes)
