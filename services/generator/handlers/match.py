"""Batch concurrent queries and answer each batch with one source.

Each source has a `Match`, whose thread encodes and searches, so a slow source delays only its callers.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.generator.domain.requests import Asked, Scored, TextSource
from services.generator.metrics import GeneratorMetrics
from services.platform.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    FreshetError,
    PreconditionFailed,
)
from services.platform.threads import Batcher

# Most queries computed together, and most queries that wait.
MAX_BATCH, MAX_QUEUE = 16, 256
# A source's share of a call's time; the rest is for sending the answer.
_SHARE = 0.9


class Match:
    """Answers from one source. reason: why `source` is None. is_ready: whether its topics were read."""

    def __init__(
        self,
        name: str,
        source: TextSource | None,
        *,
        reason: str = "",
        metrics: GeneratorMetrics,
        is_ready: Callable[[], bool],
    ) -> None:
        self.name, self.source, self.reason = name, source, reason
        self._metrics, self._is_ready = metrics, is_ready
        self._batcher: Batcher[Asked, Scored] | None = None
        if source is not None:
            self._batcher = Batcher(
                lambda asked: self._find(source, asked), max_batch=MAX_BATCH, max_queue=MAX_QUEUE, name=name
            )

    async def __call__(self, asked: Asked) -> Scored:
        """Answer a validated query.

        Raises: PreconditionFailed if the source is not loaded; DependencyUnavailable until it is ready; Overloaded;
        errors of the source.
        """
        if self._batcher is None:
            raise PreconditionFailed(f"source {self.name} is not loaded: {self.reason}")
        if not self._is_ready():
            raise DependencyUnavailable(f"source {self.name} is still reading items and clicks; ask again in a moment")
        answer, queue_s = await self._batcher.submit(asked)
        self._metrics.answered(self.name, queue_s=queue_s, num_items=len(answer.item_ids))
        return answer

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()

    def _find(self, source: TextSource, asked: list[Asked]) -> list[Scored]:
        with self._metrics.batch(self.name, len(asked)):
            return list(source.find(asked))


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAnswer:
    """One source's answer, or its error, and its time."""

    source: str
    milliseconds: float
    answer: Scored | FreshetError


async def match_all(matches: Sequence[Match], asked: Asked, *, within_s: float | None) -> list[SourceAnswer]:
    """Return each source's answer to a validated query, or its error, in order. A source has nine tenths of `within_s`.

    Raises: every error that is not a FreshetError.
    """
    began = time.monotonic()

    async def ask(match: Match) -> SourceAnswer:
        answer: Scored | FreshetError
        try:
            async with asyncio.timeout(None if within_s is None else _SHARE * within_s):
                answer = await match(asked)
        except FreshetError as exc:
            answer = exc
        except TimeoutError:
            answer = DeadlineExceeded(f"{match.name}: no answer within {(time.monotonic() - began) * 1e3:.0f} ms")
        return SourceAnswer(source=match.name, milliseconds=(time.monotonic() - began) * 1e3, answer=answer)

    return await asyncio.gather(*(ask(match) for match in matches))
