"""Apply changes of topic `items`, in the follower's thread."""

from collections.abc import Callable, Sequence

from services.catalogue.follower import Listener
from services.contracts.topics.items import CatalogueItem
from services.generator.domain.sources import Sources
from services.generator.metrics import GeneratorMetrics


class ItemChanges(Listener):
    """Gives the sources what the catalogue's follower reads."""

    def __init__(
        self, sources: Sources, metrics: GeneratorMetrics, *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._sources, self._metrics, self._on_change = sources, metrics, on_change

    def describe(self, items: Sequence[CatalogueItem]) -> None:
        self._sources.describe(items)
        self._metrics.counted("described", len(items))
        self._on_change()

    def counted(self, kind: str, records: int) -> None:
        self._metrics.counted(kind, records)
