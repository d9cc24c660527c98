"""Ask every text source in one call, with a circuit breaker per source. A source that is not loaded is no failure."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.algorithms.rules.filters import ItemFilter
from services.gateway.breaker import Breaker
from services.gateway.ports import TextSources
from services.gateway.search.searching import SOURCES, SourceHits, SourceTime
from services.gateway.stages import Limits
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, FreshetError, PreconditionFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAnswer:
    """A source's hits, or its error."""

    source: str
    milliseconds: float
    hits: SourceHits | None = None
    error: FreshetError | None = None

    @property
    def failed(self) -> bool:
        """Whether a loaded source did not answer."""
        return self.error is not None and not isinstance(self.error, PreconditionFailed)

    @property
    def time(self) -> SourceTime:
        failure = "" if self.error is None else self.error.message
        return SourceTime(source=self.source, milliseconds=self.milliseconds, failure=failure)


class TextRetrieval:
    """Asks text sources."""

    def __init__(self, sources: TextSources, limits: Limits) -> None:
        self._sources, self._timeout_s = sources, limits.stage_timeout_s
        self._breakers = {name: Breaker(f"text source {name}", open_seconds=limits.breaker_s) for name in SOURCES}

    async def find(self, query: str, *, k: int, filter: ItemFilter, left_s: float) -> list[SourceAnswer]:
        """Return the answers in the order of SOURCES; raise no FreshetError. left_s: the caller's remaining time."""
        began = time.monotonic()
        timeout_s = min(self._timeout_s, left_s)
        patient = timeout_s >= self._timeout_s
        answers: dict[str, SourceHits | FreshetError] = {}
        probes: dict[str, bool] = {}
        for source in SOURCES:
            try:
                if timeout_s <= 0:
                    raise DeadlineExceeded(f"{source}: no time left to ask it")
                probes[source] = self._breakers[source].admit()
            except FreshetError as exc:
                answers[source] = exc
        try:
            if probes:
                answers |= await self._ask(list(probes), query, k=k, filter=filter, timeout_s=timeout_s)
        except BaseException as exc:
            for source, probe in probes.items():
                self._breakers[source].end(exc, probe=probe, patient=patient)
            raise
        for source, probe in probes.items():
            # A source that is not loaded is no outage.
            error = _error(answers[source])
            outage = None if isinstance(error, PreconditionFailed) else error
            self._breakers[source].end(outage, probe=probe, patient=patient)
        spent_ms = (time.monotonic() - began) * 1000
        return [
            SourceAnswer(
                source=source,
                milliseconds=answer.milliseconds if isinstance(answer, SourceHits) else spent_ms,
                hits=answer if isinstance(answer, SourceHits) else None,
                error=_error(answer),
            )
            for source, answer in ((source, answers[source]) for source in SOURCES)
        ]

    async def _ask(
        self, sources: Sequence[str], query: str, *, k: int, filter: ItemFilter, timeout_s: float
    ) -> Mapping[str, SourceHits | FreshetError]:
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._sources.find(sources, query, k=k, filter=filter, timeout_s=timeout_s)
        except TimeoutError:
            late = f"no answer within {timeout_s * 1000:.0f} ms"
            return {source: DeadlineExceeded(f"{source}: {late}") for source in sources}
        except FreshetError as exc:
            return dict.fromkeys(sources, exc)
        unknown = "the generator does not know it"
        return {source: found.get(source, DependencyUnavailable(f"{source}: {unknown}")) for source in sources}


def _error(answer: SourceHits | FreshetError) -> FreshetError | None:
    return answer if isinstance(answer, FreshetError) else None


def no_source(answers: Sequence[SourceAnswer]) -> FreshetError:
    """Return the error for a search that no source answered: of the class of all errors, else DependencyUnavailable."""
    errors = [answer.error for answer in answers if answer.error is not None]
    reasons = "; ".join(dict.fromkeys(error.message for error in errors))
    kinds = {type(error) for error in errors if not isinstance(error, PreconditionFailed)} or {PreconditionFailed}
    kind = kinds.pop() if len(kinds) == 1 else DependencyUnavailable
    return kind(f"no source of items by words answered: {reasons}")


def without_seen(wanted: ItemFilter, seen: Sequence[str]) -> ItemFilter:
    """Exclude seen items by id, since sources know no users."""
    if not wanted.exclude_seen or not seen:
        return wanted
    return replace(wanted, deny_item_ids=(*wanted.deny_item_ids, *seen))
