"""The lexical source: BM25 over titles, categories and documents. It finds new items at once."""

from collections.abc import Sequence

from services.algorithms.text.lexical import LexicalIndex
from services.generator.domain.items import Changes, ItemTable
from services.generator.domain.requests import Asked, Scored


class Lexical:
    """Answers from the items' present words."""

    def __init__(self, items: ItemTable, *, text_version: str) -> None:
        self._items, self._text_version = items, text_version
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
            answers.append(
                Scored(item_ids=self._items.ids(rows.tolist()), scores=scores.tolist(), text_version=self._text_version)
            )
        return answers

    def change(self, changes: Changes) -> None:
        if changes.words or changes.hidden:
            self._index.change(changes.words, sorted(changes.hidden))
