"""GetFreshness, GetHealth and the dead letters, for people on call.

GetFreshness and GetHealth ask all components at once, and report those that do not answer. An unavailable component is
no error, because both RPCs are needed most during an outage.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from services.contracts.dead_letters import LETTERED, Replayed
from services.contracts.processes import EFFECTS
from services.contracts.topics.dead_letters import StoredLetter
from services.gateway.domain import Degradation
from services.gateway.metrics import MINUTES, PARTS, Minutes
from services.gateway.ports import UNKNOWN, DeadLetterLog, PartitionProgress, Ports, ServedIndex
from services.platform.errors import FreshetError, InvalidRequest
from services.platform.stream.records import Position
from services.user_state.values import Progress

log = structlog.get_logger()

T = TypeVar("T")

# Time limit for the processes of a version set to report what they serve.
_CHECK_S = 4.0
# Time limit for each component except the state store; longer than Recommend's, since a busy one is not unavailable.
_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessReport:
    """The answer. interactions: progress of user states. attributions: progress of item states."""

    model_version: str
    epoch: str
    interactions: Sequence[PartitionProgress]
    attributions: Sequence[PartitionProgress]
    candidates: ServedIndex | None
    reranker: ServedIndex | None
    degradations: Sequence[Degradation]


@dataclass(frozen=True, slots=True, kw_only=True)
class GetFreshness:
    """GetFreshness."""

    ports: Ports
    model_version: str

    async def __call__(self) -> FreshnessReport:
        """Return the current positions, versions and degradations."""
        progress, ends, candidates, reranker, (attributions, all_refreshers) = await asyncio.gather(
            _or_none(self.ports.states.read_progress()),
            _or_none(self.ports.ends.interactions(_TIMEOUT_S)),
            _or_none(self.ports.candidates.served(_TIMEOUT_S)),
            _or_none(self.ports.reranker.served(_TIMEOUT_S)),
            self.ports.refreshers.folded(_TIMEOUT_S),
        )
        marks = {
            Degradation.STATE_STORE_DOWN: progress is None,
            Degradation.STALE_STATE: not self.ports.stream.encoder_serving,
            Degradation.NOT_FRESH: ends is None or not all_refreshers,
            Degradation.POPULAR_FALLBACK: candidates is None,
            Degradation.FIRST_STAGE_ORDER: reranker is None,
        }
        epoch, applied = progress or (None, {})
        return FreshnessReport(
            model_version=self.model_version,
            epoch=epoch or "",
            interactions=_interactions(applied, ends or {}),
            attributions=_newest(attributions),
            candidates=candidates,
            reranker=reranker,
            degradations=[kind for kind, is_set in marks.items() if is_set],
        )


async def check_processes(ports: Ports, model_version: str) -> str:
    """Return why candidates, reranker and refreshers do not serve this model; "" if they do."""

    async def ask(name: str, asked: Awaitable[ServedIndex]) -> str:
        try:
            await asked
        except FreshetError as exc:
            return f"{name}: no process that serves model {model_version} answers: {exc.message}"
        return ""

    *problems, (_, all_refreshers) = await asyncio.gather(
        ask("candidates", ports.candidates.served(_CHECK_S)),
        ask("reranker", ports.reranker.served(_CHECK_S)),
        ports.refreshers.folded(_CHECK_S),
    )
    return "; ".join(filter(None, (*problems, "" if all_refreshers else "refresher: not every one answers")))


def _interactions(progress: Mapping[int, Progress], ends: Mapping[int, int]) -> list[PartitionProgress]:
    return [
        PartitionProgress(partition=partition, applied_offset=one.watermark, end_offset=ends.get(partition, UNKNOWN))
        for partition, one in sorted(progress.items())
    ]


def _newest(found: list[PartitionProgress]) -> list[PartitionProgress]:
    """Return each partition's newest report: during a takeover two refreshers may report a partition."""
    newest = {one.partition: one for one in sorted(found, key=lambda one: one.applied_offset)}
    return [newest[partition] for partition in sorted(newest)]


async def _or_none(asked: Awaitable[T]) -> T | None:
    try:
        return await asked
    except FreshetError as exc:
        log.info("freshness_part_silent", error=type(exc).__name__, reason=exc.message)
        return None


