"""Find: check a query in words, gather concurrent ones, have the source answer all of them at once.

One for each source, so that a slow one keeps nobody waiting but those who asked it. The event loop only checks and
queues; encoding and searching run in the source's own thread.
"""

from typing import Generic, TypeVar

from services.common.batching import Batcher
from services.common.errors import InvalidRequest, PreconditionFailed
from services.common.events import validate_query
from services.generator.domain.requests import MAX_K, Asked, Scored, Source
from services.generator.metrics import GeneratorMetrics

A = TypeVar("A", bound=Scored)


class Match(Generic[A]):
    """Answers from one source, or says why there is none."""

    def __init__(
        self,
        name: str,
        source: Source[A] | None,
        *,
        reason: str = "",
        metrics: GeneratorMetrics,
        max_batch: int,
        max_queue: int,
    ) -> None:
        """`reason`: why `source` is None."""
        self.name, self.source, self.reason = name, source, reason
        self._metrics = metrics
        self._batcher: Batcher[Asked, A] | None = None
        if source is not None:
            self._batcher = Batcher(
                lambda asked: self._find(source, asked), max_batch=max_batch, max_queue=max_queue, name=name
            )

    async def __call__(self, asked: Asked) -> A:
        """Answer one query.

        Raises: InvalidRequest naming the field, PreconditionFailed where the source is not loaded, Overloaded; what
        the source raises.
        """
        validate_query("query", asked.query)
        if not 1 <= asked.k <= MAX_K:
            raise InvalidRequest.of("k", asked.k, f"1-{MAX_K}")
        if self._batcher is None:
            raise PreconditionFailed(f"source {self.name} is not loaded: {self.reason}")
        answer, queue_s = await self._batcher.submit(asked)
        self._metrics.answered(self.name, queue_s=queue_s, num_items=len(answer.item_ids))
        return answer

    async def close(self) -> None:
        """Finish what is queued."""
        if self._batcher is not None:
            await self._batcher.close()

    def _find(self, source: Source[A], asked: list[Asked]) -> list[A]:
        with self._metrics.batch(self.name, len(asked)):
            return list(source.find(asked))
