"""GetHealth: check every part, and add its calls by the minute.

Callers share a check of the last second. Without callers, one runs every ten seconds.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.contracts.processes import EFFECTS
from services.gateway.get_freshness import FreshnessReport, GetFreshness
from services.gateway.metrics import MINUTES, PARTS, Minutes
from services.gateway.ports import UNKNOWN, PartitionProgress, Ports
from services.platform.errors import InvalidRequest

LAG_UNITS: Mapping[str, str] = {
    **dict.fromkeys(("encoder", "refresher"), "records"),
    **dict.fromkeys(("candidates", "reranker"), "seconds"),
}
_TIMEOUT_S, _FRESH_S, _LOOK_EVERY_S = 1.0, 1.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHealth:
    """A part. problem: why it is not ready, else "". started: whether it was ever ready. minutes: as `Minutes.last`."""

    name: str
    problem: str
    started: bool
    effect: str
    lag_unit: str
    minutes: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The answer. since_ms: start of this process. first_ms: begin of the first minute. last_s: length of the last."""

    since_ms: int
    first_ms: int
    last_s: float
    parts: Sequence[PartHealth]


class GetHealth:
    """The handler. All version sets share the gateway's `minutes`."""

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
        """Check; return the seconds until the next check, at the latest the end of the minute."""
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
