"""The generating source: the most probable item identifiers of one parallel pass of the phrase model (PIXAR).

Every answer is an identifier in the trie, so it names catalogue items. Queries find a new title's identifier at once.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import structlog

from services.algorithms.generation.generator import Answer, Generator
from services.algorithms.generation.vocabulary import PhraseVocabulary
from services.algorithms.scoring.states import FloatArray
from services.generator.domain.items import Changes, ItemTable
from services.generator.domain.requests import Asked, Scored

log = structlog.get_logger()

# Queries (B,) to the model's output (B, 1 + s, D), and which of them have a word (B,).
EncodeAll = Callable[[Sequence[str]], tuple[FloatArray, npt.NDArray[np.bool_]]]

# Several identifiers may name one item, so the requested number of identifiers is doubled until there are k items, at
# most this many times.
_DOUBLINGS = 3


class Phrases:
    """Answers while one thread inserts titles. on_left_out: called for a title with more phrases than positions."""

    def __init__(
        self,
        generator: Generator,
        vocabulary: PhraseVocabulary,
        items: ItemTable,
        *,
        encode_all: EncodeAll,
        on_left_out: Callable[[], None] = lambda: None,
    ) -> None:
        self._generator, self._vocabulary, self._items = generator, vocabulary, items
        self._encode_all, self._on_left_out = encode_all, on_left_out
        self._inserted: dict[int, int] = {}  # identifiers inserted here, by row

    @property
    def num_documents(self) -> int:
        return len(self._generator.trie)

    @property
    def num_bytes(self) -> int:
        parts = (self._generator.output_layer, self._generator.shortlist, self._generator.trie)
        return sum(part.nbytes for part in parts) + self._generator.identifiers.nbytes

    @property
    def vocabulary_size(self) -> int:
        return len(self._vocabulary)

    def find(self, asked: Sequence[Asked]) -> list[Scored]:
        """Return the k items with the best identifiers, each with its best one; nothing for a query without words."""
        outputs, has_words = self._encode_all([one.query for one in asked])
        return [
            self._find(one, x if words else None)
            for one, x, words in zip(asked, outputs, has_words.tolist(), strict=True)
        ]

    def change(self, changes: Changes) -> None:
        """Apply changed titles: delete the identifier that was inserted before, and insert the new one."""
        for row, title in changes.titles.items():
            tokens = self._vocabulary.encode_all([title])[0]
            before = self._inserted.pop(row, None)
            if before is not None:
                self._generator.delete(before)
            if not tokens:
                continue
            try:
                self._inserted[row] = self._generator.insert(title, tokens, [row])
            except ValueError as exc:
                self._on_left_out()
                log.warning("title_not_generated", item_row=row, reason=str(exc))

    def _find(self, asked: Asked, x: FloatArray | None) -> Scored:
        if x is None:
            return Scored(item_ids=[], scores=[])
        allowed = self._items.allowed(asked.filter)
        results = asked.k
        for _ in range(1 + _DOUBLINGS):
            found = self._generator.generate(x, results, allowed)
            best = _best_of_items(found.answers, asked.k)
            if len(best) == asked.k or len(found.answers) < results:
                break
            results *= 2
        rows = list(best)
        return Scored(
            item_ids=self._items.ids(rows),
            scores=[best[row].score for row in rows],
            identifiers=[best[row].text for row in rows],
        )


def _best_of_items(answers: Sequence[Answer], k: int) -> dict[int, Answer]:
    best: dict[int, Answer] = {}
    for answer in answers:
        for row in answer.item_rows.tolist():
            best.setdefault(row, answer)
            if len(best) == k:
                return best
    return best
