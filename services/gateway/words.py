"""Asks every source of items by words at once, within one limit of time, each behind a breaker of its own.

A source that is not loaded is no failure: it says so and the others' answer is whole. One that is loaded and did not
answer is named with the reason. Search fuses what was found; Recommend takes it into its pool.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.common.errors import DeadlineExceeded, DependencyUnavailable, FreshetError, PreconditionFailed
from services.gateway.breaker import Breaker
from services.gateway.domain import Filter
from services.gateway.ports import TextSources
from services.gateway.searching import SOURCES, Found, SourceTime


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAnswer:
    """What one source said: `found`, or None with the error; `is_loaded` False says that there is no such source."""

    source: str
    milliseconds: float
    found: Found | None = None
    error: FreshetError | None = None

    @property
    def is_loaded(self) -> bool:
        return not isinstance(self.error, PreconditionFailed)

    @property
    def failed(self) -> bool:
        """Whether a source that there is did not answer."""
        return self.error is not None and self.is_loaded

    @property
    def time(self) -> SourceTime:
        """For the answer's provenance."""
        failure = "" if self.error is None else self.error.message
        return SourceTime(source=self.source, milliseconds=self.milliseconds, failure=failure)


class Words:
    """One per process, called concurrently. timeout_s: what a well source is given at most."""

    def __init__(self, sources: TextSources, *, timeout_s: float, breaker_seconds: float = 0.5) -> None:
        self._sources = sources
        self._timeout_s = timeout_s
        self._breakers = {name: Breaker(f"text source {name}", open_seconds=breaker_seconds) for name in SOURCES}

    async def find(self, query: str, *, k: int, filter: Filter, left_s: float) -> list[SourceAnswer]:
        """Every source's answer, in the order of SOURCES; never raises an error of the tree.

        left_s: what the caller's deadline leaves for this.
        """
        timeout_s = min(self._timeout_s, left_s)
        together = _Together(
            lambda sources: self._sources.find(sources, query, k=k, filter=filter, timeout_s=timeout_s)
        )
        return await asyncio.gather(*(self._ask(source, together, timeout_s) for source in SOURCES))

    async def _ask(self, source: str, together: "_Together", timeout_s: float) -> SourceAnswer:
        began = time.monotonic()

        async def call() -> Found | PreconditionFailed:
            try:
                async with asyncio.timeout(timeout_s):
                    return await together(source)
            except PreconditionFailed as exc:
                # It is there and has nothing to search in: that is no outage for the breaker.
                return exc
            except TimeoutError as exc:
                raise DeadlineExceeded(f"{source}: no answer within {timeout_s * 1000:.0f} ms") from exc

        found: Found | None = None
        error: FreshetError | None = None
        try:
            if timeout_s <= 0:
                raise DeadlineExceeded(f"{source}: no time left to ask it")
            answer = await self._breakers[source].run(call, patient=timeout_s >= self._timeout_s)
            if isinstance(answer, PreconditionFailed):
                error = answer
            else:
                found = answer
        except FreshetError as exc:
            error = exc
        milliseconds = (time.monotonic() - began) * 1000 if found is None else found.milliseconds
        return SourceAnswer(source=source, milliseconds=milliseconds, found=found, error=error)


class _Together:
    """One call for all the sources that are asked in one turn of the event loop: those whose breakers let them."""

    def __init__(self, find: Callable[[Sequence[str]], Awaitable[Mapping[str, Found | FreshetError]]]) -> None:
        self._find = find
        self._waiting: dict[str, asyncio.Future[Found]] = {}
        self._call: asyncio.Task[None] | None = None

    async def __call__(self, source: str) -> Found:
        """What `source` found. Raises: its error, or that of the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Found] = loop.create_future()
        self._waiting[source] = future
        if self._call is None:
            self._call = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        found: Mapping[str, Found | FreshetError] = {}
        failure: Exception | None = None
        try:
            found = await self._find(list(self._waiting))
        except Exception as exc:
            failure = exc
        for source, future in self._waiting.items():
            said = found.get(source, failure or DependencyUnavailable(f"{source}: the generator does not know it"))
            if future.done():
                continue
            if isinstance(said, Found):
                future.set_result(said)
            else:
                future.set_exception(said)


def no_source(answers: Sequence[SourceAnswer]) -> FreshetError:
    """The error of an answer that no source contributed to: their own where they agree, else UNAVAILABLE."""
    errors = [answer.error for answer in answers if answer.error is not None]
    reasons = "; ".join(dict.fromkeys(error.message for error in errors))
    message = f"no source of items by words answered: {reasons}"
    kinds = {type(error) for error in errors if not isinstance(error, PreconditionFailed)} or {PreconditionFailed}
    kind = kinds.pop() if len(kinds) == 1 else DependencyUnavailable
    return kind(message)


def without_seen(wanted: Filter, seen: Sequence[str]) -> Filter:
    """The filter for sources that know no users: what was seen is denied by id, where it is to be left out."""
    if not wanted.exclude_seen or not seen:
        return wanted
    return replace(wanted, deny_item_ids=(*wanted.deny_item_ids, *seen))