LAG_UNITS: Mapping[str, str] = {
    **dict.fromkeys(("encoder", "refresher"), "records"),
    **dict.fromkeys(("candidates", "reranker"), "seconds"),
}
_FRESH_S, _LOOK_EVERY_S = 1.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHealth:
    """A part. problem: why it is not ready, else "". started: whether it was ever ready.

    minutes: the part's rows of `Minutes.last`.
    """

    name: str
    problem: str
    started: bool
    effect: str
    lag_unit: str
    minutes: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The answer. since_ms: when this process started. first_ms: start of the first minute.

    last_s: seconds of the last minute so far.
    """

    since_ms: int
    first_ms: int
    last_s: float
    parts: Sequence[PartHealth]


class GetHealth:
    """GetHealth. Calls within a second share a check. A check also runs every ten seconds. All version sets share
    the gateway's `minutes`.
    """

    def __init__(self, ports: Ports, freshness: GetFreshness, minutes: Minutes) -> None:
        self._ports, self._freshness, self._minutes = ports, freshness, minutes
        self._lock = asyncio.Lock()
        self._looked_s, self._problems, self._started = float("-inf"), dict[str, str](), set[str]()

    async def __call__(self, minutes: int) -> HealthReport:
        """Return each part's state, and the newest minutes. Raises: InvalidRequest."""
        if minutes > MINUTES:
            raise InvalidRequest.of("minutes", minutes, f"0-{MINUTES}")
        problems = await self.look()
        first_ms, last_s, rows = self._minutes.last(minutes)
        return HealthReport(
            since_ms=self._minutes.since_ms,
            first_ms=first_ms,
            last_s=last_s,
            parts=[
                PartHealth(
                    name=name,
                    problem=problems[name],
                    started=name in self._started,
                    effect=EFFECTS[name],
                    lag_unit=LAG_UNITS.get(name, ""),
                    minutes=of_part,
                )
                for name, of_part in zip(PARTS, rows, strict=True)
                if name in problems
            ],
        )

    async def look(self) -> Mapping[str, str]:
        """Check all parts, unless done recently; return why each is not ready, "" if it is."""
        async with self._lock:
            if time.monotonic() - self._looked_s >= _FRESH_S:
                asked = asyncio.gather(self._ports.parts.problems(_TIMEOUT_S), self._freshness())
                problems, report = await asked
                self._problems = {"gateway": ""} | dict(problems)
                self._started |= {name for name, problem in self._problems.items() if not problem}
                self._minutes.seen(self._problems, _lags(report))
                self._looked_s = time.monotonic()
        return self._problems

    async def look_now(self) -> float:
        """Check; return the seconds until the next check, at most until the end of the minute."""
        await self.look()
        return min(_LOOK_EVERY_S, self._minutes.left_s + 0.01)


def _lags(report: FreshnessReport) -> dict[str, float]:
    found = {"encoder": _waiting(report.interactions), "refresher": _waiting(report.attributions)}
    for name, index in (("candidates", report.candidates), ("reranker", report.reranker)):
        found[name] = None if index is None else index.freshness.lag_seconds
    return {name: lag for name, lag in found.items() if lag is not None}


def _waiting(partitions: Sequence[PartitionProgress]) -> float | None:
    known = [one for one in partitions if one.end_offset != UNKNOWN]
    return float(sum(max(0, one.end_offset - 1 - one.applied_offset) for one in known)) if known else None


DEFAULT_LETTERS, MAX_LETTERS = 50, 200
_LETTERS_S = 20.0


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """ListDeadLetters and ReplayDeadLetter."""

    log: DeadLetterLog

    async def newest(self, topic: str, max_letters: int) -> tuple[Sequence[StoredLetter], bool]:
        """Return a topic's newest letters ("": of each topic), and whether there are older ones.

        Raises: InvalidRequest; DependencyUnavailable.
        """
        if max_letters > MAX_LETTERS:
            raise InvalidRequest.of("max_letters", max_letters, f"0-{MAX_LETTERS}")
        letters, has_older = await self.log.newest((_checked(topic),) if topic else LETTERED, _LETTERS_S)
        counts: Counter[str] = Counter()
        shown = []
        for letter in letters:
            counts[letter.topic] += 1
            if counts[letter.topic] <= (max_letters or DEFAULT_LETTERS):
                shown.append(letter)
        return shown, has_older or len(shown) < len(letters)

    async def replay(self, topic: str, place: Position, *, preview: bool) -> Replayed:
        """Write the record again, unless it was replayed or a later change would be undone.

        Raises: InvalidRequest; NotFound; DependencyUnavailable.
        """
        if place.partition < 0 or place.offset < 0:
            raise InvalidRequest.of("position", f"{place.partition}:{place.offset}", "as ListDeadLetters has it")
        return await self.log.replay(_checked(topic), place, preview=preview, timeout_s=_LETTERS_S)


def _checked(topic: str) -> str:
    if topic not in LETTERED:
        raise InvalidRequest.of("topic", topic[:80], ", ".join(LETTERED))
    return topic
