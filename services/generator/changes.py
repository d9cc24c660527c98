"""What topic `items` changes, in the follower's thread: the table first, then each source that follows it.

The order matters: a source's row is in the table before anybody can find it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.common.index_deltas import Batch
from services.common.items import CatalogueItem
from services.generator.domain.items import ItemTable
from services.generator.domain.lexical import Lexical
from services.generator.domain.phrases import Phrases
from services.generator.metrics import GeneratorMetrics

if TYPE_CHECKING:  # it loads PyTorch, which a process without a text bundle has no need of
    from services.generator.domain.text_mol import TextMol


class ItemChanges:
    """A `Listener` of the catalogue's follower that takes `items` alone."""

    def __init__(
        self,
        items: ItemTable,
        metrics: GeneratorMetrics,
        *,
        lexical: Lexical,
        text: "TextMol | None",
        phrases: Phrases | None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._items, self._metrics, self._on_change = items, metrics, on_change
        self._lexical, self._text, self._phrases = lexical, text, phrases

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Take titles, categories, withdrawals and returns."""
        changes = self._items.describe(items)
        self._lexical.change(changes)
        if self._text is not None:
            self._text.describe(items)
        if self._phrases is not None:
            self._phrases.change(changes)
        self._metrics.counted("described", len(items))
        self._on_change()

    def apply(self, batch: Batch, *, is_live: bool) -> bool:
        """Refreshed states of the user model say nothing of words."""
        del batch, is_live
        return True

    def reset(self) -> None:
        """Nothing of `index-deltas` is held."""

    def counted(self, kind: str, records: int) -> None:
        """Records that the follower could not use."""
        self._metrics.counted(kind, records)
