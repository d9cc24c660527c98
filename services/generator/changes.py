"""Apply changes of topic `items`, in the follower's thread."""

from collections.abc import Callable, Sequence

from services.contracts.topics.index_deltas import Batch
from services.contracts.topics.items import CatalogueItem
from services.generator.domain.sources import Sources
from services.generator.metrics import GeneratorMetrics


class ItemChanges:
    """A `Listener` of the catalogue's follower for `items` only."""

    def __init__(
        self, sources: Sources, metrics: GeneratorMetrics, *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._sources, self._metrics, self._on_change = sources, metrics, on_change

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        """Apply titles, categories, withdrawals and returns."""
        self._sources.describe(items)
        self._metrics.counted("described", len(items))
        self._on_change()

    def apply(self, batch: Batch, *, is_live: bool) -> bool:
        """Ignore refreshed states, which have no words."""
        del batch, is_live
        return True

    def reset(self) -> None:
        """No state comes from `index-deltas`."""

    def counted(self, kind: str, records: int) -> None:
        """Count records that the follower could not use."""
        self._metrics.counted(kind, records)
